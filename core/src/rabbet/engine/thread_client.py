"""An engine in a thread of this process: for tests, debuggers, and plugins that live in the main script."""

from __future__ import annotations

import queue
import threading
import time

from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.client import EngineClient
from rabbet.engine.core import EngineCore
from rabbet.engine.loop import EngineLoop
from rabbet.engine.messages import Shutdown, ToEngine
from rabbet.engine.process import build, failure_of
from rabbet.errors import EngineDeadError, RabbetError

__all__ = ["ThreadEngineClient"]

_EXIT_WAIT_S = 10.0


class ThreadEngineClient(EngineClient):
    """The same loop and the same messages as in a process, handed over without sockets."""

    _inbox: queue.SimpleQueue[ToEngine]
    _thread: threading.Thread | None = None
    _engine_loop: EngineLoop | None = None

    def _launch(self) -> None:
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rabbet-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        core: EngineCore | None = None
        try:
            core = build(self._config, is_server=self._is_server, send=self._handle)
            self.info, self.resolved = core.info, core.resolved
            self._engine_loop = EngineLoop(core, self._receive, self._handle)
            self._started.set()
            self._engine_loop.run()
        except BaseException as error:  # noqa: BLE001  the edge of the thread
            failed, _ = failure_of(error)
            if self._started.is_set():
                self._die(EngineDeadError(f"the engine failed: {failed.message}"))
            else:
                message = f"the engine could not start: {failed.message}"
                self._start_error = error if isinstance(error, RabbetError) else EngineDeadError(message)
        finally:
            try:
                if core is not None:
                    core.close()
            finally:
                # Whoever keeps this client keeps no weights.
                self._engine_loop = None
                self._started.set()

    def _receive(self, timeout_s: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            if timeout_s > 0:
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _deliver(self, message: ToEngine) -> None:
        self._inbox.put(message)

    @property
    def stats(self) -> SchedulerStats | None:
        """See ``EngineClient``."""
        loop = self._engine_loop
        return loop.heartbeat().stats if loop else None

    def check_health(self) -> None:
        """See ``EngineClient``."""
        if (loop := self._engine_loop) is not None:
            self._heartbeat = (time.monotonic(), loop.heartbeat())
        super().check_health()

    def shutdown(self, timeout_s: float = 0.0) -> None:
        """See ``EngineClient``."""
        if self._is_closed or self._thread is None:
            self._is_closing = self._is_closed = True
            return
        self._deliver(Shutdown(timeout_s=timeout_s))
        self._is_closing = self._is_closed = True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=timeout_s + _EXIT_WAIT_S)
        self._settle_calls(EngineDeadError("the engine is shut down"))
