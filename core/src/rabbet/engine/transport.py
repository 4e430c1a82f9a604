"""Sockets between front and engine: unix sockets in a directory that only this user can enter."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from rabbet.engine.messages import MAX_MESSAGE_BYTES
from rabbet.errors import ClientError

__all__ = ["SocketDirectory", "connect", "receive_all"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class SocketDirectory:
    """A private directory (0700) for sockets; removed by ``close``."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rabbet-"))

    def address(self, name: str) -> str:
        """The address of a socket in it."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


def connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, *, bind: bool) -> zmq.Socket[bytes]:
    """A socket with bounded messages that does not hold up the end of the process."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def receive_all(socket: zmq.Socket[bytes], timeout_s: float, decode: object) -> list[object]:
    """Every message that is there, waiting at most ``timeout_s`` for the first. What is no message is dropped."""
    messages: list[object] = []
    if not socket.poll(int(timeout_s * 1000)):
        return messages
    while True:
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return messages
        try:
            messages.append(decode(data))  # type: ignore[operator]
        except (msgspec.MsgspecError, ClientError, RecursionError) as error:
            logger.warning("a message of %d bytes on an engine socket is dropped: %s", len(data), error)
