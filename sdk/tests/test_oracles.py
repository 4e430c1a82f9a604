"""The oracles of sampling and rejection against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from rabbet_sdk.oracles.rejection import emitted, residual
from rabbet_sdk.oracles.sampling import assert_drawn_from, filtered, penalised

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def near(tensor: torch.Tensor, values: list[float]) -> bool:
    return torch.allclose(tensor, torch.tensor(values, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_filters_by_hand() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    assert near(filtered(logits), [0.1, 0.4, 0.2, 0.3])
    assert near(filtered(logits, temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30])
    assert near(filtered(logits, temperature=0), [0, 1, 0, 0])
    assert near(filtered(logits, top_k=2), [0, 4 / 7, 0, 3 / 7])
    assert near(filtered(logits, top_p=0.8), [0, 4 / 9, 2 / 9, 3 / 9])
    assert near(filtered(logits, top_p=0.65), [0, 4 / 7, 0, 3 / 7])
    assert near(filtered(logits, min_p=0.6), [0, 4 / 7, 0, 3 / 7])
    # top-p refers to what top-k left: 0.4 of 0.9 is less than half of it, 0.7 is more.
    assert near(filtered(logits, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7])
    assert near(filtered(torch.zeros(4), top_k=1), [1, 0, 0, 0])


def test_penalties_by_hand() -> None:
    got = penalised(torch.tensor([2.0, -2.0, 4.0, 1.0]), [0, 1], [2, 2], repetition=2.0, frequency=0.25, presence=1.0)
    assert got.tolist() == [1.0, -4.0, 0.5, 1.0]


def test_chi_square_by_hand() -> None:
    expected = torch.tensor([50.0, 50.0], dtype=torch.float64)
    assert_drawn_from(torch.tensor([60.0, 40.0]), expected, "chi-square is 4")
    with pytest.raises(AssertionError, match="is 16"):
        assert_drawn_from(torch.tensor([70.0, 30.0]), expected, "chi-square is 16")
    with pytest.raises(AssertionError, match="q expects"):
        assert_drawn_from(torch.tensor([50.0, 50.0, 40.0]), torch.tensor([50.0, 50.0, 0.5]), "tail")
    with pytest.raises(AssertionError, match="probability is 0"):
        assert_drawn_from(torch.tensor([50.0, 50.0, 1.0]), torch.tensor([50.0, 50.0, 0.0]), "nothing")


def test_rejection_by_hand() -> None:
    q = torch.tensor([0.2, 0.8, 0.0], dtype=torch.float64)
    assert near(residual(P, q), [0.6, 0.0, 0.4])
    got = emitted(lambda _text: P, lambda _text: q, 1)
    # Accepted: 0.2 of 0 (p > q) and 0.8 * 3/8 of 1; the rest, 0.5, is drawn anew.
    assert got[(0,), 0] == pytest.approx(0.3) and got[(2,), 0] == pytest.approx(0.2)
    assert got[(0, 1), 1] == pytest.approx(0.2 * 0.3) and got[(1, 2), 1] == pytest.approx(0.3 * 0.2)
    assert math.fsum(got.values()) == pytest.approx(1.0)


def test_any_draft_keeps_the_targets_distribution() -> None:
    def target(text: tuple[int, ...]) -> torch.Tensor:
        return P.roll(sum(text) + len(text))

    for q in (P, torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.1, 0.2, 0.7])):
        got = emitted(target, lambda text, q=q: q.roll(len(text)), 2)
        for token in range(3):
            first = math.fsum(value for (text, _), value in got.items() if text[0] == token)
            assert first == pytest.approx(float(P[token]), abs=1e-7)
        # And the second one's, given the first, wherever there is a second one.
        for first in range(3):
            pairs = [(text, value) for (text, _), value in got.items() if text[0] == first and len(text) > 1]
            total = math.fsum(value for _, value in pairs)
            for token in range(3):
                share = math.fsum(value for text, value in pairs if text[1] == token)
                assert share == pytest.approx(total * float(target((first,))[token]), abs=1e-7)
