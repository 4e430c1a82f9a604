"""Draws tokens on the device in plain torch: nothing is read by the host, so steps go on and draws can be captured.

argmax_i (logit_i / T - log E_i), with E_i exponential, draws i with probability softmax(logits / T)_i ("Gumbel-max trick").
E_i comes from a hash of the request's seed, the token's index and i, so that nothing else in the batch changes it.

Source of the hash: splitmix64, Steele et al., OOPSLA 2014.

Shapes: B rows, R of them at a time, V vocabulary.
"""

from __future__ import annotations

import torch

from rabbet.contracts.platform import DrawBatch

__all__ = ["draw"]

_LOGITS_AT_ONCE = 1 << 23
"""Each takes 8 bytes, several times over."""


def _signed(value: int) -> int:
    """The 64 bits of ``value`` as torch's int64 has them; its products and sums wrap as the hash wants."""
    return value - (1 << 64) if value >> 63 else value


_STEP, _FIRST, _SECOND = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def draw(logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
    """See ``SupportsAsyncSteps.draw``."""
    count, vocab_size = logits_BV.shape
    step = max(1, _LOGITS_AT_ONCE // vocab_size)
    parts = [_draw(logits_BV[i : i + step], batch, i) for i in range(0, count, step)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits_BV.device)


def _draw(logits_RV: torch.Tensor, batch: DrawBatch, first: int) -> torch.Tensor:
    rows = slice(first, first + logits_RV.shape[0])
    scores = logits_RV.float()
    is_bad = ~torch.isfinite(scores.amax(-1))
    if not batch.is_random:
        return scores.argmax(-1).masked_fill(is_bad, -1)
    temperature = batch.temperature_B[rows].unsqueeze(1)
    is_greedy = temperature <= 0
    ids = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    if batch.is_filtered:
        # Equal logits keep the order of their ids, and a row its scores: it draws the same among rows without filters.
        scores, ids = scores.sort(dim=-1, descending=True, stable=True)
    scaled = scores.double() / torch.where(is_greedy, 1.0, temperature)
    noisy = scaled - _log_exponential(batch.seed_B[rows], batch.index_B[rows], ids)
    if batch.is_filtered:
        noisy = noisy.masked_fill(~_kept(scaled, batch, rows), float("-inf"))
    best = torch.where(is_greedy, scores.double(), noisy).argmax(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1).masked_fill(is_bad, -1)


def _kept(scaled_RV: torch.Tensor, batch: DrawBatch, rows: slice) -> torch.Tensor:
    """Which of a row's logits, largest first, the filters leave: top-k and min-p, then top-p of what those left."""
    probabilities = torch.softmax(scaled_RV, dim=-1)
    ranks = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    top_k, top_p, min_p = (x[rows].unsqueeze(1) for x in (batch.top_k_B, batch.top_p_B, batch.min_p_B))
    kept = ((ranks < top_k) | (top_k <= 0)) & (probabilities >= probabilities[:, :1] * min_p)
    mass = torch.where(kept, probabilities, 0.0)
    sums = mass.cumsum(-1)
    # A sum that rounding makes too small must exclude nothing where the filter is off.
    is_within = (sums - mass < top_p * sums[:, -1:]) | (top_p >= 1) | (ranks == 0)
    return kept & is_within


def _log_exponential(seed_R: torch.Tensor, index_R: torch.Tensor, ids_RV: torch.Tensor) -> torch.Tensor:
    """log of an exponential variate of each id, float64 [R, V]."""
    key = _mix(seed_R ^ _mix(index_R)).unsqueeze(1)
    bits = _mix(key + ids_RV * _STEP)
    # Never 1, whose logarithm the exponential of nobody is.
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return (-uniform.log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros from the left: torch would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
