"""The progress bar of loading weights: share, bytes, time left; on a terminal only."""

from __future__ import annotations

import math
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
    from rich.filesize import decimal
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    infos = resolved.composition.load("weights").infos(resolved.files)
    # By numbers of elements, which headers tell of packed tensors too; what came out of them is known only then.
    num_elements = {info.name: math.prod(info.shape) for info in infos}
    columns = (
        TextColumn("loading weights"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[loaded]}"),
        TimeRemainingColumn(), TextColumn("{task.fields[name]}"),
    )  # fmt: skip
    size_bytes = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(num_elements.values()) or None, loaded="", name="")

        def advance(name: str, size: int) -> None:
            nonlocal size_bytes
            size_bytes += size
            bar.update(task, advance=num_elements.get(name, 0), loaded=decimal(size_bytes), name=name)

        yield advance
