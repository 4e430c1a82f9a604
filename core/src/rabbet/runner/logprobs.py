"""Log probabilities of chosen tokens and of alternatives, whose values do not depend on how many are asked for."""

from __future__ import annotations

import torch

from rabbet.types.outputs import TokenLogprobs

__all__ = ["scores", "token_logprobs"]


def scores(logits_BV: torch.Tensor, mode: str) -> torch.Tensor:
    """float32 [B, V] in the unit that ``logprobs_mode`` names."""
    logits = logits_BV.float()
    return logits if mode.endswith("logits") else torch.log_softmax(logits, dim=-1)


def token_logprobs(scores_V: torch.Tensor, token_id: int, count: int, only: list[int] | None = None) -> TokenLogprobs:
    """The chosen token, then exactly ``count`` alternatives.

    Args:
        scores_V: float32 [V].
        token_id: The chosen (or prompt) token.
        count: Alternatives; -1 is the whole vocabulary, 0 none.
        only: Report these ids instead of the likeliest.
    """
    vocab_size = scores_V.shape[0]
    if only is not None:
        ids = torch.tensor(only, dtype=torch.int64, device=scores_V.device)
    elif count == 0:
        ids = torch.empty(0, dtype=torch.int64, device=scores_V.device)
    else:
        # A stable order among equal values, so that longer lists extend shorter ones.
        wanted = vocab_size if count == -1 else min(count, vocab_size)
        threshold = scores_V.topk(wanted).values[-1]
        candidates = torch.nonzero(scores_V >= threshold).squeeze(1)
        order = scores_V[candidates].sort(descending=True, stable=True).indices
        ids = candidates[order][:wanted]
    ids = torch.cat((torch.tensor([token_id], device=ids.device), ids))
    values = scores_V[ids]
    if only is None and count == -1:
        ranks = [_rank(scores_V, values[0]), *range(1, vocab_size + 1)]
    elif only is None:
        ranks = [_rank(scores_V, values[0]), *range(1, len(ids))]
    else:
        ranks = [_rank(scores_V, value) for value in values]
    return TokenLogprobs(token_ids=ids.tolist(), logprobs=values.tolist(), ranks=ranks)


def _rank(scores_V: torch.Tensor, value: torch.Tensor) -> int:
    return int((scores_V > value).sum()) + 1
