"""What a step with drafts emits, exactly: speculative rejection, added up over every draft.

A draft d from q is accepted with probability min(1, p(d) / q(d)); the first that is rejected is replaced by a draw from
max(p - q, 0), normalised; behind the last accepted one a token from p follows.

**Source**: Leviathan et al., arXiv 2211.17192, algorithm 1. Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["emitted", "residual"]

Text = tuple[int, ...]
Model = Callable[[Text], torch.Tensor]
"""What was emitted in this step so far, to a distribution [V]."""


def residual(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """What a rejected draft is replaced from, float64 [V]; zeros where no draft is ever rejected."""
    left_V = (p_V.double() - q_V.double()).clamp(min=0)
    total = float(left_V.sum())
    return left_V / total if total > 0 else left_V


def emitted(target: Model, draft: Model, num_drafts: int) -> dict[tuple[Text, int], float]:
    """Probability of each outcome of a step: (tokens that it emits, how many of them were drafts)."""
    found: dict[tuple[Text, int], float] = {}

    def step(text: Text, reach: float) -> None:
        p_V = target(text).double()
        if len(text) == num_drafts:
            for token, p in enumerate(p_V.tolist()):
                _add(found, ((*text, token), len(text)), reach * p)
            return
        q_V = draft(text).double()
        rejected = 0.0
        for token, (p, q) in enumerate(zip(p_V.tolist(), q_V.tolist(), strict=True)):
            accept = min(1.0, p / q) if q > 0 else 0.0
            rejected += q * (1 - accept)
            if q * accept > 0:
                step((*text, token), reach * q * accept)
        for token, weight in enumerate(residual(p_V, q_V).tolist()):
            _add(found, ((*text, token), len(text)), reach * rejected * weight)

    step((), 1.0)
    return found


def _add(found: dict[tuple[Text, int], float], key: tuple[Text, int], probability: float) -> None:
    if probability > 0:
        found[key] = found.get(key, 0.0) + probability
