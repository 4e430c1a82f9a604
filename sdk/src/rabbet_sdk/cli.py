"""The command ``rabbet-sdk``."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from rabbet.errors import RabbetError

__all__ = ["app", "main"]

app = typer.Typer(
    name="rabbet-sdk",
    help="Make, prove and certify plugins of Rabbet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
_Plugin = Annotated[str, typer.Argument(metavar="KIND/NAME", help="The plugin, as rabbet plugins list names it")]
_Tests = Annotated[
    Path | None, typer.Option("--tests", help="Test file whose classes for this plugin set what the suite cannot know")
]
_Device = Annotated[str, typer.Option("--device", help="Device that the tests compute on")]


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="Kind of plugin, e.g. attention")],
    name: Annotated[str, typer.Argument(help="Name that users choose it by; for models the architecture")],
    distribution: Annotated[str | None, typer.Option("--distribution", help="Name of the distribution")] = None,
    directory: Annotated[Path | None, typer.Option("--directory", help="Where to write it")] = None,
    as_json: _Json = False,
) -> None:
    """Write a distribution with a working implementation, its manifest, its conformance test and CI."""
    from rabbet_sdk.scaffold import names_for, new_plugin

    names = names_for(kind, name, distribution)
    target = directory or Path(names.distribution)
    files = new_plugin(names, target)
    if as_json:
        _print(dataclasses.asdict(names) | {"files": [str(file) for file in files]})
        return
    typer.echo(f"wrote {names.distribution} ({names.kind}/{names.name}) into {target}; next:")
    typer.echo(f"  pip install -e '{target}[test]' && python -m pytest {target}/tests")


@app.command()
def check(
    plugin: _Plugin,
    device: _Device = "cpu",
    level: Annotated[int, typer.Option("--level", min=1, max=5, help="Highest level of tests")] = 5,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of random inputs")] = None,
    tests: _Tests = None,
    as_json: _Json = False,
) -> None:
    """Run the conformance suite of an installed plugin; no test file is needed. Exit code 1 if it fails."""
    from rabbet_sdk.check import check_plugin

    result = check_plugin(plugin, device=device, level=level, seed=seed, tests=tests)
    if as_json:
        shown = {key: value for key, value in dataclasses.asdict(result).items() if key != "output"}
        _print(shown | {"passed": result.is_passed})
    else:
        for test, detail in result.failures:
            typer.echo(f"failed: {test}: {detail}")
        typer.echo(result.badge)
    if not result.is_passed:
        raise typer.Exit(1)


@app.command()
def certify(
    plugin: _Plugin,
    device: _Device = "cpu",
    wheel: Annotated[Path | None, typer.Option("--wheel", help="The wheel that is installed, to compare with")] = None,
    output: Annotated[
        Path, typer.Option("--output", help="Directory for KIND-NAME.json; where rabbet looks by default")
    ] = Path("~/.config/rabbet/certificates"),
    tests: _Tests = None,
    as_json: _Json = False,
) -> None:
    """Run the whole suite on an installed wheel and write its certificate. Exit code 1 if the suite fails."""
    from rabbet_sdk.certify import certificate_of, write_certificate
    from rabbet_sdk.check import check_plugin

    result = check_plugin(plugin, device=device, tests=tests)
    certificate = certificate_of(result, arch=_arch(device), wheel=wheel)
    file = write_certificate(certificate, output.expanduser())
    if as_json:
        _print(certificate | {"file": str(file)})
    else:
        typer.echo(f"{result.badge}\nwrote {file}")
    if not result.is_passed:
        raise typer.Exit(1)


@app.command()
def compose(
    plugins: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND/NAME]...", help="Of their kinds only these; all by default")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Run installed plugins together, each pair of two kinds at least once, and compare tokens. Exit code 1 if one fails."""
    from rabbet_sdk.compose import axes_of
    from rabbet_sdk.compose import compose as run

    found = run(axes_of(plugins or ()))
    failed = [row for row in found["runs"] if row["outcome"] == "failed"]
    if as_json:
        _print(found)
    else:
        for row in found["runs"]:
            typer.echo(f"{row['outcome']}: {', '.join(f'{kind}/{name}' for kind, name in row['composition'].items())}")
            if row["detail"]:
                typer.echo(f"  {row['detail']}\n  not without: {' and '.join(row['culprits']) or 'each of them'}")
        for row in found["refused"]:
            typer.echo(f"refused: {' with '.join(row['names'])}: {row['reason']}")
        pairs = found["pairs"]
        typer.echo(
            f"{len(found['runs']) - len(failed)} pass, {len(failed)} fail; {pairs['covered']} of {pairs['all']} pairs ran, "
            f"{pairs['refused']} are refused"
        )
    if failed or not found["runs"]:
        raise typer.Exit(1)


@app.command()
def mutants(
    kinds: Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="These kinds only")] = None,
    as_json: _Json = False,
) -> None:
    """Hunt the zoo: each plugin with a planted fault must be caught by the test named for it. Exit code 1 if one lives."""
    from rabbet_sdk.mutants import hunt, mutant_kinds

    known = mutant_kinds()
    if unknown := [kind for kind in kinds or () if kind not in known]:
        raise typer.BadParameter(f"no mutants of the kind {', '.join(unknown)}; there are: {', '.join(known)}")
    with tempfile.TemporaryDirectory() as directory:
        kills = hunt(kinds or known, Path(directory))
    killed = sum(kill.killed for kill in kills)
    if as_json:
        rows = [
            {
                "kind": k.kind,
                "mutant": k.mutant.name,
                "test": k.mutant.caught_by,
                "killed": k.killed,
                "detail": k.detail,
            }
            for k in kills
        ]
        _print({"killed": killed, "mutants": len(kills), "rows": rows})
    else:
        for kill in kills:
            mark = "killed" if kill.killed else "LIVES "
            typer.echo(f"{mark}  {kill.kind}/{kill.mutant.name}  {kill.mutant.caught_by}")
        typer.echo(f"kill rate: {killed} of {len(kills)}")
    if killed != len(kills):
        raise typer.Exit(1)


@app.command()
def migrate(
    plugin: Annotated[str, typer.Argument(metavar="PLUGIN", help="A distribution, KIND/NAME, or KIND")],
    since: Annotated[
        str | None, typer.Option("--from", help="Contract version to start from; the declared one")
    ] = None,
    until: Annotated[str | None, typer.Option("--to", help="Contract version to arrive at; this core's")] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Directory for a migration page a contract")] = None,
    as_json: _Json = False,
) -> None:
    """Tell what changed between two versions of the contracts that a plugin is written against."""
    from rabbet_sdk.migrate import migrate as compare
    from rabbet_sdk.migrate import migration_page

    rows = compare(plugin, since=since, until=until)
    for row in rows if page is not None else ():
        assert page is not None
        page.mkdir(parents=True, exist_ok=True)
        (page / f"{row['kind']}-{row['to']}.md").write_text(migration_page(row), encoding="utf-8")
    if as_json:
        _print(rows)
        return
    for row in rows:
        typer.echo(f"{row['kind']}: from {row['from']} to {row['to']}: {len(row['changes'])} changes")
        for item in row["changes"]:
            typer.echo(f"  {item['level']}: {item['change']}")


def _arch(device: str) -> str:
    """Architecture of the device as its platform tells it; empty where none is installed."""
    from rabbet.registry.catalog import Catalog
    from rabbet.registry.loader import load_entry

    for entry in Catalog.scan().of_kind("platform"):
        platform = load_entry(entry)
        if platform.device_type == device.partition(":")[0] and (found := platform.detect()):
            return str(found[0].arch)
    return ""


def _print(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1, default=str))


def main() -> NoReturn:
    """Run the command; what went wrong is one line, without a traceback."""
    from rabbet_sdk.certify import CertifyError
    from rabbet_sdk.scaffold import ScaffoldError

    try:
        app()
    except (RabbetError, ScaffoldError, CertifyError) as error:
        print(f"rabbet-sdk: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(0)
