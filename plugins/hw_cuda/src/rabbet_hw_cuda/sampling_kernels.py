"""Kernels that draw tokens: the largest of scores with Gumbel noise, in one pass over the vocabulary.

argmax_i (logit_i / T - log E_i), with E_i exponential, draws i with probability softmax(logits / T)_i (Gumbel, 1954;
"Gumbel-max"). E_i comes from a hash of the request's seed, the token's index and i, so that nothing else in the batch
changes it. The hash is two rounds of a 32-bit finaliser (Wellons, "Prospecting for hash functions", 2018) over key and id.

Shapes: B rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from rabbet_triton.launch import enter, wait_for_inputs

__all__ = ["chunk_kernel", "row_kernel"]

_NONE = tl.constexpr(2147483647)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(seed, index, ids):
    """log of an exponential variate of each id, float32."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(low ^ _mix((index & 0xFFFFFFFF).to(tl.uint32) + 0x9E3779B9))
    other = _mix(high + key)
    bits = _mix(_mix(ids.to(tl.uint32) ^ key) + other)
    # Uniform in (0, 1), with all its bits where it is small: there lie the ids that can win.
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    # Rounding may have made it 1, whose logarithm the exponential of nobody is.
    large = -tl.log(tl.maximum(1.0 - uniform, 5.9604645e-08))
    return tl.log(tl.where(uniform < 0.01, small, large))


@triton.jit
def chunk_kernel(
    logits, temperatures, seeds, indices, scores, ids, row_stride, V,
    BLOCK: tl.constexpr, IS_RANDOM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The best score of BLOCK logits of one row, and its id: -1 if one of them is NaN or plus infinity."""
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * row_stride + at, at < V, other=float("-inf")).to(tl.float32)
    is_bad = tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0)
    if IS_RANDOM:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            values = values / temperature - _noise(tl.load(seeds + row), tl.load(indices + row), at)
    best = tl.max(tl.where(values == values, values, float("-inf")), 0)
    first = tl.min(tl.where(values == best, at, _NONE), 0)
    place = row * tl.num_programs(1) + part
    tl.store(scores + place, best)
    tl.store(ids + place, tl.where(is_bad > 0, -1, first))


@triton.jit
def row_kernel(scores, ids, out, COUNT, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    """The best chunk of one row, the first of equal ones; -1 if any chunk is bad, or no logit is finite."""
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    values = tl.load(scores + row * COUNT + at, at < COUNT, other=float("-inf"))
    found = tl.load(ids + row * COUNT + at, at < COUNT, other=_NONE)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, found, _NONE), 0)
    is_bad = (tl.min(found, 0) < 0) | (best == float("-inf"))
    tl.store(out + row, tl.where(is_bad, -1, token).to(tl.int64))
