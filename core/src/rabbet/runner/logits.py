"""Changes logits before a token is drawn: allowed ids, bad words, minimum length, bias, penalties. Row by row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from rabbet.runner.inputs import SampleRow
from rabbet.runner.slots import Row, Slots

__all__ = ["adjust_logits"]

_HIGHEST = 1e30
"""Far above any logit, and finite over every temperature."""


def adjust_logits(logits_BV: torch.Tensor, rows: list[SampleRow], slots: Slots) -> list[int]:
    """Apply what each request asked for, in place, in float32. Plain rows are not touched.

    Order: allowed ids, bad words, minimum length, bias, penalties.

    Returns:
        Indices of rows whose masks together leave no token.
    """
    changed = [index for index, sample in enumerate(rows) if not sample.row.is_plain]
    for index in changed:
        sample = rows[index]
        _adjust_row(logits_BV[index], sample, slots.token_ids[sample.row.slot, : sample.history])
    if not changed:
        return []
    is_empty = (logits_BV[changed].amax(dim=-1) == float("-inf")).tolist()
    return [index for index, empty in zip(changed, is_empty, strict=True) if empty]


class _Lists:
    """The lists of one request as tensors, made once: one of the whole vocabulary costs more than a step of its row.

    Attributes:
        excluded_V: Ids that no text allows, as a mask; None if there are none.
        banned: Beginnings of bad words to the ids that must not follow them.
        lengths: Of these beginnings, each once.
        bias: Ids and what is added to their logits.
    """

    def __init__(self, row: Row, like_V: torch.Tensor) -> None:
        size, device, sampling = like_V.shape[0], like_V.device, row.sampling
        self.banned: dict[tuple[int, ...], list[int]] = {}
        for words in row.bad_words:
            # A tokenizer may know ids that the model's head does not have.
            if words[-1] < size:
                self.banned.setdefault(tuple(words[:-1]), []).append(words[-1])
        never = self.banned.pop((), [])
        self.lengths = sorted({len(begun) for begun in self.banned})
        self.excluded_V: torch.Tensor | None = None
        if sampling.allowed_token_ids or never:
            excluded = np.full(size, bool(sampling.allowed_token_ids))
            excluded[list(sampling.allowed_token_ids or ())] = False
            excluded[never] = True
            self.excluded_V = torch.from_numpy(excluded).to(device)
        bias = sampling.logit_bias or {}
        self.bias = torch.tensor(list(bias), device=device), torch.tensor(list(bias.values()), device=device)


def _adjust_row(logits_V: torch.Tensor, sample: SampleRow, history: np.ndarray) -> None:
    row, sampling, vocab_size = sample.row, sample.row.sampling, logits_V.shape[0]
    lists = row.lists = row.lists or _Lists(row, logits_V)
    if lists.excluded_V is not None:
        logits_V.masked_fill_(lists.excluded_V, float("-inf"))
    for length in lists.lengths:
        # The beginning may lie in the prompt only as far as tokens were generated: bad words are about the output.
        start = len(history) - length
        if start >= row.num_prompt_tokens and (last := lists.banned.get(tuple(history[start:].tolist()))):
            logits_V[last] = float("-inf")
    if sample.output_index < sampling.min_tokens:
        logits_V[[token_id for token_id in sample.row.end_token_ids if token_id < vocab_size]] = float("-inf")
    if sampling.logit_bias:
        logits_V[lists.bias[0]] += lists.bias[1]
    if sampling.needs_penalties:
        _penalise(logits_V, sample, history)


def _penalise(logits_V: torch.Tensor, sample: SampleRow, history: np.ndarray) -> None:
    """Repetition over prompt and output, then frequency and presence over the output alone."""
    sampling = sample.row.sampling
    if sampling.repetition_penalty != 1:
        ids = torch.from_numpy(np.unique(history)).to(logits_V.device)
        values = logits_V[ids]
        factor = sampling.repetition_penalty
        penalised = torch.where(values > 0, values / factor, values * factor)
        # An extreme factor overflows: the token is then certain, or impossible, but its row can still be drawn from.
        logits_V[ids] = penalised.nan_to_num(nan=0.0, posinf=_HIGHEST, neginf=float("-inf"))
    output = history[sample.row.num_prompt_tokens :]
    if len(output) and (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0):
        unique, counts = np.unique(output, return_counts=True)
        ids = torch.from_numpy(unique).to(logits_V.device)
        amount = torch.from_numpy(counts.astype(np.float32)) * sampling.frequency_penalty + sampling.presence_penalty
        logits_V[ids] -= amount.to(logits_V.device)
