"""Graphs on processor cores: the kernel calls of a step as data, replayed by one call.

A decode step of a small model makes some three hundred kernel calls, and Python needs a third as long for them as the
kernels. So a step is recorded while it runs: calls into the compiled library with their arguments, and what torch computed
between them (an embedding, say) as operations to be repeated. Tensors made during the recording live in an arena, whose
addresses are the same in each replay.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rabbet.contracts.platform import CaptureError, GraphSession
from rabbet_hw_cpu import native

__all__ = ["Arena", "capture"]

_OPERATIONS = (
    "rabbet_rms_norm", "rabbet_add_rms_norm", "rabbet_rotary", "rabbet_gated", "rabbet_attention", "rabbet_linear",
)  # fmt: skip
"""Their numbers are those of ``rabbet_replay``."""
_ALIGNMENT = 64
_CHUNK_BYTES = 4 << 20


class _Call(ctypes.Structure):
    """Mirror of ``RabbetCall``."""

    _fields_ = [("operation", ctypes.c_int64), ("a", ctypes.c_int64 * 13), ("f", ctypes.c_double)]


class Arena:
    """Memory for the tensors of all sessions: each recording begins at its start, since only one session runs at a time.

    Attributes:
        chunks: The memory, uint8; it grows and is never given back.
    """

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []
        self._chunk = self._used = 0

    def rewind(self) -> None:
        """Begin at the start again."""
        self._chunk = self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes that nobody else in this recording has."""
        while self._chunk < len(self.chunks):
            chunk = self.chunks[self._chunk]
            if self._used + num_bytes <= chunk.numel():
                taken = chunk[self._used : self._used + num_bytes]
                self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
                return taken
            self._chunk, self._used = self._chunk + 1, 0
        self.chunks.append(torch.empty(max(num_bytes, _CHUNK_BYTES), dtype=torch.uint8))
        return self.take(num_bytes)


class _Replay(GraphSession):
    """Runs of compiled calls, and torch's operations between them."""

    def __init__(self, parts: list[Callable[[], None]], kept: list[Any]) -> None:
        self._parts = parts
        self._kept = kept

    def replay(self) -> None:
        """See ``GraphSession``."""
        for part in self._parts:
            part()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch in this thread while it is active; the compiled calls are brought to it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: else the first recording, in the first request, imports the compiler for a second."""
        return False

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._parts: list[Callable[[], None]] = []
        self._calls: list[_Call] = []
        self._kept: list[Any] = []

    # ---- compiled calls

    def add_call(self, operation: int, arguments: tuple[Any, ...]) -> None:
        """One call of the library."""
        call = _Call(operation=operation)
        place = 0
        for argument in arguments:
            if isinstance(argument, float):
                call.f = argument
                continue
            if argument is None:
                argument = 0
            elif not isinstance(argument, int):
                # A structure by reference, which the next layer overwrites.
                copy = type(argument._obj).from_buffer_copy(argument._obj)
                self._kept.append(copy)
                argument = ctypes.addressof(copy)
            call.a[place] = argument
            place += 1
        self._calls.append(call)

    def _end_run(self) -> None:
        if not self._calls:
            return
        calls = (_Call * len(self._calls))(*self._calls)
        count, library = len(calls), native.library()
        assert library is not None
        self._calls = []
        self._parts.append(lambda: library.rabbet_replay(calls, count))

    # ---- operations of torch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace.startswith(("c10d", "_c10d")) or {
            torch.Tag.data_dependent_output,
            torch.Tag.dynamic_output_shape,
        } & set(func.tags):
            raise CaptureError(f"{func} cannot be replayed")
        result = func(*args, **kwargs)
        if func.is_view and _shares_memory(result, args):
            self._kept.append(result)
            return result
        results, _ = tree_flatten(result)
        if any(not isinstance(item, torch.Tensor) for item in results):
            raise CaptureError(f"{func} gives something other than tensors")
        if func in _ALLOCATIONS:
            return self._moved(result)
        self._end_run()
        if func._schema.is_mutable:

            def again() -> None:
                func(*args, **kwargs)

        else:

            def again() -> None:
                for old, new in zip(results, tree_flatten(func(*args, **kwargs))[0], strict=True):
                    old.copy_(new)

        self._parts.append(again)
        self._kept.append(results)
        return result

    def _moved(self, made: torch.Tensor) -> torch.Tensor:
        """A tensor without contents like ``made``, in the arena."""
        if made.device.type != "cpu" or not made.is_contiguous():
            raise CaptureError(f"a tensor on {made.device} with strides {made.stride()} cannot be placed")
        if made.numel() == 0:
            return made
        taken = self._arena.take(made.nbytes)
        moved = taken.view(made.dtype).view(made.shape)
        self._kept.append(moved)
        return moved

    def session(self) -> _Replay:
        """What was recorded."""
        self._end_run()
        return _Replay(self._parts, self._kept)


def _shares_memory(result: Any, args: Any) -> bool:
    """Whether a view is one: ``to``, ``reshape`` and ``contiguous`` are called so, and copy where they must."""
    given = {item.untyped_storage().data_ptr() for item in tree_flatten(args)[0] if isinstance(item, torch.Tensor)}
    made = [item for item in tree_flatten(result)[0] if isinstance(item, torch.Tensor)]
    return all(item.untyped_storage().data_ptr() in given for item in made)


_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
)


def capture(work: Callable[[], None], arena: Arena) -> GraphSession:
    """Run ``work`` once and return what replays it.

    Raises:
        CaptureError: If an operation cannot be replayed.
    """
    arena.rewind()
    recorder = _Recorder(arena)
    with _calls_brought_to(recorder), recorder:
        work()
    return recorder.session()


_recording = threading.Lock()


@contextmanager
def _calls_brought_to(recorder: _Recorder) -> Iterator[None]:
    """The library's functions tell the recorder of each call that this thread makes."""
    library = native.library()
    if library is None:
        raise CaptureError("there are no compiled kernels")
    thread = threading.get_ident()

    def recording(number: int, function: Any) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if threading.get_ident() == thread:
                recorder.add_call(number, arguments)
            function(*arguments)

        return call

    with _recording:
        functions = {name: getattr(library, name) for name in _OPERATIONS}
        try:
            for number, (name, function) in enumerate(functions.items()):
                setattr(library, name, recording(number, function))
            yield
        finally:
            for name, function in functions.items():
                setattr(library, name, function)
