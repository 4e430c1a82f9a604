"""``rabbet plugins``: what is installed, what would be chosen and why. Nothing but ``doctor`` imports a plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rabbet._util.files import read_text
from rabbet.errors import RabbetError

if TYPE_CHECKING:
    from rabbet.registry.catalog import Catalog

__all__ = ["app"]

app = typer.Typer(help="Show what is installed, what would be chosen and why.", no_args_is_help=True)
_RAW = {"allow_extra_args": True, "ignore_unknown_options": True}
_Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
_Kind = Annotated[str | None, typer.Option("--kind", help="This kind only")]


@app.command(name="list", context_settings=_RAW)
def list_(context: typer.Context, kind: _Kind = None, as_json: _Json = False) -> None:
    """List every contribution with its owner, contract and state, under the --plugins-* options if given."""
    from rabbet.contracts.kinds import KINDS
    from rabbet.errors import UnknownPluginError
    from rabbet.registry.describe import list_plugins
    from rabbet.registry.names import nearest

    if kind is not None and kind not in KINDS:
        close = nearest(kind, KINDS)
        raise UnknownPluginError(
            f"there is no kind {kind!r}; {'did you mean ' + close[0] if close else ', '.join(KINDS)}"
        )
    catalog = _catalog(context.args)
    rows = list_plugins(catalog, kind)
    if as_json:
        typer.echo(json.dumps({"plugins": rows, "problems": list(catalog.problems)}, indent=2))
        return
    _table(rows, ("kind", "name", "distribution", "version", "contract", "priority", "state", "certificate", "reason"))
    for problem in catalog.problems:
        typer.echo(f"problem: {problem}")


@app.command(context_settings=_RAW)
def info(context: typer.Context, name: str, as_json: _Json = False) -> None:
    """Show everything that is known of NAME (or KIND/NAME) without importing it."""
    from rabbet.registry.describe import plugin_info

    rows = plugin_info(_catalog(context.args), name)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        for key, value in row.items():
            typer.echo(f"{key:14} {value if value not in ([], {}, '') else '-'}")
        typer.echo("")


@app.command(context_settings=_RAW)
def why(
    context: typer.Context,
    kind: str,
    name: Annotated[str | None, typer.Option("--name", help="Explain an explicit choice")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Explain the choice for this model")] = None,
    device: Annotated[str, typer.Option("--device", help="For a machine with this device: cpu, cuda, sm_90")] = "",
    arch: Annotated[str, typer.Option("--arch", help="For a machine of this architecture")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="For this dtype")] = "",
    *,
    as_json: _Json = False,
) -> None:
    """Explain what would be chosen for KIND and what would be passed over; takes the options of rabbet serve too.

    With --device or --arch the answer is for that machine, from manifests alone; nothing is imported.
    """
    from rabbet.contracts.kinds import KINDS
    from rabbet.registry.describe import explain, machine, reasons

    is_elsewhere = bool(device or arch)
    if model is None or is_elsewhere or kind not in KINDS:
        query = machine(device, arch, dtype)
        if model is not None and is_elsewhere:
            name = name or _read_config(model, kind, query)
        lines, data = explain(
            _catalog(context.args), kind, query if is_elsewhere else None, name=name, is_elsewhere=is_elsewhere
        )
    else:
        from rabbet.config.load import parse_configs
        from rabbet.config.resolve import resolve

        options = [*(["--dtype", dtype] if dtype else []), *context.args]
        engine, _ = parse_configs(["--model", model, *options])
        decision = resolve(engine, is_server=True).composition.get(kind)
        lines = list(decision.lines()) if decision else [f"{kind}: not needed for {model}"]
        data = reasons(decision) if decision else {"kind": kind, "name": None, "rejected": []}
    typer.echo(json.dumps(data, indent=2) if as_json else "\n".join(lines))


def _read_config(model: str, kind: str, query: Any) -> str | None:
    """Add what config.json says to the query; returns the name that it asks for, if it names one of this kind."""
    path = Path(model).expanduser() / "config.json"
    try:
        config = json.loads(read_text(path))
        text = config.get("text_config") or config
        query.dtype = query.dtype or text.get("dtype") or text.get("torch_dtype") or ""
        if (heads := text.get("num_attention_heads")) and (size := text.get("hidden_size")):
            query.head_dim = text.get("head_dim") or size // heads
        names = {
            "model": (config.get("architectures") or [None])[0],
            "quantization": (config.get("quantization_config") or {}).get("quant_method"),
        }
    except (OSError, ValueError, AttributeError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise typer.BadParameter(f"--model {model}: {path} cannot be read: {error}") from error
    return names.get(kind)


@app.command(context_settings=_RAW)
def doctor(
    context: typer.Context, name: Annotated[str | None, typer.Argument()] = None, as_json: _Json = False
) -> None:
    """Import each plugin in a process of its own; report time, memory, heavy modules and failures."""
    import sys

    from rabbet.registry.describe import doctor as examine
    from rabbet.registry.describe import shadowed

    if name is not None and name.startswith("-"):
        context.args.insert(0, name)
        name = None

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            typer.echo(text, err=True)

    rows, doubles = examine(_catalog(context.args), name, progress), shadowed()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _table(rows, ("kind", "name", "distribution", "result", "detail"))
        for problem in doubles:
            typer.echo(f"problem: {problem}")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


_File = Annotated[str, typer.Argument(help="Lock file")]


@app.command(context_settings=_RAW)
def lock(context: typer.Context, file: _File = "rabbet.lock", as_json: _Json = False) -> None:
    """Write which plugins are installed: versions, hashes, contracts; rabbet serve --plugins-locked FILE checks it."""
    state = _state(context, file)
    text = json.dumps(state, indent=2) + "\n"
    try:
        Path(file).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RabbetError(f"the lock file {file} cannot be written: {error}") from error
    count = len(state["distributions"])
    typer.echo(text if as_json else f"{file}: {count} distributions", nl=not as_json)


@app.command(context_settings=_RAW)
def verify(context: typer.Context, file: _File = "rabbet.lock", as_json: _Json = False) -> None:
    """Compare what is installed with a lock file; print each difference and end with status 1 if there is one."""
    from rabbet.registry.lock import differences, read_lock

    rows = differences(read_lock(Path(file)), _state(context, file))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        _table(rows, ("place", "locked", "here"))
    else:
        typer.echo(f"{file}: no difference")
    if rows:
        raise typer.Exit(1)


def _state(context: typer.Context, file: str) -> dict[str, Any]:
    """What is installed, whatever the policy; one-file plugins are those of the options."""
    from rabbet.config.load import parse_configs
    from rabbet.registry.discover import discover
    from rabbet.registry.lock import locked_state

    if file.startswith("-"):
        raise typer.BadParameter(f"{file} stands where the lock file belongs: rabbet plugins lock FILE [OPTIONS]")
    return locked_state(discover().entries, parse_configs(context.args)[0].plugins.files)


def _catalog(options: list[str]) -> Catalog:
    """What is installed, under the policy that flags and environment give."""
    from rabbet.config.load import parse_configs
    from rabbet.config.policy import policy_of
    from rabbet.registry.catalog import Catalog

    return Catalog.scan(policy_of(parse_configs(options)[0]))


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Aligned columns, never folded: lines stay whole for grep and for a narrow terminal's own wrapping."""
    cells = [[str(row[column]) for column in columns] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
