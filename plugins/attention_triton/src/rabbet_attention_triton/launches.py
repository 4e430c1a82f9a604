"""The kernels as they are launched; imported where a device is about to be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rabbet_triton.launch import IS_INTERPRETED, Kernel, dependence

from rabbet_attention_triton.kernels import chunk_kernel, decode_kernel, store_kernel

__all__ = ["HopperShape", "chunk", "chunk_on_hopper", "decode", "dependence", "hopper_shape", "store"]

store, decode, chunk = Kernel(store_kernel), Kernel(decode_kernel), Kernel(chunk_kernel)

_HOPPER = (9, 0)
_SHORT = 1024
"""Keys up to which small tiles win: 32 x 512 took 259 us against 290, 4 x 4,096 1,242 against 1,144 (H200)."""
_MOST_ROWS = 2**31 - 2**20
"""Rows of a cache that coordinates of 32 bits reach, with room for those of a page."""
_hopper_kernel: Kernel | None = None


@dataclass(frozen=True, slots=True)
class HopperShape:
    """What of the Hopper kernel is a matter of speed alone: keys of a tile, tiles of the ring, slots of a copy,
    registers of a consumer's thread and of the producer's, keys of the longest request up to which tiles have 64.
    """

    columns: int = 128
    stages: int = 2
    box: int = 16
    registers: int = 232
    least: int = 40
    short: int = _SHORT


def hopper_shape(device: torch.device, dtype: str, head_dim: int, group: int, block_size: int) -> HopperShape | None:
    """How chunks are computed by the kernel for Hopper; None: they are not."""
    global _hopper_kernel
    # AMD's MI200 calls itself 9.0 too.
    if IS_INTERPRETED.value or device.type != "cuda" or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability(device) != _HOPPER:
        return None
    if dtype not in ("bfloat16", "float16") or head_dim > 128 or group > 64 or 64 % group:
        return None
    if _hopper_kernel is None:
        try:
            from rabbet_attention_triton.hopper_kernels import hopper_chunk_kernel
        except ImportError:  # Gluon is Triton's experiment still: another version may lack it.
            return None
        _hopper_kernel = Kernel(hopper_chunk_kernel)
    box = min(block_size & -block_size, 64)
    return HopperShape(box=box) if head_dim > 64 else HopperShape(stages=4, box=box)


def _fitting(shape: HopperShape, most_keys: int) -> HopperShape:
    return replace(shape, columns=64, stages=4) if most_keys <= shape.short else shape


def chunk_on_hopper(
    shape: HopperShape, out: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, arguments: Sequence[Any], *, programs: int,
    tiles: int, most_keys: int, sizes: tuple[int, int, int, int], numbers: Sequence[Any], flags: Sequence[bool], dependent: int,
) -> bool:  # fmt: skip
    """Launch the kernel for Hopper, unless the tensors lie so that its copies cannot reach them: then False.

    Args:
        arguments: Tensors from ``tile_requests`` to ``slopes`` in the kernel's order.
        tiles: Of all heads together, tiles times K.
        most_keys: Of the longest request.
        sizes: K, G, S, D.
        numbers: Elements of a table's row, scale, window, soft cap.
        flags: HAS_WINDOW to HAS_ALIBI.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_heads, group, block_size, head_dim = sizes
    shape = _fitting(shape, most_keys)
    page, blocks = cache.stride(0), cache.shape[0]
    page_rows = page // head_dim
    rows = (blocks - 1) * page_rows + 2 * num_heads * block_size
    is_reachable = page % head_dim == 0 and rows < _MOST_ROWS and numbers[1] > 0
    is_aligned = q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.data_ptr() % 16 == 0 and cache.data_ptr() % 16 == 0
    if not (is_reachable and is_aligned):
        return False
    flat = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    deep = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    queries = TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // group, group, 64], deep)
    pages = TensorDescriptor(cache, [rows, head_dim], [head_dim, 1], [shape.box, 64], flat)
    assert _hopper_kernel is not None
    _hopper_kernel(
        (min(programs, tiles), 1, 1), out, queries, pages, *arguments, tiles, page_rows, rows, *numbers,
        num_heads, group, block_size, head_dim, 64 if head_dim <= 64 else 128, shape.columns,
        shape.box, shape.stages, shape.registers, shape.least, *flags, dependent, num_warps=4,
    )  # fmt: skip
    return True
