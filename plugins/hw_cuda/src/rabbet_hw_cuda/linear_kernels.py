"""Products of few rows with a matrix: the matrix is read once, at the speed of memory.

Shapes: T rows, IN inputs, OUT outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rabbet_hw_cuda.launch import IS_INTERPRETED, let_next_begin, wait_for_inputs

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
    let_next_begin(DEPENDENT)
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


@triton.jit
def few_kernel(
    x, weight, bias, out, T, OUT, x_row,
    IN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of up to ROWS rows. IS_GATED as in ``one_kernel``."""
    let_next_begin(DEPENDENT)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, INPUTS)
    is_row, is_output = rows < T, outputs < OUT
    at_x = x + rows[:, None].to(tl.int64) * x_row + columns[None, :]
    at_weight = weight + outputs[None, :].to(tl.int64) * IN + columns[:, None]
    at_up = weight + (outputs + OUT)[None, :].to(tl.int64) * IN + columns[:, None]
    wait_for_inputs(DEPENDENT)
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, IN, INPUTS):
        in_columns = start + columns < IN
        tile = tl.load(at_x + start, is_row[:, None] & in_columns[None, :], other=0.0)
        matrix = tl.load(at_weight + start, is_output[None, :] & in_columns[:, None], other=0.0)
        if IS_INTERPRETED:
            tile = tile.to(tl.float32)
            matrix = matrix.to(tl.float32)
        sums = tl.dot(tile, matrix, sums, input_precision="ieee")
        if IS_GATED:
            matrix = tl.load(at_up + start, is_output[None, :] & in_columns[:, None], other=0.0)
            if IS_INTERPRETED:
                matrix = matrix.to(tl.float32)
            up_sums = tl.dot(tile, matrix, up_sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + outputs, is_output, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        sums = _silu(sums) * up_sums
    inside = is_row[:, None] & is_output[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * OUT + outputs[None, :], sums.to(out.dtype.element_ty), inside)
