"""What the sampler draws, and what steps with drafts emit, against float64 oracles that share no code with it."""

from __future__ import annotations

import pytest
import torch
from rabbet_sdk.oracles.rejection import emitted
from rabbet_sdk.oracles.sampling import assert_drawn_from, filtered, penalised

from rabbet.runner.inputs import SampleRow
from rabbet.runner.logits import adjust_logits
from rabbet.runner.runner import _accept
from rabbet.runner.sampler import draw, processed_logits
from rabbet.runner.slots import Slots
from rabbet.types.plan import NewRequest
from rabbet.types.sampling import SamplingParams

VOCAB, DRAWS = 12, 4000
FILTERS = [
    {}, {"temperature": 0.4}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.6}, {"min_p": 0.25},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
]  # fmt: skip


def sample_row(sampling: SamplingParams, seed: int, tokens: list[int], num_prompt: int) -> tuple[SampleRow, Slots]:
    slots = Slots(num_slots=1, max_model_len=64, num_groups=1, block_size=4)
    request = NewRequest(
        request_id="a", token_ids=tokens, num_prompt_tokens=num_prompt, num_computed_tokens=0, block_ids=[[]],
        sampling=sampling, seed=seed,
    )  # fmt: skip
    return SampleRow(slots.add(request), len(tokens), len(tokens) - num_prompt), slots


def logits_after(text: tuple[int, ...]) -> torch.Tensor:
    """A target whose next token hangs on what was emitted in this step."""
    generator = torch.Generator().manual_seed(31 * len(text) + sum((i + 2) * token for i, token in enumerate(text)))
    return torch.randn(VOCAB, generator=generator) * 1.5


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_and_penalties_give_the_oracles_distribution(options: dict[str, float]) -> None:
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.5}
    sampling = SamplingParams(**options, **penalties)
    prompt, output = [1, 2, 2, 9], [3, 3, 2]
    item, slots = sample_row(sampling, 1, prompt + output, len(prompt))
    for seed in range(30):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        after = penalised(logits[0], prompt, output, repetition=1.4, frequency=0.6, presence=-0.5)
        adjust_logits(logits, [item], slots)
        got = torch.softmax(processed_logits(logits, [item])[0].double(), dim=-1)
        torch.testing.assert_close(got, filtered(after, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [FILTERS[0], FILTERS[1], FILTERS[5]], ids=str)
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_steps_with_drafts_emit_what_rejection_of_a_sure_draft_does(options: dict[str, float], num_drafts: int) -> None:
    """Drafts of a proposer without q have all weight on one token; tokens and the number accepted follow the oracle."""
    sampling = SamplingParams(**options)
    # The likeliest, then an unlikely one.
    drafts = [int(logits_after(()).argmax())]
    drafts += [int(logits_after(tuple(drafts)).sort().indices[VOCAB // 2])] * (num_drafts - 1)
    logits = torch.stack([logits_after(tuple(drafts[:i])) for i in range(num_drafts + 1)])
    rows = []
    for seed in range(DRAWS):
        first, _ = sample_row(sampling, seed, [1], 1)
        rows += [SampleRow(first.row, 1 + i, i) for i in range(num_drafts + 1)]
    tokens = draw(logits.repeat(DRAWS, 1), rows).view(DRAWS, -1).tolist()
    outcomes = emitted(
        lambda text: filtered(logits_after(text), **options),
        lambda text: torch.nn.functional.one_hot(torch.tensor(drafts[len(text)]), VOCAB),
        num_drafts,
    )
    places = {key: place for place, key in enumerate(outcomes)}
    seen = torch.zeros(len(places))
    for drawn in tokens:
        kept = _accept(drawn, drafts)
        seen[places[tuple(kept), len(kept) - 1]] += 1
    assert_drawn_from(seen, torch.tensor(list(outcomes.values()), dtype=torch.float64) * DRAWS, f"drafts {drafts}")


def test_a_verifier_that_takes_every_draft_is_seen() -> None:
    """The oracle is no rubber stamp: with the same draws, drafts that are always accepted do not follow it."""
    logits, draft = logits_after(()), int(logits_after(()).argmax())
    outcomes = emitted(
        lambda text: filtered(logits_after(text)),
        lambda _text: torch.nn.functional.one_hot(torch.tensor(draft), VOCAB),
        1,
    )
    accepted = sum(value for (_, count), value in outcomes.items() if count)
    assert abs(accepted - float(torch.softmax(logits.double(), 0)[draft])) < 1e-9
    with pytest.raises(AssertionError, match="do not follow"):
        assert_drawn_from(
            torch.tensor([float(DRAWS), 0.0]),
            torch.tensor([accepted, 1 - accepted], dtype=torch.float64) * DRAWS,
            "always accepted",
        )
