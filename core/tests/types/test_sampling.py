"""What sampling parameters accept, change and refuse."""

from __future__ import annotations

from typing import Any

import pytest

from rabbet.errors import InvalidRequestError, shorten
from rabbet.types.sampling import SamplingParams, StructuredOutputsParams

HUGE = 10**400
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", NAN, "a number in [0, 2]"), ("temperature", HUGE, "a number in [0, 2]"), ("temperature", -0.1, "[0, 2]"),
        ("temperature", 2.01, "[0, 2]"), ("temperature", True, "[0, 2]"), ("temperature", "1", "[0, 2]"),
        ("top_p", 0, "a number in (0, 1]"), ("top_p", 1.1, "(0, 1]"), ("min_p", 1.1, "[0, 1]"), ("min_p", -HUGE, "[0, 1]"),
        ("top_k", -2, "an integer >= -1"), ("top_k", 1.5, "an integer >= -1"), ("top_k", -HUGE, "an integer >= -1"),
        ("repetition_penalty", 0, "a finite number > 0"), ("repetition_penalty", INF, "> 0"), ("repetition_penalty", HUGE, "> 0"),
        ("presence_penalty", 2.1, "[-2, 2]"), ("frequency_penalty", -2.1, "[-2, 2]"),
        ("n", 0, "an integer from 1 to 16384"), ("n", 16385, "16384"), ("max_tokens", 0, "an integer >= 1"),
        ("min_tokens", -1, "an integer >= 0"),
        ("logprobs", -2, "an integer >= -1"), ("prompt_logprobs", -HUGE, "an integer >= -1"),
        ("seed", 2**63, "an integer from -9223372036854775808 to"), ("seed", True, "an integer from"),
        ("stop", [""], "non-empty strings"), ("bad_words", "ab", "list of strings"), ("stop_token_ids", [True], "token ids"),
        ("logit_bias", {3: HUGE}, "numbers from -100 to 100"), ("logit_bias", {"x": 1}, "keys are token ids"),
        ("logit_bias", {1.5: 1}, "keys are token ids"), ("logit_bias", {3: NAN}, "numbers from -100 to 100"),
    ],
    ids=lambda item: shorten(item),
)  # fmt: skip
def test_value_out_of_range_names_field_and_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field and f"{field} is " in str(caught.value) and rule in str(caught.value)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": 2, "temperature": 0}, "n"), ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"), ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": 2}, "logprob_token_ids"), ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ],
)  # fmt: skip
def test_values_that_exclude_each_other_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert caught.value.field == field


def test_values_are_brought_to_one_form() -> None:
    greedy = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.2)
    assert greedy.is_greedy and (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert SamplingParams(temperature=0.001).temperature == 0.01 and not SamplingParams(temperature=0.001).is_greedy
    assert SamplingParams(seed=-1).seed is None and SamplingParams(stop="x").stop == ["x"]
    assert (SamplingParams(logprobs=True).logprobs, SamplingParams(logprobs=False).logprobs) == (1, None)
    assert SamplingParams(logit_bias={"7": 300, 8: -300}).logit_bias == {7: 100.0, 8: -100.0}
    assert (
        SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache and not SamplingParams().skip_reading_prefix_cache
    )


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [-1, 10])
def test_ids_outside_the_vocabulary_are_refused(field: str, token_id: int) -> None:
    sampling = SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [token_id]})
    with pytest.raises(InvalidRequestError, match=rf"{field} holds the id {token_id}; the vocabulary goes from 0 to 9"):
        sampling.check_against_model(vocab_size=10, max_logprobs=20)


def test_more_logprobs_than_allowed_are_refused() -> None:
    for count in (21, -1):
        with pytest.raises(InvalidRequestError, match="at most 20"):
            SamplingParams(logprobs=count).check_against_model(vocab_size=10, max_logprobs=20)
        SamplingParams(logprobs=count).check_against_model(vocab_size=10, max_logprobs=-1)


def test_grammar_needs_exactly_one_form() -> None:
    for values in ({}, {"json": {}, "regex": "a"}):
        with pytest.raises(InvalidRequestError, match="exactly one of"):
            StructuredOutputsParams(**values)


def test_number_of_more_digits_than_python_writes_can_be_shown() -> None:
    assert shorten(10**5000) == "a very long int"
