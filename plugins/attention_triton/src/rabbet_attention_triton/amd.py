"""Shapes of the kernels on AMD GPUs, as data by architecture.

Programs of gfx9 have 64 threads a warp (a "wavefront"), those of gfx11 and gfx12 have 32. None of this was timed, since no such
GPU was at hand. Chosen is what Triton 3.9 compiles without spilled registers, or with the fewest, at head size 128 in
bfloat16, with half of the local memory (64 KiB, on gfx950 160) or less; ``tests/test_amd.py`` compiles it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["AmdShape", "amd_shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AmdShape:
    """What differs from NVIDIA's GPUs, in speed alone.

    Attributes:
        columns: Keys of a tile at most.
        chunk_rows: Rows of a chunk's tile at most, where no group needs more.
        decode: Options of a decode's launch: warps, stages, and those of Triton's compiler for AMD.
        chunk: Likewise of a chunk's.
    """

    columns: int
    chunk_rows: int
    decode: Mapping[str, int]
    chunk: Mapping[str, int]


_WIDE = AmdShape(
    columns=64,
    chunk_rows=128,
    decode={"num_warps": 4, "num_stages": 2, "waves_per_eu": 2, "matrix_instr_nonkdim": 16},
    # Of 16 rather than 32 rows an instruction: 194 registers a thread in place of 256 and spills.
    chunk={"num_warps": 8, "num_stages": 2, "waves_per_eu": 2, "matrix_instr_nonkdim": 16},
)
_NARROW = AmdShape(
    columns=32,
    chunk_rows=64,
    decode={"num_warps": 4, "num_stages": 2},
    chunk={"num_warps": 8, "num_stages": 2},
)
_SHAPES = {
    "gfx90a": _WIDE,
    "gfx942": _WIDE,
    "gfx950": _WIDE,
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"), _NARROW),
}


def amd_shape(arch: str) -> AmdShape | None:
    """The shapes for ``arch``; for an AMD GPU that is not listed the cautious ones, for others None."""
    return _SHAPES.get(arch, _NARROW) if arch.startswith("gfx") else None
