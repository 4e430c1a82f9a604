"""The front's side of an engine: what it can be asked, and how its death is noticed. Where it runs is a subclass's."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import rabbet.errors as errors
from rabbet.config.resolved import ResolvedConfig
from rabbet.config.schema import EngineConfig
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.messages import (
    Abort,
    Add,
    Deltas,
    EngineInfo,
    Failed,
    FilesFound,
    FromEngine,
    Heartbeat,
    Phase,
    ToEngine,
    Utility,
    UtilityResult,
)
from rabbet.errors import EngineDeadError, RabbetError, ServerError
from rabbet.types.outputs import RequestDelta
from rabbet.types.request import EngineRequest

__all__ = ["EngineClient", "make_client"]

logger = logging.getLogger(__name__)
HEARTBEAT_LIMIT_S = 5.0
TURN_LIMIT_S = 300.0
START_LIMIT_S = 3600.0
START_LINE_S = 30.0


def make_client(
    config: EngineConfig, *, is_server: bool, log_level: str = "info", engine_process: bool = True
) -> EngineClient:
    """A client that is not started: of an engine in a process of its own, or in a thread of this one."""
    if engine_process:
        from rabbet.engine.process_client import ProcessEngineClient

        return ProcessEngineClient(config, is_server=is_server, log_level=log_level)
    # Imported here: this is where torch may come into the front process.
    from rabbet.engine.thread_client import ThreadEngineClient

    return ThreadEngineClient(config, is_server=is_server)


class EngineClient(ABC):
    """One engine.

    ``start`` blocks until the engine is ready. After that a thread hands news to the two callbacks given to ``listen``;
    sending is safe from any thread.

    Attributes:
        info: Sizes, once it is ready.
        resolved: What it runs, once it is ready.
        exit_code: Status of the process after its end; None for a thread.
    """

    def __init__(self, config: EngineConfig, *, is_server: bool) -> None:
        self._config = config
        self._is_server = is_server
        self._on_deltas: Callable[[list[RequestDelta]], None] = lambda _deltas: None
        self._on_death: Callable[[EngineDeadError], None] = lambda _error: None
        self._on_phase: Callable[[str], None] = lambda _name: None
        self._phase = "starting the engine"
        self._files: FilesFound | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._heartbeat: tuple[float, Heartbeat | None] = (time.monotonic(), None)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._death_lock = threading.Lock()
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._is_closed = False
        self.heartbeat_limit_s = HEARTBEAT_LIMIT_S
        self.turn_limit_s = TURN_LIMIT_S
        self.exit_code: int | None = None
        self.info: EngineInfo | None = None
        self.resolved: ResolvedConfig | None = None

    # ---- what a subclass does

    @abstractmethod
    def _launch(self) -> None:
        """Start a thread that starts the engine, sets ``_started`` at the latest when that failed, and then reads."""

    @abstractmethod
    def _deliver(self, message: ToEngine) -> None:
        """Send one message; called from any thread."""

    @abstractmethod
    def shutdown(self, timeout_s: float = 0.0) -> None:
        """End the engine after its running requests, or after ``timeout_s``; idempotent. Nothing is left behind."""

    # ---- start

    def start(
        self,
        on_phase: Callable[[str], None] | None = None,
        on_tokenizer: Callable[[str | None], None] | None = None,
    ) -> None:
        """Start the engine and wait until it serves.

        Args:
            on_phase: Told the name of each phase, in another thread.
            on_tokenizer: Told once, in this thread, where the model's tokenizer is, while the weights are loaded; None
                where there is none. What it raises ends the start.

        Raises:
            RabbetError: What the engine said went wrong, as the same class of ``rabbet.errors``.
        """
        if on_phase is not None:
            self._on_phase = on_phase
        began = time.monotonic()
        line_s = START_LINE_S
        try:
            self._launch()
            while not self._started.wait(0.2):
                if self._files is not None and on_tokenizer is not None:
                    tell, on_tokenizer = on_tokenizer, None
                    tell(self._files.tokenizer_dir)
                waited_s = time.monotonic() - began
                if waited_s > START_LIMIT_S:
                    raise EngineDeadError(f"the engine is not ready after {waited_s:.0f} s; it is {self._phase}")
                if waited_s > line_s:
                    logger.info("the engine is %s (%.0f s)", self._phase, waited_s)
                    line_s += START_LINE_S
            if self._start_error is not None:
                raise self._start_error
            if self._files is not None and on_tokenizer is not None:
                # It was ready sooner than we looked.
                on_tokenizer(self._files.tokenizer_dir)
        except BaseException:
            self.shutdown(0)
            raise

    def listen(
        self, on_deltas: Callable[[list[RequestDelta]], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """Set the callbacks; they run in the reading thread, and must not raise."""
        self._on_deltas = on_deltas
        with self._death_lock:
            self._on_death = on_death
            death = self._death
        if death is not None:
            on_death(death)

    # ---- traffic

    def add(self, request: EngineRequest) -> None:
        """Send a request.

        Raises:
            EngineDeadError: If nobody is there to take it.
            InvalidRequestError: If it holds a value that cannot be sent.
        """
        self._send(Add(request=request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Tell the engine that nobody waits for these; quiet if the engine is gone."""
        with contextlib.suppress(EngineDeadError):
            self._send(Abort(request_ids=list(request_ids)))

    def call(self, name: str) -> Future[Any]:
        """Call a utility by name.

        Raises:
            EngineDeadError: If nobody is there to answer.
        """
        future: Future[Any] = Future()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        try:
            self._send(Utility(call_id=call_id, name=name))
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        if self._death is not None:
            # It died while we sent; nobody else may have seen this call.
            _settle(self._calls.pop(call_id, None), error=self._death)
        return future

    def _send(self, message: ToEngine) -> None:
        if self._death is not None:
            raise self._death
        if self._is_closing:
            raise EngineDeadError("the engine is being shut down")
        self._deliver(message)

    def _handle(self, message: FromEngine) -> None:
        """Take in one message; in the reading thread."""
        if isinstance(message, Deltas):
            self._on_deltas(message.deltas)
        elif isinstance(message, Heartbeat):
            self._heartbeat = (time.monotonic(), message)
        elif isinstance(message, UtilityResult):
            error = ServerError(message.error) if message.error is not None else None
            _settle(self._calls.pop(message.call_id, None), value=message.value, error=error)
        elif isinstance(message, FilesFound):
            self._files = message
        elif isinstance(message, Phase):
            logger.debug("%s: %.2f s", self._phase, message.seconds)
            self._phase = message.name
            self._on_phase(message.name)
        elif isinstance(message, Failed) and self._started.is_set():
            self._die(EngineDeadError(f"the engine failed: {message.message}"))
        elif isinstance(message, Failed):
            raise _error_of(message)

    def _die(self, error: EngineDeadError) -> None:
        """Every call ends with the error, and so does everybody who listens. Once."""
        with self._death_lock:
            if self._death is not None:
                return
            self._death = error
            on_death = self._on_death
        logger.error("%s", error)
        self._settle_calls(error)
        on_death(error)

    def _settle_calls(self, error: EngineDeadError) -> None:
        while self._calls:
            _settle(self._calls.popitem()[1], error=error)

    # ---- state

    @property
    def stats(self) -> SchedulerStats | None:
        """The newest numbers, at most about half a second old."""
        beat = self._heartbeat[1]
        return beat.stats if beat else None

    def check_health(self) -> None:
        """Raise unless the engine's loop is alive. An engine that was only slow is healthy again when it is heard of.

        Raises:
            EngineDeadError: If it ended, its heartbeat stopped, or one turn of its loop takes very long.
        """
        if self._death is not None:
            raise self._death
        if self._is_closing:
            raise EngineDeadError("the engine is being shut down")
        seen, beat = self._heartbeat
        silence_s = time.monotonic() - seen
        if silence_s > self.heartbeat_limit_s:
            raise EngineDeadError(f"the engine has not been heard of for {silence_s:.0f} s")
        if beat is not None and beat.busy_s > self.turn_limit_s:
            raise EngineDeadError(f"the engine has been in one step for {beat.busy_s:.0f} s")


def _settle(future: Future[Any] | None, *, value: Any = None, error: Exception | None = None) -> None:
    """Answer a call, unless whoever asked has given it up."""
    if future is None or not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _error_of(message: Failed) -> RabbetError:
    """The exception that the engine reported, where ``rabbet.errors`` has it and it takes a message alone."""
    cls = getattr(errors, message.kind, None)
    if isinstance(cls, type) and issubclass(cls, RabbetError):
        return cls(message.message)
    return EngineDeadError(f"the engine could not start: {message.message}")
