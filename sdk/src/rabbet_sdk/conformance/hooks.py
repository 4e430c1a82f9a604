"""The suite of hook plugins: they listen, quickly, and leave what they are shown, the process and core's routes as they were.

There are no claims; ``adds_routes`` of the manifest says whether ``add_http_routes`` is implemented.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from rabbet.contracts.hooks import Hooks, HookSpecs
from rabbet.contracts.observability import RequestRecord
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.outcome import level, unclaimed
from rabbet_sdk.conformance.subject import Subject

__all__ = ["HooksConformance"]

_HOOKS = sorted(name for name in vars(HookSpecs) if not name.startswith("_"))
_RECORD = RequestRecord(
    request_id="a", model="m", num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=2, finish_reason="stop",
    queued_s=0.1, time_to_first_token_s=0.2, total_s=0.5,
)  # fmt: skip
_RECORDS = (
    _RECORD,
    replace(_RECORD, finish_reason="error", num_output_tokens=0, time_to_first_token_s=None, total_s=0.0),
    replace(_RECORD, finish_reason="abort", request_id="é" * 300, model="", num_preemptions=7),
)
_SECRET = "s3cr3t-of-the-suite"
_QUICK_S = 0.02


class HooksConformance(PluginConformance):
    """Subclass, name the plugin, done.

    Attributes:
        llm: What ``add_http_routes`` is given as ``llm``.
        num_calls: Records of the test of memory.
    """

    kind = "hooks"
    llm: ClassVar[Any] = None
    num_calls: ClassVar[int] = 20_000
    knobs = PluginConformance.knobs | {"llm", "num_calls"}

    @pytest.fixture
    def plugin_object(self, subject: Subject) -> Iterator[Hooks]:
        """An instance; shut down afterwards."""
        made = subject.plugin_class()
        yield made
        _call(made, "on_shutdown")

    def test_hooks_are_those_of_the_contract(self, subject: Subject) -> None:
        """Each marked method is a hook and asks for arguments that it has, none is a coroutine, none lacks its mark."""
        import pluggy

        manager = pluggy.PluginManager("rabbet")
        manager.add_hookspecs(HookSpecs)
        # Raises for a hook or an argument that there is not.
        manager.register(subject.plugin_class(), name="subject")
        manager.check_pending()
        marked = {caller.name for caller in manager.get_hookcallers(manager.get_plugin("subject")) or ()}
        assert marked, "no method carries @hookimpl: nothing would ever be called"
        unmarked = [name for name in _HOOKS if hasattr(subject.plugin_class, name) and name not in marked]
        assert not unmarked, f"without @hookimpl, so never called: {', '.join(unmarked)}"
        never = [name for name in marked if inspect.iscoroutinefunction(getattr(subject.plugin_class, name))]
        assert not never, f"hooks are called, not awaited: {', '.join(never)}"

    def test_routes_are_declared(self, subject: Subject) -> None:
        """The operator allows a plugin with routes by its manifest: what is not written there must not come."""
        provided, has_routes = subject.entry.provided, hasattr(subject.plugin_class, "add_http_routes")
        assert provided is not None
        assert provided.adds_routes == has_routes, (
            f"adds_routes is {str(provided.adds_routes).lower()} in the manifest; add_http_routes is "
            f"{'there' if has_routes else 'not there'}"
        )

    def test_making_one_changes_nothing(self, subject: Subject) -> None:
        """Made twice in a process, as tools and a server do: environment, logging, signals and threads stay."""
        for _ in range(2):
            with _unchanged():
                made = subject.plugin_class()
                _call(made, "on_shutdown")

    def test_commands_have_names_of_their_own(self, plugin_object: Hooks) -> None:
        """New names, each with a help text; ``--help`` of the application works with them."""
        import typer
        from typer.testing import CliRunner

        from rabbet.cli.extensions import command_names, merge_commands
        from rabbet.cli.main import app as core

        added, whole = typer.Typer(), typer.Typer(help="core")
        if not _call(plugin_object, "add_cli_commands", app=added):
            unclaimed("add_cli_commands")
        names = list(command_names(added))
        taken = set(command_names(core)) - {str(group.name) for group in core.registered_groups}
        assert names and len(set(names)) == len(names), f"commands {names}"
        assert not taken & set(names), f"commands that are there already: {', '.join(sorted(taken & set(names)))}"
        merge_commands(whole, added)
        whole.command()(lambda: None)
        for words in ([], *([name] for name in names)):
            result = CliRunner().invoke(whole, [*words, "--help"])
            assert result.exit_code == 0, f"{' '.join(words)} --help ends with {result.exit_code}: {result.output}"

    def test_routes_shadow_nothing(self, plugin_object: Hooks) -> None:
        """Core's routes stay, and no new one answers their paths or any under ``/v1``."""
        from starlette.routing import Match

        from rabbet.config.schema import ServerConfig
        from rabbet.server.app import build_app
        from rabbet.server.state import ServerState

        app = build_app(ServerState(ServerConfig()))
        before, around = list(app.routes), (list(app.user_middleware), dict(app.exception_handlers))
        if not _call(plugin_object, "add_http_routes", app=app, llm=self.llm):
            unclaimed("add_http_routes")
        assert app.routes[: len(before)] == before, "routes of core are gone, or others stand before them"
        assert around == (list(app.user_middleware), dict(app.exception_handlers)), "middleware or handlers of errors"
        assert len(app.routes) > len(before), "no route was added"
        paths = {getattr(route, "path", "") for route in before} | {"/v1/no_such_route"}
        for route in app.routes[len(before) :]:
            found = [
                path
                for path in sorted(paths)
                if route.matches({"type": "http", "path": path, "method": "GET", "headers": []})[0] is not Match.NONE
            ]
            assert not found, f"the route {getattr(route, 'path', route)} answers {', '.join(found)}"

    def test_news_are_left_as_they_are(self, plugin_object: Hooks) -> None:
        """Every record and the configuration are taken, nothing of them is changed, and nothing else changes."""
        for hook, argument, values in (
            ("on_engine_ready", "config", (_config(),)), ("on_request_finished", "record", _RECORDS),
        ):  # fmt: skip
            for value in values:
                kept = copy.deepcopy(value)
                with _unchanged(threads=False):
                    _call(plugin_object, hook, **{argument: value})
                assert value == kept, f"{hook} changes what it is shown: {kept} is {value}"

    @level(3)
    def test_the_loop_goes_on(self, plugin_object: Hooks) -> None:
        """News come in the server's loop: whoever waits there for a disk or a network stops every stream."""
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            called = _call(plugin_object, "on_request_finished", record=_RECORD)
            seconds.append(time.perf_counter() - start)
            # The fastest counts: a busy machine is not the plugin's fault.
            if not called or seconds[-1] < _QUICK_S:
                return
        raise AssertionError(f"on_request_finished takes {min(seconds) * 1000:.0f} ms; at most {_QUICK_S * 1000:.0f}")

    @level(3)
    def test_memory_is_bounded_and_no_thread_stays(self, subject: Subject) -> None:
        """A server that runs for months does not grow, and ``on_shutdown`` ends what was started, called twice too."""
        before, made = set(threading.enumerate()), subject.plugin_class()
        _call(made, "on_engine_ready", config=_config())
        half = self.num_calls // 2
        for number in range(half):
            _call(made, "on_request_finished", record=replace(_RECORD, request_id=f"r{number}"))
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(half):
                _call(made, "on_request_finished", record=replace(_RECORD, request_id=f"s{number}"))
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        _call(made, "on_shutdown")
        _call(made, "on_shutdown")
        assert grown < 64 * half + (1 << 20), f"{grown} bytes more after {half} records"
        left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
        assert not left, f"threads stay after on_shutdown: {', '.join(left)}"

    def test_reports_are_fit_to_be_shown(self, plugin_object: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Checks are (name, passed, detail), sections title to text; neither tells a key or a token."""
        for name in ("RABBET_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ACME_PASSWORD"):
            monkeypatch.setenv(name, _SECRET)
        checks = (_call(plugin_object, "doctor_checks") or [None])[0]
        sections = (_call(plugin_object, "bug_report_sections") or [None])[0]
        for row in checks or ():
            assert isinstance(row, tuple) and [type(item) for item in row] == [str, bool, str], f"check {row!r}"
        assert isinstance(checks, list | None), f"doctor_checks gave {type(checks).__name__}"
        assert isinstance(sections, dict | None), f"bug_report_sections gave {type(sections).__name__}"
        for key, text in (sections or {}).items():
            assert isinstance(key, str) and isinstance(text, str), f"section {key!r}: {text!r}"
        assert _SECRET not in f"{checks}{sections}", "a report holds a secret of the environment"


def _config() -> Any:
    from rabbet.config import engine_config_from_kwargs

    return engine_config_from_kwargs("some/model", plugin_config={"acme": {"key": [1]}})


def _call(plugin: Hooks, hook: str, **arguments: Any) -> list[Any]:
    """As core calls it, but for errors, which are the test's; what it gave, or nothing where it is not implemented."""
    method = getattr(type(plugin), hook, None)
    if method is None:
        return []
    wanted = inspect.signature(method).parameters
    result = method(plugin, **{key: value for key, value in arguments.items() if key in wanted})
    return [result]


@contextmanager
def _unchanged(*, threads: bool = True) -> Iterator[None]:
    """What belongs to the process stays as it is."""

    def state() -> dict[str, Any]:
        root = logging.getLogger()
        return {
            "the environment": dict(os.environ),
            "logging": (root.level, list(root.handlers)),
            "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            "sys.excepthook": sys.excepthook,
            "threads": sorted(str(thread.ident) for thread in threading.enumerate()) if threads else [],
        }

    before = state()
    yield
    after = state()
    changed = [key for key in before if before[key] != after[key]]
    assert not changed, f"changed: {', '.join(changed)}"
