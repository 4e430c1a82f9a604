"""A hook plugin that counts finished requests: a command, a route, a check and a section of bug reports.

The manifest says ``adds_routes``, so that operators have to allow it by name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rabbet.contracts import register_hooks
from rabbet.contracts.hooks import Hooks, hookimpl
from rabbet.contracts.observability import RequestRecord

__all__ = ["StrictHooks"]


@register_hooks("strict")
class StrictHooks(Hooks):
    """Implement what you need and leave out the rest. Nothing is read, opened or started before it is needed."""

    def __init__(self) -> None:
        # Bounded by the number of reasons: whoever keeps the records themselves grows for months.
        self.finished: Counter[str] = Counter()

    @hookimpl
    def add_cli_commands(self, app: Any) -> None:
        """A name of its own: one that is there is left out."""

        def hello(name: str = "you") -> None:
            """Greet NAME."""
            print(f"hello {name}")

        app.command(name="strict-hello")(hello)

    @hookimpl
    def add_http_routes(self, app: Any) -> None:
        """Under a prefix of its own, never under /v1. Arguments that are not needed, such as ``llm``, are left out."""

        async def finished() -> dict[str, int]:
            return dict(self.finished)

        app.add_api_route("/strict/finished", finished)

    @hookimpl
    def on_request_finished(self, record: RequestRecord) -> None:
        """Called in the server's loop, between two tokens of everybody: count, and do the rest elsewhere."""
        self.finished[record.finish_reason] += 1

    @hookimpl
    def doctor_checks(self) -> list[tuple[str, bool, str]]:
        """Name, passed, detail."""
        return [("counts", self.finished.total() >= 0, f"{self.finished.total()} requests")]

    @hookimpl
    def bug_report_sections(self) -> dict[str, str]:
        """Title to text, without secrets."""
        return {"strict": str(dict(self.finished))}

    @hookimpl
    def on_shutdown(self) -> None:
        """Close what was opened; may be called twice."""
        self.finished.clear()
