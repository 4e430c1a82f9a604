"""The hook plugin that adds ``bench`` and ``bisect`` to ``rabbet plugins``; imports nothing heavy before they run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rabbet.contracts import register_hooks
from rabbet.contracts.hooks import Hooks, hookimpl

__all__ = ["SdkHooks"]

_Json = Annotated[bool, typer.Option("--json", help="Print JSON")]


@register_hooks("sdk")
class SdkHooks(Hooks):
    """Adds commands; listens to nothing else."""

    @hookimpl
    def add_cli_commands(self, app: Any) -> None:
        """Both join the group that is there."""
        group = typer.Typer()
        group.command()(bench)
        group.command(context_settings={"ignore_unknown_options": True})(bisect)
        app.add_typer(group, name="plugins")


def bench(
    kind: Annotated[str, typer.Argument(help="attention or linear")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="These only; all by default")] = None,
    device: Annotated[str, typer.Option("--device", help="Device to compute on")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="Type of inputs")] = "float32",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Timed pairs a shape")] = 15,
    *,
    as_json: _Json = False,
) -> None:
    """Time kernels beside the plain reference, pair by pair, after a check of their values; ratio 0.5: half its time."""
    from rabbet_sdk.tools.bench import bench_kind

    rows = bench_kind(kind, names or (), device=device, dtype=dtype, rounds=rounds)
    if as_json:
        typer.echo(json.dumps({"kind": kind, "device": device, "dtype": dtype, "rows": rows}, indent=1))
        return
    for row in rows:
        told = row["problem"] or f"{row['ratio']:.2f} of the reference ({row['median_us']:.0f} us)"
        typer.echo(f"{row['name']:24} {row['shape']:32} {told}")


def bisect(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command that fails")],
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds a run; a run that takes longer fails")] = 600,
    *,
    as_json: _Json = False,
) -> None:
    """Find the plugins without which COMMAND no longer fails. Exit code 1 if there are none."""
    from rabbet_sdk.tools.bisect import bisect_command

    found = bisect_command(command, timeout_s=timeout)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        for run in found["runs"]:
            typer.echo(f"{run['outcome']:6} without {', '.join(run['denied']) or 'nothing denied'}")
        typer.echo(
            f"culprit: {', '.join(found['culprits']) or 'none found'}{': ' + found['note'] if found['note'] else ''}"
        )
    if not found["culprits"]:
        raise typer.Exit(1)
