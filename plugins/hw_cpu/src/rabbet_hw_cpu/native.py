"""The bridge to the compiled kernels: a plain C interface, called through ctypes; absent where nothing was compiled."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.attention import AttentionLayerSpec
    from rabbet.contracts.batch import AttentionBatch

__all__ = ["StepArguments", "attention", "has_amx", "library", "start", "step_arguments", "type_code"]

logger = logging.getLogger(__name__)
_FILE = Path(__file__).parent / "_kernels.so"
_ABI = 4
_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rabbet_has_amx": (_INT, ()),
    "rabbet_select": (_INT, (_INT,)),
    "rabbet_start": (None, (_INT, _POINTER)),
    "rabbet_rms_norm": (None, (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _FLOAT, _INT)),
    "rabbet_add_rms_norm": (None, (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _FLOAT, _INT)),
    "rabbet_rotary": (None, (*(_POINTER,) * 4, *(_INT64,) * 7, _INT, _INT)),
    "rabbet_gated": (None, (_POINTER, _POINTER, _INT64, _INT64, _INT, _INT)),
    "rabbet_attention": (None, (_POINTER, _INT, _INT)),
    "rabbet_packed_bytes": (_INT64, (_INT64, _INT64, _INT, _INT)),
    "rabbet_pack": (None, (_POINTER, _POINTER, _INT64, _INT64, _INT, _INT)),
    "rabbet_linear": (None, (*(_POINTER,) * 4, _INT64, _INT64, _INT64, _INT, _INT, _INT)),
    "rabbet_replay": (None, (_POINTER, _INT64)),
}


class _AttentionArgs(ctypes.Structure):
    """Mirror of ``AttentionArgs`` in kernels.h."""

    _fields_ = [
        *((name, _POINTER) for name in (
            "q", "k", "v", "cache", "out", "sinks", "query_start", "seq_lens", "block_table", "slots",
        )),
        *((name, _INT64) for name in (
            "q_stride", "k_stride", "v_stride", "num_requests", "num_tokens", "num_heads", "num_kv_heads", "head_dim",
            "block_size", "max_blocks", "window",
        )),
        ("scale", _FLOAT),
        ("soft_cap", _FLOAT),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepArguments:
    """One step's part of the kernel's arguments; each layer fills in its own tensors.

    Attributes:
        arguments: The structure.
        pointer: Its address.
        batch: Keeps the tensors alive that it points to.
    """

    arguments: _AttentionArgs
    pointer: Any
    batch: AttentionBatch


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None; says once in the log which of the two it is."""
    try:
        loaded = ctypes.CDLL(str(_FILE))
        if loaded.rabbet_abi() != _ABI:
            raise OSError("it was built for another version of this package")
    except OSError as error:
        logger.warning("no compiled CPU kernels (%s); plain torch is used, which is slower", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def has_amx() -> bool:
    """Whether the bfloat16 kernels on matrix tiles can be used."""
    loaded = library()
    return loaded is not None and bool(loaded.rabbet_has_amx())


def start(*, num_threads: int, cores: list[int] | None) -> None:
    """Start the kernels' threads; the calling thread is one of them. With ``cores`` each of the others is bound to one."""
    loaded = library()
    if loaded is not None:
        loaded.rabbet_start(num_threads, None if cores is None else (ctypes.c_int * len(cores))(*cores))


@cache
def type_code(dtype: torch.dtype) -> int | None:
    """0 for float32, 1 for bfloat16, None for what the kernels do not take."""
    import torch

    return 0 if dtype is torch.float32 else 1 if dtype is torch.bfloat16 else None


def step_arguments(batch: AttentionBatch) -> StepArguments | None:
    """The step's part of the arguments, or None without a library."""
    if library() is None:
        return None
    arguments = _AttentionArgs()
    arguments.query_start = batch.query_start.data_ptr()
    arguments.seq_lens = batch.seq_lens.data_ptr()
    arguments.block_table = batch.block_table.data_ptr()
    arguments.slots = batch.slot_mapping.data_ptr()
    arguments.num_requests = batch.num_requests
    arguments.num_tokens = batch.num_tokens
    arguments.max_blocks = batch.block_table.stride(0)
    return StepArguments(arguments, ctypes.byref(arguments), batch)


def attention(
    layer: AttentionLayerSpec,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    step: StepArguments,
    *,
    block_size: int,
    is_packed: bool,
) -> None:
    """Run the kernel on queries, keys, values, cache and output of one of its types."""
    q, k, v, cache, out = tensors
    q, k, v = _with_whole_heads(q), _with_whole_heads(k), _with_whole_heads(v)
    a = step.arguments
    a.q, a.k, a.v, a.cache, a.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), cache.data_ptr(), out.data_ptr()
    a.q_stride, a.k_stride, a.v_stride = q.stride(0), k.stride(0), v.stride(0)
    a.num_heads, a.num_kv_heads, a.head_dim = q.shape[1], k.shape[1], q.shape[2]
    a.block_size = block_size
    a.window = layer.window or 0
    a.scale = layer.scale
    a.soft_cap = layer.soft_cap or 0.0
    sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
    a.sinks = None if sinks is None else sinks.data_ptr()
    loaded = library()
    assert loaded is not None
    loaded.rabbet_attention(step.pointer, type_code(q.dtype), int(is_packed))


def _with_whole_heads(x_THD: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if a token's heads do not lie one behind the other."""
    dim = x_THD.shape[2]
    return x_THD if x_THD.stride(2) == 1 and x_THD.stride(1) == dim else x_THD.contiguous()
