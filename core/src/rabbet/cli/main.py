"""The command ``rabbet``. Imports as little as possible: torch, transformers and the server come in with their command."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

from rabbet import __version__
from rabbet._util.log import log_to_stderr
from rabbet.cli import bench, plugins
from rabbet.cli.extensions import command_names
from rabbet.errors import ConfigError, PluginError, RabbetError, shorten

__all__ = ["app", "main"]

_COMMANDS = ("serve", "chat", "complete", "bench", "plugins", "collect-env")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RAW = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    name="rabbet",
    help="Serve large language models with an engine put together from plugins.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="rabbet serve MODEL starts a server; rabbet serve --help lists its options by group.",
)
app.add_typer(bench.app, name="bench")
app.add_typer(plugins.app, name="plugins")

_Url = Annotated[str, typer.Option("--url", help="Base URL of the server, with or without /v1")]
_Key = Annotated[str | None, typer.Option("--api-key", help="API key", envvar="RABBET_API_KEY")]
_Model = Annotated[str | None, typer.Option("--model", help="Model; the server's first by default")]
_MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Limit on new tokens", min=1)]
_Temperature = Annotated[
    float | None, typer.Option("--temperature", help="Temperature; the server's default if not given", min=0)
]
_Quick = Annotated[str | None, typer.Option("--quick", "-q", help="Ask this once, print the answer and end")]
_DEFAULT_URL = "http://127.0.0.1:8000/v1"


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"rabbet {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version and end")
    ] = False,
) -> None:
    """Serve large language models with an engine put together from plugins."""


@app.command(context_settings={**_RAW, "help_option_names": []}, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Start a server in OpenAI's shape: rabbet serve MODEL [OPTIONS]; --help lists all options by group."""
    arguments = list(context.args)
    wanted = [item for item in arguments if item in ("-h", "--help") or item.startswith("--help=")]
    if wanted:
        from rabbet.cli.help import print_serve_help

        print_serve_help(wanted[0].partition("=")[2])
        return
    from rabbet.config.load import parse_configs

    # So that what is told of the options themselves has the same form.
    _log("warning")
    engine, server = parse_configs(arguments)
    if not engine.model.model:
        raise ConfigError("no model was given: rabbet serve MODEL", field="model")
    _log(server.log_level)
    from rabbet.server.run import serve as run

    raise typer.Exit(run(engine, server))


@app.command()
def chat(
    url: _Url = _DEFAULT_URL,
    model: _Model = None,
    api_key: _Key = None,
    quick: _Quick = None,
    system: Annotated[str | None, typer.Option("--system", help="System message")] = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
) -> None:
    """Talk to a running server; answers are streamed, and their speed is shown."""
    from rabbet.cli.talk import Talk

    options = {"max_tokens": max_tokens, "temperature": temperature}
    Talk(url, model=model, api_key=api_key, options=options).chat(quick=quick, system=system)


@app.command()
def complete(
    prompt: Annotated[str | None, typer.Argument(help="Complete this once, print the text and end")] = None,
    *,
    url: _Url = _DEFAULT_URL,
    model: _Model = None,
    api_key: _Key = None,
    quick: _Quick = None,
    max_tokens: _MaxTokens = 128,
    temperature: _Temperature = None,
) -> None:
    """Complete texts with a running server: PROMPT, or each line that is typed in."""
    from rabbet.cli.talk import Talk

    if prompt is not None and quick is not None:
        raise ConfigError(
            f"the prompt is given twice: as PROMPT ({shorten(prompt)}) and with --quick ({shorten(quick)}); leave one out",
            field="prompt",
        )
    quick = quick if prompt is None else prompt
    options = {"max_tokens": max_tokens, "temperature": temperature}
    Talk(url, model=model, api_key=api_key, options=options).complete(quick=quick)


@app.command(name="collect-env")
def collect_env() -> None:
    """Print what a bug report needs: versions, hardware, plugins. No secrets."""
    from rabbet.cli.environment import report

    typer.echo(report())


def _log(level: str) -> None:
    log_to_stderr(level)
    # httpx tells of each request at info, which is noise beside a server's own lines.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING if level != "debug" else logging.DEBUG)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the console script: what goes wrong becomes one line and a status.

    Status 2: the configuration or the choice of plugins is wrong. 1: anything else. With ``--log-level debug`` (or
    RABBET_LOG_LEVEL) the place where it went wrong is printed too.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if _may_mean_a_plugin(words):
            from rabbet.cli.extensions import add_plugin_commands

            add_plugin_commands(app)
        return app(args=words, prog_name="rabbet")
    except BrokenPipeError:
        # The reader of our output went away (rabbet ... | head): nothing to complain about, now or at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except RabbetError as error:
        _fail(str(error), words, status=2 if isinstance(error, ConfigError | PluginError) else 1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            _fail(_fault(error), words, status=1)
        what = error.filename or "the output"
        _fail(f"{what} cannot be written: {error.strerror}; free space, or send it elsewhere", words, status=1)
    except Exception as error:  # noqa: BLE001 - the edge of the process: the user gets a line, not a page
        _fail(_fault(error), words, status=1)


def _fault(error: Exception) -> str:
    told = f"{type(error).__name__}: {error}"
    return f"{told}; this is a fault of Rabbet or of a plugin: --log-level debug shows where"


def _may_mean_a_plugin(words: list[str]) -> bool:
    """Whether plugins are asked for commands: where a word is none of ours, and for a list of commands."""
    names = [word for word in words if not word.startswith("-")]
    if names[:1] == ["plugins"]:
        return names[1:2] not in [[name] for name in command_names(plugins.app)]
    return names[0] not in _COMMANDS if names else bool({"-h", "--help"} & set(words)) or not words


def _fail(message: str, words: list[str], *, status: int) -> NoReturn:
    from rabbet.config.load import is_debug

    if is_debug(words):
        traceback.print_exc()
    typer.echo(f"rabbet: error: {message}", err=True)
    sys.exit(status)
