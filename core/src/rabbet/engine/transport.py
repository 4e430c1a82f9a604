"""Sockets between front and engine, and what is read from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from rabbet.engine.messages import MAX_MESSAGE_BYTES
from rabbet.errors import ClientError

__all__ = ["Receiver", "connect"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_LINGER_MS = 1000


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
