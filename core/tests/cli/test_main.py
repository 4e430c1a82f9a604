"""Statuses, messages, help, what is imported, and commands of plugins."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import rabbet as package
from rabbet.cli import main as main_module
from rabbet.cli.extensions import merge_commands
from rabbet.config.flags import fields, flags
from rabbet.errors import EngineDeadError

Run = Callable[..., tuple[int, str, str]]


def test_version(rabbet: Run) -> None:
    assert rabbet("--version") == (0, f"rabbet {package.__version__}\n", "")


def test_help_names_every_command(rabbet: Run) -> None:
    status, out, _ = rabbet("--help")
    assert status == 0
    for command in main_module._COMMANDS:
        assert command in out


def test_the_list_of_commands_is_complete() -> None:
    named = {command.name or command.callback.__name__ for command in main_module.app.registered_commands}
    groups = {group.name for group in main_module.app.registered_groups}
    assert named | groups == set(main_module._COMMANDS)


def test_help_of_serve_has_every_option_with_its_variable_and_default(rabbet: Run) -> None:
    status, out, _ = rabbet("serve", "--help")
    assert status == 0
    for flag in fields().values():
        assert flag.environment in out or any(
            other.environment in out for other in flags().values() if other.path == flag.path
        )
    for text in (
        "The HTTP server",
        "The KV cache",
        "Which plugins may be used",
        "--[no-]enforce-eager",
        "-tp, --tensor-parallel-size",
        "default 8000, RABBET_PORT",
    ):
        assert text in out  # fmt: skip


@pytest.mark.parametrize("width", [80, 60])
def test_no_name_is_cut_in_a_narrow_terminal(rabbet: Run, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, _ = rabbet("serve", "--help=all")
    assert status == 0
    words = set(out.replace("--[no-]", "--").replace("]", " ").split())
    for flag in fields().values():
        same = [other for other in flags().values() if other.path == flag.path]
        shown = [other for other in (flag, *same) if f"--{other.name}" in words]
        assert shown and any(other.environment in words for other in shown), flag.name
    # What is longer than the terminal is one word that nothing could be done about.
    assert all(len(line) <= width or len(line.split()) <= 2 for line in out.splitlines())


def test_help_can_be_searched(rabbet: Run) -> None:
    status, out, _ = rabbet("serve", "--help=block")
    assert status == 0
    assert "--block-size" in out and "--port" not in out
    status, _, error = rabbet("serve", "--help=blokc-size")
    assert status == 2 and "did you mean block-size" in error


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["serve"], 2, "no model was given: rabbet serve MODEL"),
        (["serve", "m", "--max-modl-len", "3"], 2, "there is no option --max-modl-len; did you mean max-model-len"),
        (["serve", "m", "--swap-space", "3"], 2, "--swap-space is gone"),
        (["serve", "m", "--config", "/nowhere/c.yaml"], 2, "/nowhere/c.yaml cannot be read"),
        (["serve", "m", "-dp", "2"], 2, "tensor parallelism only"),
        (["bench", "throughput"], 2, "no model was given"),
        (["bench", "latency", "m", "--max-num-seqs", "x"], 2, "--max-num-seqs is 'x'"),
        (["plugins", "list", "--kind", "atention"], 2, "did you mean attention"),
        (["plugins", "list", "--plugins-deny", "nobody-has-this"], 2, "matches no installed plugin"),
        (["plugins", "info", "nobody-has-this"], 2, "no installed plugin is named"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9/v1"),
        (["chat", "--url", "http://[", "-q", "x"], 1, "no server answers"),
        (["complete", "--url", "nonsense", "-q", "x"], 1, "no server answers"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9/v1"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_status(rabbet: Run, words: list[str], status: int, message: str) -> None:
    actual, out, error = rabbet(*words)
    assert actual == status, error
    assert out == ""
    assert error.startswith("rabbet: error: ") and message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["frob"],
        ["chat", "--frob"],
        ["bench", "throughput", "--input-len", "5:2"],
        ["bench", "serve", "--num-clients", "0"],
    ],
)
def test_wrong_usage_has_status_2(rabbet: Run, words: list[str]) -> None:
    assert rabbet(*words)[0] == 2


def test_debug_shows_where_it_went_wrong(rabbet: Run) -> None:
    status, _, error = rabbet("serve", "m", "--frob", "1", "--log-level", "debug")
    assert status == 2
    assert "Traceback" in error and error.splitlines()[-1].startswith("rabbet: error: there is no option --frob")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (KeyError("x"), "KeyError: 'x'; this is a fault of Rabbet or of a plugin: --log-level debug shows where"),
        (EngineDeadError("the engine ended with status 7"), "the engine ended with status 7"),
    ],
)
def test_faults_are_one_line_too(rabbet: Run, monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str) -> None:
    import rabbet.server.run as run_module

    def serve(engine: Any, server: Any) -> int:
        raise raised

    monkeypatch.setattr(run_module, "serve", serve)
    assert rabbet("serve", "m") == (1, "", f"rabbet: error: {message}\n")


@pytest.mark.parametrize(
    "words", [("--version",), ("plugins", "list"), ("collect-env",), ("serve", "--help")], ids=" ".join
)
def test_output_that_nobody_can_take_is_no_fault_of_ours(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rabbet", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    said = "the output cannot be written: No space left on device; free space, or send it elsewhere"
    assert (done.returncode, done.stderr) == (1, f"rabbet: error: {said}\n")


def test_a_file_that_finds_no_room_is_named(rabbet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import rabbet.server.run as run_module

    def serve(engine: Any, server: Any) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/some/file")

    monkeypatch.setattr(run_module, "serve", serve)
    said = f"/some/file cannot be written: {os.strerror(errno.EDQUOT)}; free space, or send it elsewhere"
    assert rabbet("serve", "m") == (1, "", f"rabbet: error: {said}\n")


@pytest.mark.parametrize("status", [0, 1, 3])
def test_serve_hands_over_both_configurations_and_passes_the_status_on(
    rabbet: Run, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    import rabbet.server.run as run_module

    seen: list[Any] = []
    monkeypatch.setattr(run_module, "serve", lambda engine, server: seen.extend((engine, server)) or status)
    assert rabbet("serve", "some/model", "--port", "8123", "-tp", "2")[0] == status
    assert (seen[0].model.model, seen[0].parallel.tensor_parallel_size, seen[1].port) == ("some/model", 2, 8123)


def run_child(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rabbet", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["serve", "--help"], ["plugins", "list"], ["bench", "--help"]]
)
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom rabbet.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'tokenizers', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["serve", "--help"], ["plugins", "list"]])
def test_a_reader_that_goes_away_is_no_fault(words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rabbet", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert error == ""


def test_collect_env_shows_no_secret(rabbet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBET_API_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    status, out, _ = rabbet("collect-env")
    assert status == 0
    assert "rabbet-core" in out and "torch" in out and "## Plugins" in out
    assert "hunter2" not in out


# ---- commands of plugins


def added() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def polish_wheels(text: str) -> None:
        typer.echo(f"polished {text}")

    @app.command(name="serve")
    def usurper() -> None:
        typer.echo("mine now")

    inner = typer.Typer()
    inner.command("go")(lambda: typer.echo("went"))
    inner.command("stay")(lambda: typer.echo("stayed"))
    app.add_typer(inner, name="tool")
    app.add_typer(inner, name="bench")
    return app


def test_plugins_add_commands_but_replace_none(caplog: pytest.LogCaptureFixture) -> None:
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command(name="serve")(lambda: typer.echo("ours"))
    group = typer.Typer()
    group.command("go")(lambda: typer.echo("ours"))
    app.add_typer(group, name="bench")
    with caplog.at_level(logging.WARNING):
        merge_commands(app, added())
    runner = CliRunner()
    assert runner.invoke(app, ["polish-wheels", "it"]).output == "polished it\n"
    assert runner.invoke(app, ["serve"]).output == "ours\n"
    assert runner.invoke(app, ["tool", "go"]).output == "went\n"
    assert runner.invoke(app, ["bench", "stay"]).output == "stayed\n"
    assert runner.invoke(app, ["bench", "go"]).output == "ours\n"
    assert [record.message for record in caplog.records] == [
        f"a plugin adds the command {name!r}, which there is already; it is left out" for name in ("serve", "go")
    ]


HOOKS = """
from rabbet.contracts.hooks import Hooks, hookimpl
from rabbet.contracts.registration import register_hooks


@register_hooks("polish")
class Polish(Hooks):
    @hookimpl
    def add_cli_commands(self, app):
        @app.command()
        def polish(text: str) -> None:
            print("polished", text)
"""


def test_a_command_of_a_hook_plugin_runs_if_the_operator_allows_it(tmp_path: Path) -> None:
    (tmp_path / "polish.py").write_text(HOOKS)
    environment = {"RABBET_PLUGIN": str(tmp_path / "polish.py"), "RABBET_PLUGINS_ALLOW": "hooks/polish"}
    done = run_child("polish", "wheels", **environment)
    assert (done.returncode, done.stdout) == (0, "polished wheels\n"), done.stderr
    assert "polish" in run_child("--help", **environment).stdout
    denied = run_child(
        "polish", "wheels", RABBET_PLUGIN=environment["RABBET_PLUGIN"], RABBET_PLUGINS_DENY="hooks/polish"
    )
    assert denied.returncode == 2 and "polished" not in denied.stdout


@pytest.mark.parametrize("variables", [{"RABBET_PORT": "x"}, {"RABBET_PLUGINS_DENY": "nobody-has-this"}])
def test_help_works_in_a_wrong_environment(
    rabbet: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rabbet("--help")[0] == 0
    assert rabbet("serve", "--help")[0] == 0
    assert rabbet("serve", "m", "--port", "x")[0] == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], True), (["--help"], True), (["--version"], False), (["serve", "--help"], False), (["polish"], True), (["plugins", "list"], False)],
)  # fmt: skip
def test_plugins_are_asked_for_commands_only_where_one_may_be_meant(words: list[str], expected: bool) -> None:
    assert main_module._may_mean_a_plugin(words) is expected
