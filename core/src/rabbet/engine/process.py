"""The engine process: ``python -m rabbet.engine.process`` with its configuration on standard input.

Standard input stays open as long as the parent lives; its end means that the parent is gone, and so does this
process. Exit status: 0 after a shutdown, 2 for a wrong configuration, 3 if the engine died.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

import zmq

from rabbet._util.log import log_to_stderr
from rabbet._util.memory import lacks_memory
from rabbet.config.resolve import resolve
from rabbet.config.resolved import resolved_to_bytes
from rabbet.config.schema import EngineConfig
from rabbet.engine.core import EngineCore
from rabbet.engine.loop import EngineLoop
from rabbet.engine.messages import (
    Failed,
    FilesFound,
    FromEngine,
    Phase,
    Ready,
    Start,
    ToEngine,
    decode_to_engine,
    encode,
)
from rabbet.engine.sizing import check_steps, no_memory
from rabbet.engine.transport import Receiver, connect
from rabbet.errors import ConfigError, PluginError, RabbetError, WeightsError
from rabbet.worker.child import EXIT_DEAD, make_visible, read_start

__all__ = ["EXIT_CONFIG", "EXIT_DEAD", "build", "failure_of", "main"]

EXIT_CONFIG = 2
_HEARTBEAT_S = 0.25
logger = logging.getLogger(__name__)


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
    inbox = connect(context, zmq.PULL, f"ipc://{start.socket_dir}/to-engine", bind=True)
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
        make_visible(start)
        core = build(EngineConfig(**start.config), is_server=start.is_server, send=send)
        loop = EngineLoop(core, receive, send)
        heart = _Heart(context, address, loop)
        send(Ready(info=core.info, resolved=resolved_to_bytes(core.resolved)))
        loop.run()
        return 0
    except BaseException as error:  # noqa: BLE001  the edge of the process: report, then end with a status that says so
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


def failure_of(error: BaseException) -> tuple[Failed, int]:
    """What to tell the front of an exception that ends the engine, and the exit status. Unexpected ones are logged."""
    if isinstance(error, RabbetError):
        logger.debug("the engine ends", exc_info=error)
        is_config = isinstance(error, ConfigError | PluginError | WeightsError)
        return Failed(kind=type(error).__name__, message=str(error)), EXIT_CONFIG if is_config else EXIT_DEAD
    logger.error("the engine failed", exc_info=error)
    return Failed(kind="other", message=f"{type(error).__name__}: {error}"), EXIT_DEAD


def build(config: EngineConfig, *, is_server: bool, send: Callable[[FromEngine], None]) -> EngineCore:
    """Resolve the configuration and load the model, telling the front of each phase and the log of all of them.

    Raises:
        RabbetError: What is wrong with the configuration, the plugins, the checkpoint or the memory.
    """
    began = time.monotonic()
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
    resolved = resolve(config, is_server=is_server)
    directory = resolved.files.tokenizer_dir
    send(FilesFound(tokenizer_dir=None if directory is None else str(directory)))
    check_steps(resolved)
    try:
        core = EngineCore(resolved, on_phase=phase)
    except Exception as error:
        if lacks_memory(error):
            raise no_memory(resolved, current, error) from error
        raise
    phase("ready")
    logger.info("start: %s", ", ".join(durations))
    return core


def main() -> int:
    """Entry of the process."""
    start = read_start(Start)
    log_to_stderr(start.log_level)
    return run(start)


if __name__ == "__main__":
    sys.exit(main())
