"""Changes logits before a token is drawn: allowed ids, bad words, minimum length, bias, penalties. Row by row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from rabbet.runner.inputs import SampleRow
from rabbet.runner.slots import Slots

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


def _adjust_row(logits_V: torch.Tensor, sample: SampleRow, history: np.ndarray) -> None:
    sampling = sample.row.sampling
    vocab_size = logits_V.shape[0]
    if sampling.allowed_token_ids:
        kept = torch.full_like(logits_V, float("-inf"))
        ids = torch.tensor(sampling.allowed_token_ids, device=logits_V.device)
        kept[ids] = logits_V[ids]
        logits_V.copy_(kept)
    for words in sample.row.bad_words:
        prefix = words[:-1]
        # The prefix may begin in the prompt only as far as tokens were generated: bad words are about the output.
        start = len(history) - len(prefix)
        is_begun = start >= sample.row.num_prompt_tokens and history[start:].tolist() == prefix
        # A tokenizer may know ids that the model's head does not have.
        if is_begun and words[-1] < vocab_size:
            logits_V[words[-1]] = float("-inf")
    if sample.output_index < sampling.min_tokens:
        logits_V[[token_id for token_id in sample.row.end_token_ids if token_id < vocab_size]] = float("-inf")
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits_V.device)
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
