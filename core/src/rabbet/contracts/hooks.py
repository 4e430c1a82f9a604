"""Hook specifications (pluggy): everyone who listens is told. Never called once a layer or a token.

A hook plugin is a class registered with ``@register_hooks("name")`` whose methods carry ``@hookimpl``. An
implementation that raises is isolated, counted, and switched off after three failures in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from rabbet.contracts.observability import RequestRecord

__all__ = ["HookSpecs", "Hooks", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("rabbet")
hookimpl = pluggy.HookimplMarker("rabbet")


class Hooks:
    """Base of hook plugins; made once a process, without arguments."""


class HookSpecs:
    """All hooks."""

    @hookspec
    def add_cli_commands(self, app: Any) -> None:
        """Add commands to the typer application."""

    @hookspec
    def add_http_routes(self, app: Any, llm: Any) -> None:
        """Add routes to the FastAPI application. Called only for plugins that the operator allowed by name."""

    @hookspec
    def on_engine_ready(self, config: Any) -> None:
        """The engine answers; called in the front process."""

    @hookspec
    def on_request_finished(self, record: RequestRecord) -> None:
        """A request has ended."""

    @hookspec
    def on_shutdown(self) -> None:
        """The front process is about to end."""

    @hookspec
    def doctor_checks(self) -> list[tuple[str, bool, str]] | None:
        """Checks for ``rabbet plugins doctor``: name, passed, detail. None: nothing to check."""

    @hookspec
    def bug_report_sections(self) -> dict[str, str] | None:
        """Sections for ``rabbet collect-env``: title to text, without secrets. None: none."""
