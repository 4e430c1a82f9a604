"""Sockets between front and engine: unix sockets in a directory that only this user can enter."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from rabbet.engine.messages import MAX_MESSAGE_BYTES
from rabbet.errors import ClientError, ConfigError

__all__ = ["Receiver", "SocketDirectory", "connect"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
# The kernel's limit on a unix socket's path is 107 bytes.
_MAX_PATH_BYTES = 107
_LONGEST_NAME = "from-engine"
_LINGER_MS = 1000


class SocketDirectory:
    """A private directory (0700) for sockets; removed by ``close``.

    It is needed only until both sides are connected: removing it then leaves nothing behind when a process is killed,
    and nothing for others to connect to.
    """

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix="rabbet-"))
            if len(bytes(self.path / _LONGEST_NAME)) > _MAX_PATH_BYTES:
                self.path.rmdir()
                self.path = Path(tempfile.mkdtemp(prefix="rabbet-", dir="/tmp"))
        except OSError as error:
            raise ConfigError(f"no directory for the engine's sockets can be made: {error}; set TMPDIR") from error

    def address(self, name: str) -> str:
        """The address of a socket in it."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove it; idempotent. Connections stay."""
        shutil.rmtree(self.path, ignore_errors=True)


def connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, *, bind: bool) -> zmq.Socket[bytes]:
    """A socket with bounded messages that does not hold up the end of the process."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # The engine's queue limits bound what waits; a high-water mark here would block the loop instead.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Receiver:
    """Reads typed messages from one socket. What is no message is dropped, with one log line for all of them."""

    def __init__(self, socket: zmq.Socket[bytes], decode: Callable[[bytes], _T]) -> None:
        self._socket = socket
        self._decode: Callable[[bytes], object] = decode
        self.num_dropped = 0

    def receive(self, timeout_s: float) -> list[object]:
        """Every message that is there, waiting at most ``timeout_s`` for the first."""
        messages: list[object] = []
        if timeout_s > 0 and not self._socket.poll(max(1, int(timeout_s * 1000))):
            return messages
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            message = self._decoded(frames)
            if message is not None:
                messages.append(message)

    def _decoded(self, frames: list[bytes]) -> object | None:
        try:
            if len(frames) == 1:
                return self._decode(frames[0])
            reason = f"it has {len(frames)} frames"
        except (msgspec.MsgspecError, ClientError, RecursionError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        self.num_dropped += 1
        if self.num_dropped == 1:
            size = sum(len(frame) for frame in frames)
            logger.warning("a message of %d bytes on an engine socket is dropped (%s); more are silently", size, reason)
        return None
