"""Draws: the right distribution, one row's own affair, and what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rabbet_hw_cuda.sampling import draw

from rabbet.contracts.platform import DrawBatch

COUNT = 1500 if torch.cuda.is_available() else 80
LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -0.5]


def batch(device: torch.device, count: int, **values: Any) -> DrawBatch:
    """``count`` rows, each number one for all or a list."""

    def column(name: str, default: Any, dtype: torch.dtype) -> torch.Tensor:
        given = values.get(name, default)
        return torch.tensor(given if isinstance(given, list) else [given] * count, dtype=dtype, device=device)

    temperature, top_k = column("temperature", 1.0, torch.float32), column("top_k", 0, torch.int32)
    top_p, min_p = column("top_p", 1.0, torch.float32), column("min_p", 0.0, torch.float32)
    return DrawBatch(
        temperature_B=temperature, top_k_B=top_k, top_p_B=top_p, min_p_B=min_p, seed_B=column("seed", 0, torch.int64),
        index_B=column("index", 0, torch.int64), is_random=bool((temperature > 0).any()),
        is_filtered=bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()),
    )  # fmt: skip


def frequencies(device: torch.device, count: int, **values: Any) -> torch.Tensor:
    tokens = draw(torch.tensor([LOGITS] * count, device=device), batch(device, count, **values))
    assert tokens.dtype is torch.int64 and tokens.shape == (count,)
    return torch.bincount(tokens.cpu(), minlength=len(LOGITS)).double() / count


def chi_square(found: torch.Tensor, expected: torch.Tensor, count: int) -> float:
    possible = expected > 0
    assert not found[~possible].any(), "what a filter excludes was drawn"
    return float((count * (found - expected)[possible].square() / expected[possible]).sum())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"top_k": 3}, (0, 6, 1)),
        ({"top_p": 0.6}, (0, 6)),
        ({"min_p": 0.3}, (0, 6, 1)),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.05}, (0, 6, 1, 2)),
    ],
)
def test_tokens_are_as_frequent_as_they_are_likely(options: dict[str, Any], kept: Any, device: torch.device) -> None:
    count = COUNT
    logits = torch.full((8,), float("-inf"), dtype=torch.float64)
    logits[list(kept)] = torch.tensor(LOGITS, dtype=torch.float64)[list(kept)]
    expected = torch.softmax(logits / options.get("temperature", 1.0), 0)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    # 7 degrees of freedom: more than 32 comes once in some 20,000.
    assert chi_square(frequencies(device, count, seed=seeds, **options), expected, count) < 32
    assert chi_square(frequencies(device, count, seed=11, index=list(range(count)), **options), expected, count) < 32


def test_company_and_place_change_no_draw(device: torch.device) -> None:
    logits = torch.randn(6, 5000, device=device)
    values: dict[str, Any] = {
        "temperature": [1.0, 0.0, 0.7, 1.3, 1.0, 1.0], "top_k": [0, 0, 0, 50, 0, 0], "top_p": [1.0, 1.0, 0.9, 1.0, 1.0, 1.0],
        "seed": [3, 3, -4, 1 << 62, 3, 8], "index": [0, 0, 9, 2, 1, 0],
    }  # fmt: skip
    together = draw(logits, batch(device, 6, **values)).tolist()
    for row in range(6):
        alone = {name: [given[row]] for name, given in values.items()}
        assert draw(logits[row : row + 1], batch(device, 1, **alone)).tolist() == [together[row]]
    assert together[1] == int(logits[1].argmax())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_rows_that_are_not_finite_say_so_alone(is_filtered: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(6, 4500, device=device).to(dtype)
    logits[1, 4400] = float("nan")
    logits[2, 7] = float("inf")
    logits[3] = float("-inf")
    logits[4, :4499] = float("-inf")
    before = logits.clone()
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"top_k": 3} if is_filtered else {}
        tokens = draw(logits, batch(device, 6, temperature=temperature, **options)).tolist()
        assert tokens[1:5] == [-1, -1, -1, 4499] and min(tokens[0], tokens[5]) >= 0
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "logits were changed"


def test_equal_logits_give_the_first_id_and_no_rows_give_none(device: torch.device) -> None:
    logits = torch.zeros(2, 9000, device=device)
    logits[1, 8000:] = 1.0
    assert draw(logits, batch(device, 2, temperature=0.0)).tolist() == [0, 8000]
    assert draw(logits[:0], batch(device, 0)).tolist() == []
