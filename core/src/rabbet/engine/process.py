"""The engine process: ``python -m rabbet.engine.process`` with its configuration on standard input.

Standard input stays open as long as the parent lives; its end means that the parent is gone, and so does this
process. Exit status: 0 after a shutdown, 2 for a wrong configuration, 3 if the engine died.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import zmq

from rabbet.config.resolve import resolve
from rabbet.config.resolved import resolved_to_bytes
from rabbet.config.schema import EngineConfig
from rabbet.engine.core import EngineCore
from rabbet.engine.loop import EngineLoop
from rabbet.engine.messages import Failed, FromEngine, Phase, Ready, Start, ToEngine, decode_to_engine, encode
from rabbet.engine.transport import Receiver, connect
from rabbet.errors import ConfigError, PluginError, RabbetError, WeightsError

__all__ = ["EXIT_CONFIG", "EXIT_DEAD", "build", "failure_of", "main"]

EXIT_CONFIG = 2
EXIT_DEAD = 3
_HEARTBEAT_S = 0.25
_PR_SET_PDEATHSIG = 1
logger = logging.getLogger(__name__)


def read_start(stream: BinaryIO) -> Start:
    """The length-prefixed first message."""
    size = int.from_bytes(stream.read(8), "little")
    return msgspec.msgpack.decode(stream.read(size), type=Start)


def die_with_parent(descriptor: int, parent_pid: int) -> None:
    """End this process when its parent dies, by whatever death.

    Two ways, for neither is enough: the kernel's signal reaches this process even while it is stopped or holds its
    interpreter's lock; the end of the pipe is seen where the kernel has no such signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(EXIT_DEAD)

    def watch() -> None:
        # The bare descriptor: a buffered stream would be locked when the interpreter wants to close it.
        while os.read(descriptor, 1):
            pass
        os._exit(EXIT_DEAD)

    threading.Thread(target=watch, name="rabbet-parent-watch", daemon=True).start()


class _Heart:
    """Sends heartbeats on a socket of its own, from a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, loop: EngineLoop) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(context, address, loop), daemon=True)
        self._thread.start()

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], address: str, loop: EngineLoop) -> None:
        socket = connect(context, zmq.PUSH, address, bind=False)
        is_stopped = False
        while not is_stopped:
            socket.send(encode(loop.heartbeat()))
            is_stopped = self._stop.wait(_HEARTBEAT_S)
        socket.close()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def run(start: Start) -> int:
    """Build the engine and run its loop; returns the exit status."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = connect(context, zmq.PULL, f"ipc://{start.socket_dir}/to-engine", bind=False)
    address = f"ipc://{start.socket_dir}/from-engine"
    outbox = connect(context, zmq.PUSH, address, bind=False)
    receiver = Receiver(inbox, decode_to_engine)

    def send(message: FromEngine) -> None:
        outbox.send(encode(message))

    def receive(timeout_s: float) -> list[ToEngine]:
        return receiver.receive(timeout_s)  # type: ignore[return-value]

    core: EngineCore | None = None
    heart: _Heart | None = None
    try:
        _make_visible(start)
        core = build(EngineConfig(**start.config), is_server=start.is_server, send=send)
        loop = EngineLoop(core, receive, send)
        heart = _Heart(context, address, loop)
        send(Ready(info=core.info, resolved=resolved_to_bytes(core.resolved)))
        loop.run()
        return 0
    except Exception as error:  # noqa: BLE001  the edge of the process: report, then end with a status that says so
        failed, status = failure_of(error)
        send(failed)
        return status
    finally:
        if heart is not None:
            heart.stop()
        if core is not None:
            core.close()
        inbox.close()
        outbox.close()
        context.term()


def failure_of(error: Exception) -> tuple[Failed, int]:
    """What to tell the front of an exception that ends the engine, and the exit status. Unexpected ones are logged."""
    if isinstance(error, RabbetError):
        logger.debug("the engine ends", exc_info=error)
        is_config = isinstance(error, ConfigError | PluginError | WeightsError)
        return Failed(kind=type(error).__name__, message=str(error)), EXIT_CONFIG if is_config else EXIT_DEAD
    logger.error("the engine failed", exc_info=error)
    return Failed(kind="other", message=f"{type(error).__name__}: {error}"), EXIT_DEAD


def _make_visible(start: Start) -> None:
    """Find and import what the front process had registered itself."""
    for path in start.path:
        if path not in sys.path:
            sys.path.append(path)
    for module in start.modules:
        importlib.import_module(module)


def build(config: EngineConfig, *, is_server: bool, send: Callable[[FromEngine], None]) -> EngineCore:
    """Resolve the configuration and load the model, telling the front of each phase and the log of all of them.

    Raises:
        RabbetError: What is wrong with the configuration, the plugins, the checkpoint or the memory.
    """
    started = began = time.monotonic()
    durations: list[str] = []
    current = ""

    def phase(name: str) -> None:
        nonlocal began, current
        now = time.monotonic()
        send(Phase(name=name, seconds=now - began))
        if current:
            durations.append(f"{current} {now - began:.1f} s")
        began, current = now, name

    phase("choosing plugins")
    core = EngineCore(resolve(config, is_server=is_server), on_phase=phase)
    phase("ready")
    logger.info("engine ready after %.1f s: %s", time.monotonic() - started, ", ".join(durations))
    return core


def main() -> int:
    """Entry of the process."""
    # Ctrl+C reaches the whole process group, and a service manager's SIGTERM every process of the service: the front
    # decides what they mean and tells us. A handler and not SIG_IGN, which programs that we start would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    start = read_start(sys.stdin.buffer)
    die_with_parent(sys.stdin.fileno(), start.parent_pid)
    logging.basicConfig(level=start.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    return run(start)


if __name__ == "__main__":
    sys.exit(main())
