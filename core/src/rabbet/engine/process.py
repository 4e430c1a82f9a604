"""The engine process: ``python -m rabbet.engine.process`` with its configuration on standard input.

Standard input stays open as long as the parent lives; its end means that the parent is gone, and so does this
process. Exit status: 0 after a shutdown, 2 for a wrong configuration, 3 if the engine died.
"""

from __future__ import annotations

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

from rabbet.engine.core import EngineCore
from rabbet.engine.loop import EngineLoop
from rabbet.engine.messages import (
    Failed,
    FromEngine,
    Heartbeat,
    Phase,
    Ready,
    Start,
    ToEngine,
    decode_to_engine,
    encode,
)
from rabbet.engine.transport import connect, receive_all
from rabbet.errors import ConfigError, PluginError, RabbetError

__all__ = ["EXIT_CONFIG", "EXIT_DEAD", "main"]

EXIT_CONFIG = 2
EXIT_DEAD = 3
_HEARTBEAT_S = 0.5
logger = logging.getLogger(__name__)


def read_start(stream: BinaryIO) -> Start:
    """The length-prefixed first message."""
    size = int.from_bytes(stream.read(8), "little")
    return msgspec.msgpack.decode(stream.read(size), type=Start)


def die_with_parent(descriptor: int) -> None:
    """End this process when the parent's end of the pipe closes, by whatever death."""

    def watch() -> None:
        # The bare descriptor: a buffered stream would be locked when the interpreter wants to close it.
        while os.read(descriptor, 1):
            pass
        os._exit(EXIT_DEAD)

    threading.Thread(target=watch, name="rabbet-parent-watch", daemon=True).start()


class _Heart:
    """Sends a heartbeat twice a second, on a socket of its own, from a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, core: EngineCore) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(context, address, core), daemon=True)
        self._thread.start()

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], address: str, core: EngineCore) -> None:
        socket = connect(context, zmq.PUSH, address, bind=False)
        while not self._stop.wait(_HEARTBEAT_S):
            started = core.step_started_s
            busy_s = 0.0 if started is None else time.monotonic() - started
            socket.send(encode(Heartbeat(busy_s=busy_s, stats=core.stats())))
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

    def send(message: FromEngine) -> None:
        outbox.send(encode(message))

    core: EngineCore | None = None
    heart: _Heart | None = None
    try:
        core = _build(start, send)
        heart = _Heart(context, address, core)

        def receive(timeout_s: float) -> list[ToEngine]:
            return receive_all(inbox, timeout_s, decode_to_engine)  # type: ignore[return-value]

        EngineLoop(core, receive, send).run()
        return 0
    except RabbetError as error:
        logger.debug("the engine failed", exc_info=True)
        send(Failed(kind=type(error).__name__, message=str(error)))
        return EXIT_CONFIG if isinstance(error, ConfigError | PluginError) else EXIT_DEAD
    except Exception as error:  # the edge of the process: report, then end with a status that says so
        logger.exception("the engine failed")
        send(Failed(kind="other", message=f"{type(error).__name__}: {error}"))
        return EXIT_DEAD
    finally:
        if heart is not None:
            heart.stop()
        if core is not None:
            core.close()
        inbox.close()
        outbox.close()
        context.term()


def _build(start: Start, send: Callable[[FromEngine], None]) -> EngineCore:
    """Resolve the configuration and load the model, telling the front of each phase."""
    began = time.monotonic()

    def phase(name: str) -> None:
        nonlocal began
        now = time.monotonic()
        send(Phase(name=name, seconds=now - began))
        began = now

    phase("choosing plugins")
    for path in start.path:
        if path not in sys.path:
            sys.path.append(path)
    for module in start.modules:
        importlib.import_module(module)
    # Imported here: this is where torch comes in, and the front already knows that the process lives.
    from rabbet.config.resolve import resolve
    from rabbet.config.resolved import resolved_to_bytes
    from rabbet.config.schema import EngineConfig

    resolved = resolve(EngineConfig(**start.config), is_server=start.is_server)
    core = EngineCore(resolved, on_phase=phase)
    phase("ready")
    send(Ready(info=core.info, resolved=resolved_to_bytes(core.resolved)))
    return core


def main() -> int:
    """Entry of the process."""
    # Ctrl+C reaches the whole process group; the front decides what it means and tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = read_start(sys.stdin.buffer)
    die_with_parent(sys.stdin.fileno())
    logging.basicConfig(level=start.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    return run(start)


if __name__ == "__main__":
    sys.exit(main())
