"""The engine's loop: messages in, steps, messages out. The same for a process and for a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rabbet.engine.core import EngineCore
from rabbet.engine.messages import Abort, Add, Deltas, FromEngine, Shutdown, ToEngine, Utility, UtilityResult
from rabbet.types.outputs import FinishReason, RequestDelta

__all__ = ["EngineLoop"]

logger = logging.getLogger(__name__)
_IDLE_S = 0.5


class EngineLoop:
    """Runs until a shutdown message has been honoured.

    ``receive(timeout_s)`` returns the messages that are there, waiting at most that long for the first one.
    """

    def __init__(
        self, core: EngineCore, receive: Callable[[float], list[ToEngine]], send: Callable[[FromEngine], None]
    ) -> None:
        self._core = core
        self._receive = receive
        self._send = send
        self._deadline_s: float | None = None

    def run(self) -> None:
        """The loop."""
        core = self._core
        while True:
            is_busy = core.has_work()
            for message in self._receive(0.0 if is_busy else self._idle_wait()):
                self._handle(message)
            if self._deadline_s is not None and (not core.has_work() or time.monotonic() >= self._deadline_s):
                self._emit(core.abort_all(FinishReason.ABORT))
                return
            if core.has_work():
                self._emit(core.step())

    def _idle_wait(self) -> float:
        return 0.0 if self._deadline_s is not None else _IDLE_S

    def _emit(self, deltas: list[RequestDelta]) -> None:
        if deltas:
            self._send(Deltas(deltas=deltas))

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            refusal = self._core.add(message.request)
            self._emit([refusal] if refusal else [])
        elif isinstance(message, Abort):
            self._emit(self._core.abort(message.request_ids))
        elif isinstance(message, Shutdown):
            self._deadline_s = time.monotonic() + message.timeout_s
        else:
            self._send(self._call(message))

    def _call(self, message: Utility) -> UtilityResult:
        calls: dict[str, Callable[[], object]] = {
            "reset_prefix_cache": self._core.reset_prefix_cache,
            "check_integrity": self._core.check_integrity,
            "stats": self._core.stats,
        }
        call = calls.get(message.name)
        if call is None:
            return UtilityResult(call_id=message.call_id, value=None, error=f"there is no call {message.name!r}")
        try:
            return UtilityResult(call_id=message.call_id, value=call(), error=None)
        except AssertionError as error:
            return UtilityResult(call_id=message.call_id, value=None, error=str(error))
