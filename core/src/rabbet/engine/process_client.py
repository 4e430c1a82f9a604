"""An engine in a process of its own: starts it, talks to it over unix sockets, and notices its death."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import zmq

from rabbet.config.resolved import resolved_from_bytes
from rabbet.config.schema import EngineConfig
from rabbet.contracts.registration import staged_registrations
from rabbet.engine.client import EngineClient
from rabbet.engine.messages import Heartbeat, Ready, Shutdown, Start, ToEngine, decode_from_engine, encode
from rabbet.engine.transport import Receiver, connect
from rabbet.errors import ConfigError, EngineDeadError, InvalidRequestError
from rabbet.worker.child import spawn
from rabbet.worker.directory import SocketDirectory

__all__ = ["ProcessEngineClient"]

logger = logging.getLogger(__name__)
_POLL_S = 0.1
_EXIT_WAIT_S = 10.0
_KILL_WAIT_S = 0.5
# Core's own, and one-file plugins, which the engine loads by path.
_FOUND_BY_ITSELF = ("rabbet.", "rabbet_file_")


class ProcessEngineClient(EngineClient):
    """One engine process.

    A thread of ours starts it and reads from it until it has ended: the kernel ties the engine's life to the thread
    that started it, so that must be one that lives as long.
    """

    def __init__(self, config: EngineConfig, *, is_server: bool, log_level: str = "info") -> None:
        super().__init__(config, is_server=is_server)
        self._log_level = log_level
        self._modules = _staged_modules()
        self._directory = SocketDirectory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # This side connects: a bound socket without a peer would block for ever whoever sends to an engine that is gone.
        self._outbox = connect(self._context, zmq.PUSH, self._directory.address("to-engine"), bind=False)
        inbox = connect(self._context, zmq.PULL, self._directory.address("from-engine"), bind=True)
        self._inbox = inbox
        self._receiver = Receiver(inbox, decode_from_engine)
        self._send_lock = threading.Lock()
        self._shutdown_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id, once it runs."""
        return self._process.pid if self._process else None

    # ---- the reading thread

    def _launch(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rabbet-engine-reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._process = self._spawn()
            self._wait_until_ready(self._process)
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits in ``start``
            self._start_error = error
            self._started.set()
            if self._process is not None:
                # The engine ends with this thread; its own exit status is wanted, so it gets the time to end by itself.
                self._end(self._process)
            return
        self._started.set()
        try:
            self._read(self._process)
        except BaseException as error:  # nobody would hear of the engine any more
            logger.exception("reading from the engine failed")
            self._die(EngineDeadError(f"reading from the engine failed: {type(error).__name__}"))

    def _spawn(self) -> subprocess.Popen[bytes]:
        message = Start(
            config=asdict(self._config),
            is_server=self._is_server,
            socket_dir=str(self._directory.path),
            modules=self._modules,
            path=[path or str(Path.cwd()) for path in sys.path],
            log_level=self._log_level,
        )
        return spawn("rabbet.engine.process", message)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Until the engine is ready, and each of the three connections has carried a message."""
        pong = None
        while not self._is_closing:
            messages = self._receiver.receive(_POLL_S)
            for message in messages:
                if isinstance(message, Ready):
                    self.info, self.resolved = message.info, resolved_from_bytes(message.resolved)
                    pong = self.call("ping")
                else:
                    self._handle(message)  # type: ignore[arg-type]
            if pong is not None and pong.done() and isinstance(self._heartbeat[1], Heartbeat):
                # Nobody needs the socket files any more.
                self._directory.close()
                return
            if not messages and process.poll() is not None and not self._inbox.poll(int(_POLL_S * 1000)):
                raise EngineDeadError(f"the engine ended with status {process.returncode} while {self._phase}")
        raise EngineDeadError("the engine was shut down before it was ready")

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            messages = self._receiver.receive(_POLL_S)
            for message in messages:
                self._handle(message)  # type: ignore[arg-type]
            if not messages and process.poll() is not None:
                self.exit_code = process.returncode
                if not self._is_closing:
                    self._die(EngineDeadError(f"the engine process ended with {_status(process.returncode)}"))
                return

    # ---- traffic

    def _deliver(self, message: ToEngine) -> None:
        try:
            data = encode(message)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"a value of this request cannot be sent to the engine: {error}") from error
        with self._send_lock:
            if self._is_closed:
                raise EngineDeadError("the engine is shut down")
            self._outbox.send(data)

    # ---- end

    def shutdown(self, timeout_s: float = 0.0) -> None:
        """See ``EngineClient``."""
        with self._shutdown_lock:
            if self._is_closed:
                return
            if self._death is None and self._start_error is None and self.info is not None:
                self._deliver(Shutdown(timeout_s=timeout_s))
            self._is_closing = True
            if self._process is not None:
                self._end(self._process, timeout_s)
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(timeout=_EXIT_WAIT_S)
            if self._process is not None:
                # It may have come into being while we closed.
                self._end(self._process)
            with self._send_lock:
                self._is_closed = True
                self._outbox.close(linger=0)
            self._inbox.close(linger=0)
            self._context.term()
            self._directory.close()
            self._settle_calls(EngineDeadError("the engine is shut down"))

    def _end(self, process: subprocess.Popen[bytes], timeout_s: float = 0.0) -> None:
        """Wait for the process to end by itself, kill it when patience runs out, and reap it."""
        is_ending = self._start_error is not None or self._death is not None
        is_silent = time.monotonic() - self._heartbeat[0] > self.heartbeat_limit_s
        # An interrupted start was never told to end; a stopped engine does not listen.
        is_deaf = not is_ending and (self.info is None or is_silent)
        try:
            process.wait(timeout=_KILL_WAIT_S if is_deaf else timeout_s + _EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.debug("the engine does not end by itself and is killed")
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self.exit_code = process.returncode


def _status(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {-code}"


def _staged_modules() -> list[str]:
    """Modules of classes that this process registered itself; the engine imports them before it chooses.

    Raises:
        ConfigError: For a class in ``__main__``, which no other process can import.
    """
    modules: list[str] = []
    for record in staged_registrations():
        if record.module.startswith(_FOUND_BY_ITSELF):
            continue
        if record.module == "__main__":
            raise ConfigError(
                f"{record.kind}/{record.name} is registered in the main script, which the engine process cannot "
                "import; move it into a module, pass the file with --plugin, or use engine_process=False",
                field="plugins",
            )
        if record.module not in modules:
            modules.append(record.module)
    return modules
