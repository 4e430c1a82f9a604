"""Processes of Python modules that do not outlive the process that starts them: both ends of the start."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import TypeVar

import msgspec

__all__ = ["EXIT_DEAD", "StartMessage", "make_visible", "read_start", "spawn"]

EXIT_DEAD = 3
_PR_SET_PDEATHSIG = 1
_T = TypeVar("_T", bound="StartMessage")
logger = logging.getLogger(__name__)


class StartMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to do; its first input.

    Attributes:
        socket_dir: Private directory with the sockets.
        modules: Modules whose decorators staged plugins in the parent.
        path: ``sys.path`` of the parent, so that these modules are found.
        parent_pid: The parent, so that the process notices if it died before it could be watched.
    """

    socket_dir: str
    modules: list[str]
    path: list[str]
    parent_pid: int = msgspec.field(default_factory=os.getpid)


def spawn(module: str, start: StartMessage) -> subprocess.Popen[bytes]:
    """Start ``python -m module``, which calls ``read_start`` first; its standard input stays open as long as we live.

    The kernel ends it with the **thread** that calls this, not only with the process.
    """
    data = msgspec.msgpack.encode(start)
    # -P: a file in the current directory must not shadow a module of ours.
    process = subprocess.Popen([sys.executable, "-P", "-m", module], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
    except BrokenPipeError:
        # Whoever waits for it sees its status.
        logger.debug("%s ended before it read its start message", module)
    return process


def read_start(cls: type[_T]) -> _T:
    """The first message of the parent, with whom this process ends from now on; to be called first.

    Signals for the whole service are ignored: Ctrl+C reaches the whole process group and a service manager's SIGTERM
    each process, and it is for the front to decide what they mean.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler and not SIG_IGN, which programs that we start would inherit.
        signal.signal(number, lambda *_: None)
    stream = sys.stdin.buffer
    size = int.from_bytes(stream.read(8), "little")
    data = stream.read(size)
    if not data or len(data) < size:
        raise SystemExit(EXIT_DEAD)
    start = msgspec.msgpack.decode(data, type=cls)
    _die_with_parent(stream.fileno(), start.parent_pid)
    return start


def make_visible(start: StartMessage) -> None:
    """Find and import what the parent had registered itself."""
    sys.path += [path for path in start.path if path not in sys.path]
    for module in start.modules:
        importlib.import_module(module)


def _die_with_parent(descriptor: int, parent_pid: int) -> None:
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
