"""What travels between a front process and its engine: typed msgpack, never pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from rabbet.contracts.scheduler import SchedulerStats
from rabbet.types.outputs import RequestDelta
from rabbet.types.request import EngineRequest
from rabbet.worker.child import StartMessage

__all__ = [
    "Abort",
    "Add",
    "Deltas",
    "EngineInfo",
    "Failed",
    "FromEngine",
    "Heartbeat",
    "Phase",
    "Ready",
    "Shutdown",
    "Start",
    "ToEngine",
    "Utility",
    "UtilityResult",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
]

MAX_MESSAGE_BYTES = 256 << 20


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base: positional fields behind the class's name."""


class Start(StartMessage, frozen=True, kw_only=True):
    """What the engine is told first.

    Attributes:
        config: ``EngineConfig`` as plain values.
        is_server: Online or offline defaults.
        log_level: Least severe level that is logged.
    """

    config: dict[str, Any]
    is_server: bool
    log_level: str = "info"


class Add(_Message, frozen=True, kw_only=True):
    """A new request."""

    request: EngineRequest


class Abort(_Message, frozen=True, kw_only=True):
    """Requests that nobody waits for any more."""

    request_ids: list[str]


class Utility(_Message, frozen=True, kw_only=True):
    """A call by name: ``ping``, ``reset_prefix_cache``, ``stats``, ``check_integrity``."""

    call_id: int
    name: str


class Shutdown(_Message, frozen=True, kw_only=True):
    """End after the running requests, or at once with a timeout of 0."""

    timeout_s: float


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of a ready engine."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    capacity_tokens: int
    max_concurrency: float
    weights_bytes: int
    kv_cache_bytes: int


class Phase(_Message, frozen=True, kw_only=True):
    """A phase of the start has begun; ``seconds`` is how long the one before took."""

    name: str
    seconds: float


class FilesFound(_Message, frozen=True, kw_only=True):
    """The model is on disk; its weights are not loaded yet. ``tokenizer_dir`` is None if it has no tokenizer."""

    tokenizer_dir: str | None


class Ready(_Message, frozen=True, kw_only=True):
    """The engine serves. ``resolved`` is what it runs, as ``resolved_to_bytes`` writes it."""

    info: EngineInfo
    resolved: bytes


class Deltas(_Message, frozen=True, kw_only=True):
    """News of requests after one step."""

    deltas: list[RequestDelta]


class Heartbeat(_Message, frozen=True, kw_only=True):
    """The engine's loop lives. ``busy_s`` is how long its current turn has been going on, 0 without work."""

    busy_s: float
    stats: SchedulerStats


class UtilityResult(_Message, frozen=True, kw_only=True):
    """Answer to a ``Utility``; ``error`` is None if it worked."""

    call_id: int
    value: Any
    error: str | None


class Failed(_Message, frozen=True, kw_only=True):
    """The engine cannot start or go on. ``kind`` is the name of an exception of ``rabbet.errors``, or ``other``."""

    kind: str
    message: str


ToEngine = Add | Abort | Utility | Shutdown
FromEngine = Phase | FilesFound | Ready | Deltas | Heartbeat | UtilityResult | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Any) -> bytes:
    """msgpack bytes of a message."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises ``msgspec.MsgspecError`` or ``rabbet.errors.ClientError`` for anything but a message to the engine."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises ``msgspec.MsgspecError`` for anything but a message of the engine."""
    return _from_engine.decode(data)
