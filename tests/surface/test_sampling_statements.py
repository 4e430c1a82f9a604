"""Every sampling parameter: its default, what is accepted, what is refused, and the message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rabbet import SamplingParams
from rabbet.errors import InvalidRequestError
from rabbet.types.sampling import OutputKind, RepetitionDetection, StructuredOutputsParams

NAN, INF = float("nan"), float("inf")

DEFAULTS = {
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "temperature": 1, "top_p": 1, "top_k": 0,
    "min_p": 0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
    "logprobs": None, "prompt_logprobs": None, "logprob_token_ids": None, "detokenize": True, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "bad_words": [], "logit_bias": None,
    "allowed_token_ids": None, "structured_outputs": None, "repetition_detection": None, "thinking_token_budget": None,
    "extra_args": None, "output_kind": OutputKind.CUMULATIVE, "stream_interval": None,
}  # fmt: skip


def test_defaults_are_those_that_users_of_the_field_know() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - set(DEFAULTS) == {"skip_reading_prefix_cache"}


ACCEPTED: list[dict[str, Any]] = [
    {"n": 16384}, {"presence_penalty": -2}, {"presence_penalty": 2}, {"frequency_penalty": -2.0}, {"frequency_penalty": 2},
    {"repetition_penalty": 1e-6}, {"repetition_penalty": 1e6}, {"temperature": 2}, {"temperature": 0}, {"top_p": 1e-9},
    {"top_k": -1}, {"top_k": 0}, {"top_k": 10**9}, {"min_p": 0}, {"min_p": 1}, {"seed": -1}, {"seed": 2**63 - 1}, {"stop": "x"},
    {"stop": ["x", "y"]}, {"max_tokens": None}, {"max_tokens": 1}, {"min_tokens": 16}, {"logprobs": 0}, {"logprobs": -1},
    {"prompt_logprobs": 20}, {"logprob_token_ids": list(range(128))}, {"bad_words": ["a b"]}, {"logit_bias": {"5": 1000}},
    {"allowed_token_ids": [0]}, {"thinking_token_budget": -1}, {"thinking_token_budget": 0}, {"stream_interval": 1},
    {"repetition_detection": RepetitionDetection(max_pattern_size=4)}, {"structured_outputs": StructuredOutputsParams(regex="a")},
]  # fmt: skip


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_values_at_the_edge_of_their_range_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "an integer from 1 to 16384"), ({"n": 16385}, "n", "16385"), ({"n": True}, "n", "integer"), ({"n": 1.0}, "n", "integer"),
    ({"n": 2, "temperature": 0}, "n", "greedy decoding gives one output"),
    *(({name: value}, name, "[-2, 2]") for name in ("presence_penalty", "frequency_penalty") for value in (-2.01, 2.01, NAN, INF, "0", True)),
    *(({"repetition_penalty": value}, "repetition_penalty", "a finite number > 0") for value in (0, -1, NAN, INF, "1")),
    *(({"temperature": value}, "temperature", "[0, 2]") for value in (-0.1, 2.01, NAN, INF, -INF, "1", None)),
    *(({"top_p": value}, "top_p", "(0, 1]") for value in (0, -0.1, 1.01, NAN)), *(({"top_k": value}, "top_k", ">= -1") for value in (-2, 1.5, True)),
    *(({"min_p": value}, "min_p", "[0, 1]") for value in (-0.01, 1.01, NAN)), *(({"seed": value}, "seed", "integer") for value in (1.5, "1", 2**63, True)),
    ({"stop": [""]}, "stop", "non-empty"), ({"stop": ""}, "stop", "non-empty"), ({"stop": [1]}, "stop", "non-empty"), ({"stop": 5}, "stop", "list of strings"),
    ({"stop": "x", "detokenize": False}, "stop", "needs detokenize"), ({"stop_token_ids": ["1"]}, "stop_token_ids", "token ids"), ({"stop_token_ids": 1}, "stop_token_ids", "token ids"),
    *(({"max_tokens": value}, "max_tokens", ">= 1") for value in (0, -1, 1.5, "1")), ({"min_tokens": -1}, "min_tokens", ">= 0"),
    ({"min_tokens": 17}, "min_tokens", "max_tokens allows only 16"), ({"logprobs": -2}, "logprobs", ">= -1"), ({"prompt_logprobs": -2}, "prompt_logprobs", ">= -1"),
    ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "the limit is 128"), ({"logprob_token_ids": [1, 2], "logprobs": 1}, "logprob_token_ids", "holds 2 ids"),
    ({"bad_words": [""]}, "bad_words", "non-empty"), ({"bad_words": "x"}, "bad_words", "list of strings"), ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    *(({"logit_bias": {key: 1}}, "logit_bias", "token ids") for key in ("abc", 1.5, None, True)), *(({"logit_bias": {1: value}}, "logit_bias", "-100 to 100") for value in ("x", NAN, None)),
    ({"logit_bias": [1]}, "logit_bias", "map from token id"), ({"thinking_token_budget": -2}, "thinking_token_budget", ">= -1"), ({"stream_interval": 0}, "stream_interval", ">= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "field", "word"), REFUSED, ids=str)
def test_values_outside_their_range_are_refused_by_field_value_and_rule(
    values: dict[str, Any], field: str, word: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, ValueError) and caught.value.field == field
    assert field in str(caught.value) and word in str(caught.value)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_of_0_and_of_minus_1_are_the_same_and_off(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == 0


def test_almost_no_temperature_is_greedy_and_a_very_small_one_is_raised() -> None:
    greedy = SamplingParams(temperature=9e-6, top_p=0.5, top_k=3, min_p=0.5)
    assert greedy.is_greedy and (greedy.top_p, greedy.top_k, greedy.min_p) == (1, 0, 0)
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_a_seed_of_minus_1_is_none_and_a_bias_is_clamped() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logit_bias={1: 500, "2": -500, 3: 0.5}).logit_bias == {1: 100.0, 2: -100.0, 3: 0.5}


def test_prompt_logprobs_skip_reading_the_prefix_cache_unless_told_otherwise() -> None:
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True


@pytest.mark.parametrize(
    ("values", "field", "number"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids", "99"), ({"stop_token_ids": [-1]}, "stop_token_ids", "99"),
        ({"stop_token_ids": [10**9], "min_tokens": 1}, "stop_token_ids", "1000000000"), ({"allowed_token_ids": [100]}, "allowed_token_ids", "99"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids", "-1"), ({"logit_bias": {"191222": -100, "5": 2}}, "logit_bias", "191222"),
        ({"logit_bias": {"-3": 1}}, "logit_bias", "-3"), ({"logprobs": 21}, "logprobs", "20"), ({"prompt_logprobs": -1}, "prompt_logprobs", "20"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_does_not_have_is_refused_with_the_allowed_range(
    values: dict[str, Any], field: str, number: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values).check_against_model(vocab_size=100, max_logprobs=20)
    assert caught.value.field == field and number in str(caught.value)
    SamplingParams(logprobs=-1, prompt_logprobs=500).check_against_model(vocab_size=100, max_logprobs=-1)


@pytest.mark.parametrize("given", [{}, {"regex": "a", "json": {}}, {"choice": ["a"], "grammar": "x"}])
def test_a_structure_is_exactly_one_of_its_kinds(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one of json, regex, choice, grammar, json_object"):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_pattern_size": 0}, "max_pattern_size"), ({"max_pattern_size": 1, "min_pattern_size": 2}, "max_pattern_size"),
        ({"max_pattern_size": 1, "min_pattern_size": 0}, "min_pattern_size"), ({"max_pattern_size": 1, "min_count": 1}, "min_count"),
    ],
)  # fmt: skip
def test_a_detection_of_repetition_has_sizes_that_make_sense(given: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        RepetitionDetection(**given)
