"""Hook plugins with one fault each, on top of the strict twin."""
# ruff: noqa: ARG001, ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from rabbet.contracts import register_hooks
from rabbet.contracts.hooks import hookimpl
from rabbet_sdk.mutants.base import Mutant, planter
from rabbet_sdk.strict.hooks import StrictHooks

__all__ = ["MUTANTS"]

_plant = planter(globals(), register_hooks, StrictHooks)
_make = StrictHooks.__init__


@hookimpl
def _formats_none(self: Any, record: Any) -> None:
    self.line = f"{record.request_id}: {record.time_to_first_token_s:.3f} s"


@hookimpl
def _edits_record(self: Any, record: Any) -> None:
    object.__setattr__(record, "model", record.model.upper())


@hookimpl
def _edits_config(self: Any, config: Any) -> None:
    config.plugin_config.setdefault("acme", {}).clear()


@hookimpl
def _waits(self: Any, record: Any) -> None:
    threading.Event().wait(0.1)


@hookimpl
def _keeps(self: Any, record: Any) -> None:
    self.__dict__.setdefault("records", []).append(record)


@hookimpl
async def _awaited(self: Any, record: Any) -> None:
    self.finished[record.finish_reason] += 1


@hookimpl
def _unknown_argument(self: Any, record: Any, engine: Any) -> None:
    engine.note(record)


@hookimpl
def _shadows(self: Any, app: Any) -> None:
    app.add_api_route("/v1/models", lambda: {"data": []})


@hookimpl
def _first(self: Any, app: Any) -> None:
    app.add_api_route("/strict/health", lambda: "fine")
    app.router.routes.insert(0, app.router.routes.pop())


@hookimpl
def _catches_all(self: Any, app: Any) -> None:
    app.add_api_route("/{rest:path}", lambda rest: rest)


@hookimpl
def _wraps(self: Any, app: Any) -> None:
    async def wrapped(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    app.middleware("http")(wrapped)
    app.add_api_route("/strict/wrapped", lambda: "yes")


@hookimpl
def _takes_serve(self: Any, app: Any) -> None:
    app.command(name="serve")(lambda: None)


@hookimpl
def _tells_all(self: Any) -> dict[str, str]:
    return {"environment": str(dict(os.environ))}


def _with_thread(self: Any) -> None:
    _make(self)
    threading.Thread(target=threading.Event().wait, name="strict-sender", daemon=True).start()


@hookimpl
def _starts_thread(self: Any, config: Any) -> None:
    _with_thread(self)


def _logs_everything(self: Any) -> None:
    _make(self)
    logging.getLogger().addHandler(logging.NullHandler())


_NEWS, _SHADOW, _NAMES = "news_are_left_as_they_are", "routes_shadow_nothing", "hooks_are_those_of_the_contract"
_LOAD = "memory_is_bounded_and_no_thread_stays"
MUTANTS = (
    _plant("formats_none", _NEWS, "fails for requests that gave no token", on_request_finished=_formats_none),
    _plant("edits_record", _NEWS, "later listeners see other numbers", on_request_finished=_edits_record),
    _plant("edits_config", _NEWS, "the options of other plugins go", on_engine_ready=_edits_config),
    _plant("waits", "the_loop_goes_on", "every stream stops while a record is sent", on_request_finished=_waits),
    _plant("keeps_records", _LOAD, "a list that nobody empties", on_request_finished=_keeps),
    _plant("sender_stays", _LOAD, "a thread that no shutdown ends", on_engine_ready=_starts_thread),
    _plant("shadows_models", _SHADOW, "answers /v1/models itself", add_http_routes=_shadows),
    _plant("route_first", _SHADOW, "stands before core's routes", add_http_routes=_first),
    _plant("catches_all", _SHADOW, "a page of its own for whatever is not there", add_http_routes=_catches_all),
    _plant("wraps_all", _SHADOW, "middleware around every stream", add_http_routes=_wraps),
    _plant("takes_serve", "commands_have_names_of_their_own", "a command that is there", add_cli_commands=_takes_serve),
    _plant("tells_all", "reports_are_fit_to_be_shown", "keys in a bug report", bug_report_sections=_tells_all),
    _plant("thread_at_once", "making_one_changes_nothing", "every command of rabbet starts it", __init__=_with_thread),
    _plant("root_logger", "making_one_changes_nothing", "every line twice", __init__=_logs_everything),
    _plant("awaited", _NAMES, "a coroutine that nobody awaits", on_request_finished=_awaited),
    _plant("unknown_argument", _NAMES, "asks for what the hook has not", on_request_finished=_unknown_argument),
    _plant("unmarked", _NAMES, "sglang#38915: never called", on_engine_ready=lambda self, config: None),
    Mutant(
        name="undeclared_routes", caught_by="test_routes_are_declared", story="comes past the operator's permission",
        modules={"plugin.py": (
            "from rabbet.contracts import register_hooks\nfrom rabbet_sdk.strict.hooks import StrictHooks\n\n\n"
            "@register_hooks('undeclared_routes')\nclass Plugin(StrictHooks):\n    pass\n"
        )},
        manifest='schema = 1\n[[provides]]\nkind = "hooks"\nname = "undeclared_routes"\ncontract = ">=1.0,<2"\nroles = ["front"]\n',
    ),
)  # fmt: skip
