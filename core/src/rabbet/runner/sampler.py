"""Draws tokens. The draw of output token i of a request depends on its seed, on i and on its own logits alone.

One uniform number a token, from a counter-based hash of (seed, i), is put through the inverse of the filtered
distribution's cumulative function. So neither the batch, nor chunking, nor preemption, nor drafts change a sample:
a draft is accepted iff it is the token that would have been drawn, which is rejection sampling for a deterministic
draft (acceptance probability p(draft), and the emitted token always follows p).

Source of the hash: splitmix64, Steele et al., OOPSLA 2014.

Shapes: B rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import torch

from rabbet.runner.inputs import SampleRow

__all__ = ["draw", "processed_logits", "uniform"]

_MASK = (1 << 64) - 1
_CANDIDATES = 512


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for token ``index`` of a request with ``seed``."""
    state = _mix((seed & _MASK) ^ _mix(index + 0x632BE59BD9B4E019))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(logits_BV: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """One token a row, int64 [B]; logits are float32 and already adjusted."""
    tokens = _argmax(logits_BV)
    random = [i for i, sample in enumerate(rows) if not sample.row.sampling.is_greedy]
    if not random:
        return tokens
    plain = [i for i in random if _is_unfiltered(rows[i])]
    filtered = [i for i in random if not _is_unfiltered(rows[i])]
    for indices, function in ((plain, _draw_plain), (filtered, _draw_filtered)):
        if indices:
            chosen = logits_BV[indices] / _column(logits_BV, [rows[i].row.sampling.temperature for i in indices])
            numbers = [uniform(rows[i].row.seed, rows[i].output_index) for i in indices]
            tokens[indices] = function(chosen, numbers, [rows[i] for i in indices])
    return tokens


def _argmax(logits_BV: torch.Tensor) -> torch.Tensor:
    """The first of the highest, int64 [B]. numpy needs a tenth of torch's time for long rows on one core."""
    if logits_BV.device.type == "cpu":
        return torch.from_numpy(logits_BV.numpy().argmax(axis=-1))
    return logits_BV.argmax(dim=-1)


def processed_logits(logits_BV: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """What tokens are drawn from, [B, V]: over temperature, minus infinity where a filter excludes. Greedy rows as given."""
    processed = logits_BV.clone()
    random = [i for i, sample in enumerate(rows) if not sample.row.sampling.is_greedy]
    if random:
        processed[random] /= _column(logits_BV, [rows[i].row.sampling.temperature for i in random])
    filtered = [i for i in random if not _is_unfiltered(rows[i])]
    if filtered:
        chosen = processed[filtered]
        values, ids = torch.softmax(chosen, dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, _ = _filter(values, [rows[i] for i in filtered], is_all=True)
        is_kept = torch.zeros_like(chosen, dtype=torch.bool).scatter(1, ids, weights > 0)
        processed[filtered] = chosen.masked_fill(~is_kept, float("-inf"))
    return processed


def _is_unfiltered(sample: SampleRow) -> bool:
    sampling = sample.row.sampling
    return sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0


def _column(like: torch.Tensor, values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)


def _draw_plain(logits_BV: torch.Tensor, numbers: list[float], _rows: list[SampleRow]) -> torch.Tensor:
    """Inverse cumulative function over the whole vocabulary, in id order."""
    return _invert(torch.softmax(logits_BV, dim=-1), numbers)


def _invert(weights_BC: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    """Index of the first cumulative weight above u times the total; entries of weight zero are never chosen."""
    cumulative = weights_BC.double().cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    target = _column(weights_BC, numbers, torch.float64) * total
    index = torch.searchsorted(cumulative, target, right=True)
    # Rounding could lead past the last entry with weight: the last one where the sum still grew is taken then.
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(index, last).squeeze(1)


def _draw_filtered(logits_BV: torch.Tensor, numbers: list[float], rows: list[SampleRow]) -> torch.Tensor:
    """min-p, top-k and top-p over the likeliest candidates; rows for which these are not enough sort everything.

    Which of the two ways a row goes depends on that row alone, and equal probabilities stand in the order of their ids
    either way, so that no other row changes what is drawn here.
    """
    probabilities = torch.softmax(logits_BV, dim=-1)
    is_all = logits_BV.shape[-1] <= _CANDIDATES
    tokens, is_enough = _draw_from(*_likeliest(probabilities), numbers, rows, is_all=is_all)
    again = [i for i, enough in enumerate(is_enough.tolist()) if not enough]
    if again:
        values, ids = probabilities[again].sort(dim=-1, descending=True, stable=True)
        some = [numbers[i] for i in again], [rows[i] for i in again]
        tokens[again], _ = _draw_from(values, ids, *some, is_all=True)
    return tokens


def _likeliest(probabilities_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates and their ids, likeliest first, equal ones by id. Which of those equal to the last are there is open."""
    ids = probabilities_BV.topk(min(_CANDIDATES, probabilities_BV.shape[-1]), dim=-1).indices.sort(dim=-1).values
    values, order = probabilities_BV.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _draw_from(
    values_BC: torch.Tensor, ids_BC: torch.Tensor, numbers: list[float], rows: list[SampleRow], *, is_all: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each row, and whether the row needs none but these candidates."""
    weights, is_enough = _filter(values_BC, rows, is_all=is_all)
    return ids_BC.gather(1, _invert(weights, numbers).unsqueeze(1)).squeeze(1), is_enough


def _filter(values_BC: torch.Tensor, rows: list[SampleRow], *, is_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of sorted candidates after all filters; for each row, whether one that is not here would have none."""
    sampling = [sample.row.sampling for sample in rows]
    count = values_BC.shape[1]
    top_k = torch.tensor([item.top_k or 1 << 40 for item in sampling], device=values_BC.device).unsqueeze(1)
    top_p = _column(values_BC, [item.top_p for item in sampling], torch.float64)
    min_p = _column(values_BC, [item.min_p for item in sampling])
    ranks = torch.arange(count, device=values_BC.device).unsqueeze(0)
    kept = (values_BC >= values_BC[:, :1] * min_p) & (ranks < top_k)
    weights = torch.where(kept, values_BC, torch.zeros_like(values_BC)).double()
    has_tail = kept[:, -1:] & (not is_all)
    # Mass that top-p refers to: what min-p and top-k left. With a tail it is the whole distribution.
    total = torch.where(has_tail, torch.ones_like(weights[:, :1]), weights.sum(-1, keepdim=True))
    before = weights.cumsum(dim=-1) - weights
    within = (before < top_p * total) | (ranks == 0)
    weights = torch.where(within, weights, torch.zeros_like(weights))
    # A weight as small as the last candidate's: others of that size may be missing, or a whole tail.
    reaches_end = ((weights > 0) & (values_BC <= values_BC[:, -1:])).any(dim=-1)
    return weights, ~reaches_end | is_all
