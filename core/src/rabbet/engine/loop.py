"""The engine's loop: messages in, steps, messages out. The same for a process and for a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.core import EngineCore
from rabbet.engine.messages import Abort, Add, Deltas, FromEngine, Heartbeat, Shutdown, ToEngine, Utility, UtilityResult
from rabbet.types.outputs import RequestDelta

__all__ = ["EngineLoop"]

logger = logging.getLogger(__name__)
_IDLE_S = 0.5
# Requests that wait for something outside (a load, a grammar) are looked at again that often.
_WAITING_S = 0.002
_STATS_S = 0.2
_STALL_LINE_S = 30.0


class EngineLoop:
    """Runs until a shutdown message has been honoured.

    ``receive(timeout_s)`` returns the messages that are there, waiting at most that long for the first one.
    ``heartbeat`` may be called from another thread: it reads what the loop published.
    """

    def __init__(
        self, core: EngineCore, receive: Callable[[float], list[ToEngine]], send: Callable[[FromEngine], None]
    ) -> None:
        self._core = core
        self._receive = receive
        self._send = send
        self._deadline_s: float | None = None
        self._turn_started_s: float | None = None
        self._moved_s = time.monotonic()
        self._published: tuple[float, SchedulerStats] = (time.monotonic(), core.stats())

    def run(self) -> None:
        """The loop.

        Raises:
            EngineDeadError: If the engine cannot go on. Its open requests are ended by whoever hears of it.
        """
        core = self._core
        wait_s = 0.0
        while True:
            if not core.has_work():
                self._publish(always=True)
                self._turn_started_s = None
                wait_s = 0.0 if self._deadline_s is not None else _IDLE_S
            messages = self._receive(wait_s)
            self._turn_started_s = time.monotonic()
            for message in messages:
                self._handle(message)
            if self._deadline_s is not None and (not core.has_work() or time.monotonic() >= self._deadline_s):
                self._emit(core.abort_all())
                return
            wait_s = 0.0
            if core.has_work():
                deltas = core.step()
                self._emit(deltas)
                is_stalled = core.is_waiting and not deltas
                wait_s = _WAITING_S if is_stalled else 0.0
                self._watch(is_stalled)
            self._publish()

    def heartbeat(self) -> Heartbeat:
        """The newest numbers, and how long the current turn has been going on (0 while the loop waits for work)."""
        started = self._turn_started_s
        busy_s = 0.0 if started is None else max(0.0, time.monotonic() - started)
        return Heartbeat(busy_s=busy_s, stats=self._published[1])

    def _publish(self, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._published[0] >= _STATS_S:
            self._published = (now, self._core.stats())

    def _watch(self, is_stalled: bool) -> None:
        """Say it if unfinished requests make no step for long: a wait must have a name."""
        now = time.monotonic()
        if not is_stalled:
            self._moved_s = now
        elif now - self._moved_s >= _STALL_LINE_S:
            self._moved_s = now
            stats = self._core.stats()
            logger.warning(
                "no step for %.0f s: %d requests run, %d wait, %.0f%% of the KV cache is held",
                _STALL_LINE_S,
                stats.num_running,
                stats.num_waiting,
                stats.kv_usage * 100,
            )

    def _emit(self, deltas: list[RequestDelta]) -> None:
        if deltas:
            self._send(Deltas(deltas=deltas))

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._emit(self._core.add(message.request))
        elif isinstance(message, Abort):
            self._emit(self._core.abort(message.request_ids))
        elif isinstance(message, Shutdown):
            self._deadline_s = time.monotonic() + message.timeout_s
        else:
            self._send(self._call(message))

    def _call(self, message: Utility) -> UtilityResult:
        calls: dict[str, Callable[[], object]] = {
            "ping": lambda: True,
            "reset_prefix_cache": self._core.reset_prefix_cache,
            "check_integrity": self._core.check_integrity,
            "stats": self._core.stats,
        }
        call = calls.get(message.name)
        if call is None:
            return UtilityResult(call_id=message.call_id, value=None, error=f"there is no call {message.name!r}")
        try:
            return UtilityResult(call_id=message.call_id, value=call(), error=None)
        except Exception as error:  # the caller is told; the engine goes on
            logger.warning("the call %s failed", message.name, exc_info=error)
            return UtilityResult(call_id=message.call_id, value=None, error=str(error) or type(error).__name__)
