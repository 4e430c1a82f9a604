"""Products of few rows with a matrix: the matrix is read once, at the speed of memory.

Shapes: T rows, IN inputs, OUT outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from rabbet_triton.launch import IS_INTERPRETED, enter, wait_for_inputs

__all__ = ["few_kernel", "one_kernel"]


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def one_kernel(
    x, weight, bias, out, OUT,
    IN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one row. IS_GATED: of OUT = half the matrix's outputs, each silu(its own) * (the one OUT below)."""
    enter(DEPENDENT)
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, INPUTS)
    is_row = rows < OUT
    at = weight + rows[:, None].to(tl.int64) * IN + columns[None, :]
    at_up = weight + (rows + OUT)[:, None].to(tl.int64) * IN + columns[None, :]
    # Weights are nobody's output: the first ones are asked for before the kernels in front have ended.
    inside = is_row[:, None] & (columns < IN)[None, :]
    first_tile = tl.load(at, inside, other=0.0)
    if IS_GATED:
        first_up = tl.load(at_up, inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    values = tl.load(x + columns, columns < IN, other=0.0).to(tl.float32)
    sums = first_tile.to(tl.float32) * values[None, :]
    if IS_GATED:
        up_sums = first_up.to(tl.float32) * values[None, :]
    for start in tl.static_range(INPUTS, IN, INPUTS):
        if IN % INPUTS == 0:
            inside = is_row[:, None]
            values = tl.load(x + start + columns).to(tl.float32)
        else:
            inside = is_row[:, None] & (start + columns < IN)[None, :]
            values = tl.load(x + start + columns, start + columns < IN, other=0.0).to(tl.float32)
        sums += tl.load(at + start, inside, other=0.0).to(tl.float32) * values[None, :]
        if IS_GATED:
            up_sums += tl.load(at_up + start, inside, other=0.0).to(tl.float32) * values[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, is_row, other=0.0).to(tl.float32)
    if IS_GATED:
        result = _silu(result) * tl.sum(up_sums, 1)
    tl.store(out + rows, result.to(out.dtype.element_ty), is_row)


@triton.jit(do_not_specialize=["T"])
def few_kernel(
    x, weight, bias, out, partial, counters, T, OUT, x_row,
    IN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of up to ROWS rows, over one of SPLITS parts of the inputs. IS_GATED as in ``one_kernel``.

    The matrix is the left factor: tensor cores take its 64 rows at once, and as few columns as there are rows of x. The
    program that ends last for its outputs adds the parts up, in their order, so that the result is always the same.

    Args:
        partial: float32 [parts, SPLITS, 1 or 2, OUTPUTS, ROWS].
        counters: int32 [parts], zero before and after.
    """
    enter(DEPENDENT)
    part = tl.program_id(0)
    split = tl.program_id(1)
    lines = tl.arange(0, OUTPUTS)
    outputs = part * OUTPUTS + lines
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, INPUTS)
    is_row, is_output = rows < T, outputs < OUT
    share: tl.constexpr = ((IN + INPUTS - 1) // INPUTS + SPLITS - 1) // SPLITS * INPUTS
    begin = split * share
    at_x = x + rows[None, :].to(tl.int64) * x_row + columns[:, None]
    at_weight = weight + outputs[:, None].to(tl.int64) * IN + columns[None, :]
    at_up = weight + (outputs + OUT)[:, None].to(tl.int64) * IN + columns[None, :]
    wait_for_inputs(DEPENDENT)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(begin, tl.minimum(begin + share, IN), INPUTS):
        if IN % INPUTS == 0:
            matrix = tl.load(at_weight + start, is_output[:, None], other=0.0)
            tile = tl.load(at_x + start, is_row[None, :], other=0.0)
        else:
            in_columns = start + columns < IN
            matrix = tl.load(at_weight + start, is_output[:, None] & in_columns[None, :], other=0.0)
            tile = tl.load(at_x + start, is_row[None, :] & in_columns[:, None], other=0.0)
        if IS_INTERPRETED:
            tile = tile.to(tl.float32)
            matrix = matrix.to(tl.float32)
        sums = tl.dot(matrix, tile, sums, input_precision="ieee")
        if IS_GATED:
            if IN % INPUTS == 0:
                matrix = tl.load(at_up + start, is_output[:, None], other=0.0)
            else:
                matrix = tl.load(at_up + start, is_output[:, None] & in_columns[None, :], other=0.0)
            if IS_INTERPRETED:
                matrix = matrix.to(tl.float32)
            up_sums = tl.dot(matrix, tile, up_sums, input_precision="ieee")
    if SPLITS > 1:
        both: tl.constexpr = 2 if IS_GATED else 1
        size: tl.constexpr = OUTPUTS * ROWS
        place = lines[:, None] * ROWS + rows[None, :]
        mine = partial + (part * SPLITS + split) * (both * size)
        tl.store(mine + place, sums)
        if IS_GATED:
            tl.store(mine + size + place, up_sums)
        # All threads' stores come before the count, which the last program sees at its own.
        tl.debug_barrier()
        if tl.atomic_add(counters + part, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters + part, 0)
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up_sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for other in tl.static_range(SPLITS):
            its = partial + (part * SPLITS + other) * (both * size)
            sums += tl.load(its + place, cache_modifier=".cg")
            if IS_GATED:
                up_sums += tl.load(its + size + place, cache_modifier=".cg")
    if HAS_BIAS:
        sums += tl.load(bias + outputs, is_output, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        sums = _silu(sums) * up_sums
    inside = is_output[:, None] & is_row[None, :]
    tl.store(out + rows[None, :].to(tl.int64) * OUT + outputs[:, None], sums.to(out.dtype.element_ty), inside)
