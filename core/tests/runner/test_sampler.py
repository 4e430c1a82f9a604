"""Draws, penalties, masks and log probabilities against float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rabbet.runner.inputs import SampleRow
from rabbet.runner.logits import adjust_logits
from rabbet.runner.logprobs import scores, token_logprobs
from rabbet.runner.sampler import draw, processed_logits, uniform
from rabbet.runner.slots import Slots
from rabbet.types.plan import NewRequest
from rabbet.types.sampling import SamplingParams

VOCAB = 40


def row(
    sampling: SamplingParams,
    *,
    tokens: tuple[int, ...] = (1, 2),
    num_prompt: int = 2,
    seed: int = 0,
    index: int | None = None,
    **options: list,
) -> tuple[SampleRow, Slots]:
    slots = Slots(num_slots=2, max_model_len=64, num_groups=1, block_size=4)
    made = slots.add(
        NewRequest(
            request_id="a", token_ids=list(tokens), num_prompt_tokens=num_prompt, num_computed_tokens=0, block_ids=[[]],
            sampling=sampling, seed=seed, **options,
        )
    )  # fmt: skip
    return SampleRow(made, len(tokens), len(tokens) - num_prompt if index is None else index), slots


def logits(seed: int, rows: int = 1, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def reference(values: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    """The filtered distribution, token by token in float64: temperature, min-p, top-k, top-p."""
    scaled = values.double().numpy() / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = [t for t in order if p[t] >= sampling.min_p * p.max()]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, mass, final = sum(p[t] for t in kept), 0.0, []
    for token in kept:
        if final and mass >= sampling.top_p * total:
            break
        final.append(token)
        mass += p[token]
    out = np.zeros(VOCAB)
    out[final] = p[final] / sum(p[t] for t in final)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(options: dict) -> None:
    sampling = SamplingParams(**options)
    values, count = logits(3), 20_000
    rows = [SampleRow(row(sampling, seed=11)[0].row, 2, index) for index in range(count)]
    tokens = draw(values.expand(count, -1).clone(), rows)
    seen, expected = np.bincount(tokens.numpy(), minlength=VOCAB), reference(values[0], sampling) * count
    assert not seen[expected == 0].any(), "a token was drawn that the filters exclude"
    often = expected >= 5
    chi_square = ((seen[often] - expected[often]) ** 2 / expected[often]).sum()
    degrees = often.sum() - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * max(degrees, 1))


def test_draw_depends_on_seed_and_index_and_on_nothing_else() -> None:
    sampling = SamplingParams()
    mine, _ = row(sampling, seed=42, index=3)
    values = logits(1)
    alone = draw(values.clone(), [mine])
    others = [
        row(SamplingParams(**options), seed=seed)[0]
        for seed, options in ((1, {}), (2, {"top_k": 3}), (3, {"temperature": 0.0}))
    ]
    batch = torch.cat((logits(7, 2), values, logits(8)))
    together = draw(batch, [others[0], others[1], mine, others[2]])
    assert together[2] == alone[0]
    numbers = {uniform(seed, index) for seed in range(50) for index in range(50)}
    assert len(numbers) == 2500 and all(0 <= number < 1 for number in numbers)


def test_greedy_takes_the_likeliest_and_top_k_zero_and_minus_one_are_off() -> None:
    values = logits(5)
    greedy, _ = row(SamplingParams(temperature=0.0))
    assert draw(values.clone(), [greedy])[0] == values[0].argmax()
    assert SamplingParams(top_k=-1).top_k == SamplingParams(top_k=0).top_k == 0


def test_wide_top_p_looks_beyond_the_candidates() -> None:
    flat = torch.zeros(1, 5000)
    sample, _ = row(SamplingParams(top_p=0.999))
    tokens = {int(draw(flat.clone(), [SampleRow(sample.row, 2, index)])[0]) for index in range(300)}
    assert max(tokens) > 2000


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_penalties_equal_their_formulas(options: dict) -> None:
    sampling = SamplingParams(**options)
    prompt, output = (4, 5, 5, 6), (7, 7, 7, 4)
    sample, slots = row(sampling, tokens=prompt + output, num_prompt=4)
    values = logits(2)
    expected = values[0].double().clone()
    for token in set(prompt + output):
        factor = sampling.repetition_penalty
        expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
    for token in set(output):
        expected[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    adjust_logits(values, [sample], slots)
    torch.testing.assert_close(values[0].double(), expected, rtol=1e-6, atol=1e-6)


def test_masks_and_bias() -> None:
    sample, slots = row(SamplingParams(allowed_token_ids=[3, 4], logit_bias={3: 2.5}))
    values = logits(1)
    before = values.clone()
    adjust_logits(values, [sample], slots)
    assert values[0, 3] == before[0, 3] + 2.5 and values[0, 4] == before[0, 4]
    assert torch.isinf(values[0]).sum() == VOCAB - 2


@pytest.mark.parametrize(("output", "banned"), [((), False), ((8,), True), ((9, 8), True), ((8, 9), False)])
def test_bad_words_ban_the_last_token_after_their_beginning(output: tuple[int, ...], banned: bool) -> None:
    sample, slots = row(SamplingParams(), tokens=(8, *output), num_prompt=1, bad_words_token_ids=[[8, 12]])
    values = logits(1)
    adjust_logits(values, [sample], slots)
    assert bool(torch.isinf(values[0, 12])) is banned


def test_bad_words_ban_what_a_search_word_by_word_bans() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        words = [rng.integers(0, 3, rng.integers(1, 5)).tolist() for _ in range(rng.integers(1, 12))]
        tokens = rng.integers(0, 3, rng.integers(2, 9)).tolist()
        sample, slots = row(SamplingParams(), tokens=tuple(tokens), num_prompt=2, bad_words_token_ids=words)
        output, values = tokens[2:], logits(1)
        banned = {w[-1] for w in words if len(w) - 1 <= len(output) and output[len(output) - len(w) + 1 :] == w[:-1]}
        adjust_logits(values, [sample], slots)
        assert set(torch.isinf(values[0]).nonzero().flatten().tolist()) == banned


def test_long_lists_of_a_request_are_read_once_and_not_in_each_step() -> None:
    """A list of the whole vocabulary in many rows would make every step of everybody slow."""
    looks = 0

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    allowed, words = Counted(range(VOCAB)), Counted([3, 4])
    sampling = SamplingParams(allowed_token_ids=allowed, logit_bias={5: 1.0})
    sample, slots = row(sampling, bad_words_token_ids=[words])
    looks, seen = 0, []
    for _ in range(4):
        adjust_logits(logits(1), [sample], slots)
        seen.append(looks)
    assert sampling.allowed_token_ids is allowed and seen[0] > 0 and len(set(seen)) == 1


def test_end_tokens_are_masked_until_min_tokens() -> None:
    sampling = SamplingParams(min_tokens=2)
    for count, banned in ((0, True), (1, True), (2, False)):
        sample, slots = row(sampling, tokens=(1, 2, *([3] * count)), end_token_ids=[7])
        values = logits(1)
        adjust_logits(values, [sample], slots)
        assert bool(torch.isinf(values[0, 7])) is banned


def test_logprobs_are_the_same_however_many_are_asked_for() -> None:
    values = logits(4)[0]
    exact = torch.log_softmax(values.double(), dim=-1)
    chosen, full = 17, None
    for count in (-1, 20, 10, 4, 1, 0):
        entry = token_logprobs(scores(values, "raw_logprobs"), chosen, count)
        full = full or entry
        assert entry.token_ids[0] == chosen
        assert entry.logprobs[0] == full.logprobs[0]
        assert entry.token_ids[1:] == full.token_ids[1 : 1 + (VOCAB if count == -1 else count)]
        assert entry.logprobs[1:] == full.logprobs[1 : len(entry.logprobs)]
        assert abs(entry.logprobs[0] - float(exact[chosen])) < 1e-5
        assert entry.ranks[0] == int((exact > exact[chosen]).sum()) + 1
    assert full is not None and full.logprobs[1:] == sorted(full.logprobs[1:], reverse=True)


def test_ties_keep_a_stable_order() -> None:
    entry = token_logprobs(torch.zeros(10), 3, 4)
    assert entry.token_ids == [3, 0, 1, 2, 3]


def test_logprob_token_ids_report_exactly_these() -> None:
    entry = token_logprobs(scores(logits(4)[0], "raw_logprobs"), 17, 0, [5, 6])
    assert entry.token_ids == [17, 5, 6]


def test_other_rows_change_no_draw_even_where_probabilities_are_equal() -> None:
    """Rounded logits tie; a neighbour that needs the whole vocabulary must not change which of the equal ones come."""
    values = (torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)) * 2).round()
    flat = torch.zeros(1, 3000)
    for options in ({"top_p": 0.6}, {"top_k": 40}, {"top_k": 600}, {"min_p": 0.3}, {"top_p": 0.999}):
        mine, _ = row(SamplingParams(**options), seed=5)
        rows = [SampleRow(mine.row, 2, index) for index in range(40)]
        alone = draw(values.expand(40, -1).clone(), rows)
        for neighbour in ({"top_p": 0.999}, {"top_k": 2000}, {"min_p": 0.001}):
            other, _ = row(SamplingParams(**neighbour), seed=6)
            together = draw(torch.cat((flat, values.expand(40, -1))).clone(), [other, *rows])
            assert torch.equal(together[1:], alone), (options, neighbour)


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    values = logits(3).expand(300, -1)
    tokens = []
    for top_k in (VOCAB, VOCAB + 1, 10**9):
        mine, _ = row(SamplingParams(top_k=top_k), seed=3)
        tokens.append(draw(values.clone(), [SampleRow(mine.row, 2, index) for index in range(300)]))
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])
    assert len(set(tokens[0].tolist())) > VOCAB // 3


def test_ties_at_the_border_of_top_k_go_to_the_lowest_ids() -> None:
    for size in (50, 2000):
        mine, _ = row(SamplingParams(top_k=3), seed=1)
        tokens = draw(torch.zeros(200, size), [SampleRow(mine.row, 2, index) for index in range(200)])
        assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({"allowed_token_ids": [5]}, {"bad_words_token_ids": [[5]]}),
        ({"allowed_token_ids": [7], "min_tokens": 3}, {"end_token_ids": [7]}),
        (
            {"allowed_token_ids": [7], "min_tokens": 3, "logit_bias": {7: 100.0}, "repetition_penalty": 0.5},
            {"end_token_ids": [7]},
        ),
    ],
)
def test_row_without_any_token_left_is_told(sampling: dict, options: dict) -> None:
    sample, slots = row(SamplingParams(**sampling), **options)
    plain, _ = row(SamplingParams())
    values = logits(1, 3)
    assert adjust_logits(values, [plain, sample, plain], slots) == [1]
    sample, slots = row(SamplingParams(allowed_token_ids=[5, 6]), bad_words_token_ids=[[5]])
    assert adjust_logits(logits(1), [sample], slots) == []


def test_ids_that_the_head_does_not_have_are_passed_over() -> None:
    sample, slots = row(
        SamplingParams(min_tokens=2), bad_words_token_ids=[[VOCAB], [VOCAB + 5], [4]], end_token_ids=[VOCAB + 1, 7]
    )
    values = logits(1)
    adjust_logits(values, [sample], slots)
    assert torch.isinf(values[0]).nonzero().flatten().tolist() == [4, 7]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3}],
    ids=str,
)
def test_processed_logprobs_are_those_of_the_distribution_that_is_drawn_from(options: dict) -> None:
    sampling = SamplingParams(**options)
    values = logits(3, 2)
    before = values.clone()
    mine, greedy = row(sampling)[0], row(SamplingParams(temperature=0.0))[0]
    processed = processed_logits(values, [mine, greedy])
    probabilities = scores(processed, "processed_logprobs")[0].double().exp().numpy()
    np.testing.assert_allclose(probabilities, reference(values[0], sampling), rtol=1e-5, atol=1e-7)
    assert torch.equal(processed[1], values[1]) and torch.equal(values, before)


def test_no_ids_to_report_leaves_the_chosen_token() -> None:
    entry = token_logprobs(scores(logits(4)[0], "raw_logprobs"), 17, 0, [])
    assert entry.token_ids == [17] and len(entry.logprobs) == len(entry.ranks) == 1


@pytest.mark.parametrize("factor", [1e-300, 1e-38, 1e38, 1e300])
def test_extreme_penalties_overflow_into_no_other_token_than_one_of_the_vocabulary(factor: float) -> None:
    sampling = SamplingParams(repetition_penalty=factor, temperature=0.01)
    sample, slots = row(sampling, tokens=(1, 2, 3))
    values = logits(1)
    values[0, 1], values[0, 2], values[0, 3] = 0.0, 4.0, -4.0
    assert adjust_logits(values, [sample], slots) == [] and not values.isnan().any()
    token = int(draw(values, [sample])[0])
    assert token == 2 if factor < 1 else token not in (2, 3) and 0 <= token < VOCAB
