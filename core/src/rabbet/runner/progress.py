"""The progress bar of loading weights: bytes, speed, time left; on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rabbet.config.resolved import ResolvedConfig

__all__ = ["loading_progress"]


@contextmanager
def loading_progress(resolved: ResolvedConfig, *, is_shown: bool) -> Iterator[Callable[[str, int], None] | None]:
    """A callback for the loader, or None where no bar is wanted."""
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    infos = resolved.composition.load("weights").infos(resolved.files)
    columns = (
        TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[name]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None if not infos else float(len(infos)), name="")
        bar.columns = (TextColumn("loading weights"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        yield lambda name, _size: bar.update(task, advance=1, name=name)
