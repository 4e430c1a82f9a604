"""What a sampler has to draw from, token by token in float64, and the test that it does.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

__all__ = ["assert_drawn_from", "filtered", "penalised"]

_SIGMAS = 6.0


def penalised(
    logits_V: torch.Tensor, prompt: Sequence[int], output: Sequence[int], *,
    repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Logits, float64 [V]: repetition over prompt and output, frequency and presence over the output.

    **Source**: CTRL (arXiv 1909.05858, section 4.1) with the sign rule that is usual today; OpenAI's API reference.
    """
    values = logits_V.double().tolist()
    for token in {*prompt, *output}:
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    for token, count in Counter(output).items():
        values[token] -= frequency * count + presence
    return torch.tensor(values, dtype=torch.float64)


def filtered(
    logits_V: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution, float64 [V], after temperature, min-p, top-k and top-p, in this order.

    Equal probabilities stand in the order of their ids. min-p compares with the likeliest token; top-p takes the
    fewest likeliest tokens whose share of what is left reaches it. Temperature 0 is all weight on the likeliest.
    """
    scaled = [value / (temperature or 1.0) for value in logits_V.double().tolist()]
    highest = max(scaled)
    weights = {token: math.exp(value - highest) for token, value in enumerate(scaled)}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    kept = [token for token in order if weights[token] >= min_p and weights[token] > 0][: top_k or None]
    if temperature == 0:
        kept = kept[:1]
    total, mass = math.fsum(weights[token] for token in kept), 0.0
    chosen: list[int] = []
    for token in kept:
        if chosen and mass >= top_p * total:
            break
        chosen.append(token)
        mass += weights[token]
    out = torch.zeros(len(scaled), dtype=torch.float64)
    for token in chosen:
        out[token] = weights[token] / math.fsum(weights[other] for other in chosen)
    return out


def assert_drawn_from(seen: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Chi-square of counts against expected counts, of one shape; cells below 5 expected are one cell.

    Args:
        seen: Counts.
        expected: The distribution times the number of draws.
        what: What was drawn, for the message.

    Raises:
        AssertionError: If a cell without weight was seen, or the statistic lies six standard deviations above its mean.
    """
    large = expected >= 5
    assert not seen[expected == 0].any(), f"{what}: drawn, though its probability is 0"
    cells = [(float(s), float(e)) for s, e in zip(seen[large], expected[large], strict=True)]
    rest = float(seen[~large].sum()), float(expected[~large].sum())
    cells += [rest] if rest[1] >= 5 else []
    assert rest[1] >= 5 or rest[0] <= 5 + 6 * math.sqrt(5), f"{what}: {rest[0]:g} draws where q expects {rest[1]:.2g}"
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    degrees = max(len(cells) - 1, 1)
    limit = degrees + _SIGMAS * math.sqrt(2 * degrees)
    assert statistic <= limit, f"{what}: \u03c7\u00b2 is {statistic:.1f}, the limit {limit:.1f}: draws do not follow q"
