"""The front's side of an engine process: starts it, talks to it, and notices its death."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import msgspec
import zmq

import rabbet.errors as errors
from rabbet.config.resolved import ResolvedConfig, resolved_from_bytes
from rabbet.config.schema import EngineConfig
from rabbet.contracts.registration import staged_registrations
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.messages import (
    Abort,
    Add,
    Deltas,
    EngineInfo,
    Failed,
    FromEngine,
    Heartbeat,
    Phase,
    Ready,
    Shutdown,
    Start,
    ToEngine,
    Utility,
    UtilityResult,
    decode_from_engine,
    encode,
)
from rabbet.engine.transport import SocketDirectory, connect, receive_all
from rabbet.errors import ConfigError, EngineDeadError, RabbetError
from rabbet.types.outputs import RequestDelta
from rabbet.types.request import EngineRequest

__all__ = ["EngineClient"]

logger = logging.getLogger(__name__)
_POLL_S = 0.1
_HEARTBEAT_LIMIT_S = 5.0
_STEP_LIMIT_S = 600.0
_EXIT_WAIT_S = 10.0


class EngineClient:
    """One engine process.

    ``start`` blocks until the engine is ready. After that a reader thread hands news to the two callbacks given to
    ``listen``; sending is safe from any thread.
    """

    def __init__(self, config: EngineConfig, *, is_server: bool, log_level: str = "info") -> None:
        self._config = config
        self._is_server = is_server
        self._log_level = log_level
        self._directory = SocketDirectory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outbox = connect(self._context, zmq.PUSH, self._directory.address("to-engine"), bind=True)
        self._inbox = connect(self._context, zmq.PULL, self._directory.address("from-engine"), bind=True)
        self._send_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._on_deltas: Callable[[list[RequestDelta]], None] = lambda _deltas: None
        self._on_death: Callable[[EngineDeadError], None] = lambda _error: None
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._heartbeat: tuple[float, Heartbeat] | None = None
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._is_closed = False
        self.exit_code: int | None = None
        self.info: EngineInfo | None = None
        self.resolved: ResolvedConfig | None = None

    # ---- start

    def start(self, on_phase: Callable[[str], None] | None = None) -> None:
        """Start the process and wait until it serves.

        Raises:
            RabbetError: What the engine said went wrong, as the same class of ``rabbet.errors``.
        """
        message = Start(
            config=asdict(self._config),
            is_server=self._is_server,
            socket_dir=str(self._directory.path),
            modules=_staged_modules(),
            path=[path for path in sys.path if path],
            log_level=self._log_level,
        )
        data = msgspec.msgpack.encode(message)
        try:
            self._process = subprocess.Popen([sys.executable, "-m", "rabbet.engine.process"], stdin=subprocess.PIPE)
            assert self._process.stdin is not None
            self._process.stdin.write(len(data).to_bytes(8, "little") + data)
            self._process.stdin.flush()
            self._wait_until_ready(on_phase or (lambda _name: None))
        except BaseException:
            self.shutdown(0)
            raise
        self._heartbeat = None
        self._ready_at = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="rabbet-engine-reader", daemon=True)
        self._reader.start()

    def _wait_until_ready(self, on_phase: Callable[[str], None]) -> None:
        phase = "starting the engine process"
        while True:
            for message in receive_all(self._inbox, _POLL_S, decode_from_engine):
                if isinstance(message, Phase):
                    logger.debug("%s: %.2f s", phase, message.seconds)
                    phase = message.name
                    on_phase(phase)
                elif isinstance(message, Failed):
                    raise _error_of(message)
                elif isinstance(message, Ready):
                    self.info = message.info
                    self.resolved = resolved_from_bytes(message.resolved)
                    return
            assert self._process is not None
            if self._process.poll() is not None and not self._inbox.poll(_POLL_S * 1000):
                raise EngineDeadError(f"the engine ended with status {self._process.returncode} while {phase}")

    def listen(
        self, on_deltas: Callable[[list[RequestDelta]], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        """Set the callbacks; they run in the reader thread."""
        self._on_deltas, self._on_death = on_deltas, on_death
        if self._death is not None:
            on_death(self._death)

    # ---- traffic

    def add(self, request: EngineRequest) -> None:
        """Send a request.

        Raises:
            EngineDeadError: If nobody is there to take it.
        """
        self._send(Add(request=request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Tell the engine that nobody waits for these; quiet if the engine is gone."""
        if self._death is None and not self._is_closing:
            self._send(Abort(request_ids=list(request_ids)))

    def call(self, name: str) -> Future[Any]:
        """Call a utility by name."""
        future: Future[Any] = Future()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        self._send(Utility(call_id=call_id, name=name))
        return future

    def _send(self, message: ToEngine) -> None:
        if self._death is not None:
            raise self._death
        if self._is_closing:
            raise EngineDeadError("the engine is being shut down")
        with self._send_lock:
            self._outbox.send(encode(message))

    def _read(self) -> None:
        while not self._is_closed:
            messages = receive_all(self._inbox, _POLL_S, decode_from_engine)
            for message in messages:
                self._handle(message)  # type: ignore[arg-type]
            assert self._process is not None
            if not messages and self._process.poll() is not None:
                self.exit_code = self._process.returncode
                if not self._is_closing:
                    self._die(EngineDeadError(f"the engine process ended with status {self.exit_code}"))
                return

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self._on_deltas(message.deltas)
        elif isinstance(message, Heartbeat):
            self._heartbeat = (time.monotonic(), message)
        elif isinstance(message, UtilityResult):
            future = self._calls.pop(message.call_id, None)
            if future is not None and message.error is not None:
                future.set_exception(errors.ServerError(message.error))
            elif future is not None:
                future.set_result(message.value)
        elif isinstance(message, Failed):
            self._die(EngineDeadError(f"the engine failed: {message.message}"))

    def _die(self, error: EngineDeadError) -> None:
        if self._death is not None:
            return
        self._death = error
        logger.error("%s", error)
        for future in self._calls.values():
            future.set_exception(error)
        self._calls.clear()
        self._on_death(error)

    # ---- state

    @property
    def stats(self) -> SchedulerStats | None:
        """The newest numbers, at most about half a second old."""
        return self._heartbeat[1].stats if self._heartbeat else None

    def check_health(self) -> None:
        """Raise unless the engine's loop is alive.

        Raises:
            EngineDeadError: If the process ended, its heartbeat stopped, or a step has run for very long.
        """
        if self._death is not None:
            raise self._death
        if self._is_closing:
            raise EngineDeadError("the engine is being shut down")
        seen, beat = self._heartbeat or (self._ready_at, None)
        silence = time.monotonic() - seen
        if silence > _HEARTBEAT_LIMIT_S:
            raise EngineDeadError(f"the engine has not been heard of for {silence:.0f} s")
        if beat is not None and beat.busy_s > _STEP_LIMIT_S:
            raise EngineDeadError(f"the engine has been in one step for {beat.busy_s:.0f} s")

    def shutdown(self, timeout_s: float = 0.0) -> None:
        """End the engine after its running requests, or after ``timeout_s``; idempotent. Nothing is left behind."""
        if self._is_closed:
            return
        process = self._process
        if process is not None and process.poll() is None and self._death is None and self.info is not None:
            with self._send_lock:
                self._is_closing = True
                self._outbox.send(encode(Shutdown(timeout_s=timeout_s)))
        self._is_closing = True
        if process is not None:
            self._end(process, timeout_s if self.info is not None else 0.0)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=_EXIT_WAIT_S)
        self._is_closed = True
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        self._context.term()
        self._directory.close()

    def _end(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        is_asked = self._death is None and self.info is not None
        try:
            process.wait(timeout=timeout_s + _EXIT_WAIT_S if is_asked else 0.5)
        except subprocess.TimeoutExpired:
            logger.debug("the engine does not end by itself and is killed")
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self.exit_code = process.returncode


def _staged_modules() -> list[str]:
    """Modules of classes that this process registered itself; the engine imports them before it chooses.

    Raises:
        ConfigError: For a class in ``__main__``, which no other process can import.
    """
    modules: list[str] = []
    for record in staged_registrations():
        if record.module == "__main__":
            raise ConfigError(
                f"{record.kind}/{record.name} is registered in the main script, which the engine process cannot import; "
                "move it into a module, pass the file with --plugin, or use engine_process=False",
                field="plugins",
            )
        if record.module not in modules:
            modules.append(record.module)
    return modules


def _error_of(message: Failed) -> RabbetError:
    """The exception that the engine reported, where ``rabbet.errors`` has it and it takes a message alone."""
    cls = getattr(errors, message.kind, None)
    if isinstance(cls, type) and issubclass(cls, RabbetError):
        return cls(message.message)
    return EngineDeadError(f"the engine could not start: {message.message}")
