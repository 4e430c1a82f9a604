"""Kernels of the small operations.

Shapes: T tokens, N hidden size, H query heads, K key heads, D head size, R rotated elements of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from rabbet_triton.launch import enter, wait_for_inputs

__all__ = ["gated_kernel", "rms_norm_kernel", "rotary_kernel"]


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, x_outer, x_inner, INNER, eps,
    N: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row a program: row r of x lies at r // INNER * x_outer + r % INNER * x_inner; residual and out are contiguous.

    With HAS_RESIDUAL the sum goes to ``residual``, and rows of x are those of ``out``.
    """
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < N
    scale = tl.load(weight + columns, inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    values = tl.load(x + row // INNER * x_outer + row % INNER * x_inner + columns, inside, other=0.0)
    if HAS_RESIDUAL:
        # The sum is rounded before it is normalised: what the next layer adds to is what this one saw.
        kept = tl.load(residual + row * N + columns, inside, other=0.0)
        total = values.to(tl.float32) + kept.to(tl.float32)
        values = total.to(residual.dtype.element_ty)
        tl.store(residual + row * N + columns, values, inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    tl.store(out + row * N + columns, (wide * inverse * scale).to(out.dtype.element_ty), inside)


@triton.jit
def _turn(
    base, token, head, heads, stride_token, stride_head, weight, cosine, sine, eps,
    D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    IS_NEOX: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, from ``head`` on, in place."""
    rows = head + tl.arange(0, HEADS)
    pairs = tl.arange(0, WIDTH)
    start = base + token * stride_token + rows[:, None] * stride_head
    inside = (rows < heads)[:, None] & (pairs < HALF)[None, :]
    if IS_NEOX:
        at_first = pairs
        at_second = pairs + HALF
    else:
        at_first = 2 * pairs
        at_second = 2 * pairs + 1
    first = tl.load(start + at_first[None, :], inside, other=0.0).to(tl.float32)
    second = tl.load(start + at_second[None, :], inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            others = 2 * HALF + tl.arange(0, REST)
            is_other = (rows < heads)[:, None] & (others < D)[None, :]
            rest = tl.load(start + others[None, :], is_other, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        first_scale = tl.load(weight + at_first, pairs < HALF, other=0.0).to(tl.float32)
        second_scale = tl.load(weight + at_second, pairs < HALF, other=0.0).to(tl.float32)
        first = first * inverse * first_scale[None, :]
        second = second * inverse * second_scale[None, :]
        if REST > 0:
            rest = rest * inverse * tl.load(weight + others, others < D, other=0.0).to(tl.float32)[None, :]
            tl.store(start + others[None, :], rest.to(base.dtype.element_ty), is_other)
    tl.store(start + at_first[None, :], (first * cosine - second * sine).to(base.dtype.element_ty), inside)
    tl.store(start + at_second[None, :], (second * cosine + first * sine).to(base.dtype.element_ty), inside)


@triton.jit
def rotary_kernel(
    q, k, positions, table, q_weight, k_weight, eps,
    q_token, q_head, k_token, k_head,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, IS_NEOX: tl.constexpr, HAS_NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """HEADS query or key heads of one token a program: norm of each head, if any, then the rotation. In place."""
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pairs = tl.arange(0, WIDTH)
    row = table + tl.load(positions + token) * (2 * HALF)
    cosine = tl.load(row + pairs, pairs < HALF, other=0.0)[None, :]
    sine = tl.load(row + HALF + pairs, pairs < HALF, other=0.0)[None, :]
    q_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < q_parts:
        _turn(
            q, token, part * HEADS, H, q_token, q_head, q_weight, cosine, sine, eps,
            D, HALF, WIDTH, REST, HEADS, IS_NEOX, HAS_NORM,
        )  # fmt: skip
    else:
        _turn(
            k, token, (part - q_parts) * HEADS, K, k_token, k_head, k_weight, cosine, sine, eps,
            D, HALF, WIDTH, REST, HEADS, IS_NEOX, HAS_NORM,
        )  # fmt: skip


@triton.jit
def gated_kernel(
    x, out, x_row, N, BLOCK: tl.constexpr, KIND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one row: act(x[:N]) * x[N:]. KIND: 0 silu, 1 gelu, 2 gelu by tanh."""
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate = tl.load(x + row * x_row + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + N + columns, inside, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh by an exponential that cannot overflow.
        power = tl.exp(-2.0 * tl.abs(inner))
        size = (1.0 - power) / (1.0 + power)
        gate = 0.5 * gate * (1.0 + tl.where(inner >= 0, size, -size))
    tl.store(out + row * N + columns, (gate * up).to(out.dtype.element_ty), inside)
