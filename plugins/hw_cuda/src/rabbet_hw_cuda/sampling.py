"""Draws tokens on the device. See ``sampling_kernels`` for how.

Shapes: B rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import torch
import triton
from rabbet_triton.launch import Kernel, dependence

from rabbet.contracts.platform import DrawBatch
from rabbet_hw_cuda.sampling_kernels import chunk_kernel, row_kernel

__all__ = ["draw"]

_chunk, _row = Kernel(chunk_kernel), Kernel(row_kernel)
_BLOCK = 4096
_ROWS_AT_ONCE = 32
"""Rows that are sorted together: a sort takes several times their memory."""


def draw(logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
    """See ``SupportsAsyncSteps.draw``."""
    count, vocab_size = logits_BV.shape
    out = torch.empty(count, dtype=torch.int64, device=logits_BV.device)
    if not count:
        return out
    if batch.is_filtered:
        logits_BV = torch.cat(
            [_filtered(logits_BV[i : i + _ROWS_AT_ONCE], batch, i) for i in range(0, count, _ROWS_AT_ONCE)]
        )
    elif logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    chunks = triton.cdiv(vocab_size, _BLOCK)
    scores = torch.empty((count, chunks), dtype=torch.float32, device=logits_BV.device)
    ids = torch.empty((count, chunks), dtype=torch.int32, device=logits_BV.device)
    dependent = dependence(logits_BV, is_small=count == 1)
    _chunk(
        (count, chunks, 1), logits_BV, batch.temperature_B, batch.seed_B, batch.index_B, scores, ids,
        logits_BV.stride(0), vocab_size, _BLOCK, batch.is_random, dependent, num_warps=8,
    )  # fmt: skip
    _row((count, 1, 1), scores, ids, out, chunks, triton.next_power_of_2(chunks), dependent, num_warps=1)
    return out


def _filtered(logits_RV: torch.Tensor, batch: DrawBatch, first: int) -> torch.Tensor:
    """float32 logits, minus infinity where a filter excludes an id. Rows without filters, and greedy ones, lose nothing.

    Rows that are not finite stay so: what a comparison with NaN excludes is put back.
    """
    part = slice(first, first + logits_RV.shape[0])
    logits = logits_RV.float()
    temperature = batch.temperature_B[part].unsqueeze(1)
    top_k = batch.top_k_B[part].unsqueeze(1)
    top_p, min_p = batch.top_p_B[part].unsqueeze(1), batch.min_p_B[part].unsqueeze(1)
    probabilities = torch.softmax(logits / torch.where(temperature > 0, temperature, 1.0), dim=-1)
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(values.shape[1], device=values.device)
    kept = (values >= values[:, :1] * min_p) & ((ranks < top_k) | (top_k <= 0))
    weights = torch.where(kept, values, 0.0).double()
    before = weights.cumsum(dim=-1) - weights
    kept &= (before < top_p * weights.sum(-1, keepdim=True)) | (ranks == 0)
    is_kept = torch.empty_like(kept).scatter_(1, order, kept)
    is_kept |= (temperature <= 0) | ~torch.isfinite(values[:, :1])
    return logits.masked_fill(~is_kept, float("-inf"))
