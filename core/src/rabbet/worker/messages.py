"""What travels between an executor and its worker processes: typed msgpack, never pickle."""

from __future__ import annotations

import msgspec

from rabbet.contracts.executor import MemoryReport
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan
from rabbet.worker.child import StartMessage

__all__ = [
    "Close",
    "Done",
    "Execute",
    "FromWorker",
    "InitializeCache",
    "Load",
    "Loaded",
    "Profile",
    "Profiled",
    "Stepped",
    "ToWorker",
    "WorkerFailed",
    "WorkerStart",
    "decode_from_worker",
    "decode_to_worker",
    "encode",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base: positional fields behind the class's name."""


class WorkerStart(StartMessage, frozen=True, kw_only=True):
    """What a rank is told first."""

    resolved: bytes
    rank: int
    world_size: int
    init_method: str


class Load(_Message, frozen=True):
    """Build and load the model."""


class Profile(_Message, frozen=True):
    """Measure memory."""


class InitializeCache(_Message, frozen=True):
    """Allocate the cache and warm up."""

    config: KVCacheConfig


class Execute(_Message, frozen=True):
    """Run a step."""

    plan: StepPlan


class Close(_Message, frozen=True):
    """Free everything and end."""


class Loaded(_Message, frozen=True):
    """The model is loaded."""

    rank: int
    specs: dict[str, KVCacheSpec]
    digest: str


class Profiled(_Message, frozen=True):
    """Memory was measured."""

    rank: int
    report: MemoryReport


class Done(_Message, frozen=True):
    """The cache is there. ``tampered``: owner and place of each change of core that the rank found."""

    rank: int
    tampered: list[tuple[str, str]]


class Stepped(_Message, frozen=True):
    """A step ran; only rank 0 sends the result."""

    rank: int
    step_id: int
    result: StepResult | None


class WorkerFailed(_Message, frozen=True):
    """A command failed. ``kind`` is the name of an exception of ``rabbet.errors``, or ``other``."""

    rank: int
    kind: str
    message: str


ToWorker = Load | Profile | InitializeCache | Execute | Close
FromWorker = Loaded | Profiled | Done | Stepped | WorkerFailed

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """msgpack bytes of a message."""
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises ``msgspec.MsgspecError`` for anything but a command."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Raises ``msgspec.MsgspecError`` for anything but an answer."""
    return _from_worker.decode(data)
