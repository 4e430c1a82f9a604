"""Budgets of a step and the longest context; row numbers are those of the list of statements about the surface."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet.config import engine_config_from_kwargs
from rabbet.config.limits import Budgets, derived_max_model_len, resolve_budgets
from rabbet.contracts.platform import BatchDefaults
from rabbet.errors import ConfigError


def budgets(hf: dict[str, Any] | None = None, *, tokens: int = 2048, seqs: int = 128, **options: Any) -> Budgets:
    defaults = BatchDefaults(max_num_batched_tokens=tokens, max_num_seqs=seqs, memory_fraction=0.5)
    config = engine_config_from_kwargs("m", **options)
    return resolve_budgets(config, hf if hf is not None else {"max_position_embeddings": 4096}, defaults)


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({"max_position_embeddings": 4096}, (4096, 4096)),
        ({"n_positions": 1024}, (1024, 1024)),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, (2048, 2048)),
        ({}, (2048, 2048)),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, (8192, 8192)),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, (4096, 8192)),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, (131072, 131072)),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, (131072, 131072)),
        ({"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, (131072, 131072)),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, (4096, 4096)),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, (4096, 4096)),
    ],
)  # fmt: skip
def test_length_of_the_context_follows_from_config_json(hf: dict[str, Any], expected: tuple[int, int]) -> None:
    assert derived_max_model_len(hf) == expected


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"max_position_embeddings": "many"}, "max_position_embeddings is 'many', but must be a positive number"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"max_position_embeddings": True}, "max_position_embeddings is True"),
        ({"max_position_embeddings": [1]}, r"max_position_embeddings is \[1\]"),
        ({"max_position_embeddings": float("nan")}, "max_position_embeddings is nan"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000"),
        ({"rope_scaling": 3}, "rope_parameters is 3, but must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "x"}}, "original_max_position_embeddings is 'x'"),
    ],
)  # fmt: skip
def test_a_config_json_that_holds_nonsense_is_named(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        derived_max_model_len(hf)


def test_row_23_auto_and_minus_one_take_what_the_model_allows() -> None:
    for asked in (None, "auto", -1, "-1"):
        found = budgets(max_model_len=asked)
        assert (found.max_model_len, found.is_max_model_len_auto) == (4096, True)
    found = budgets(max_model_len=100)
    assert (found.max_model_len, found.is_max_model_len_auto) == (100, False)
    with pytest.raises(ConfigError, match="--max-model-len is 4097, but the model was made for 4096 tokens"):
        budgets(max_model_len=4097)


def test_dynamic_scaling_reaches_further_when_asked() -> None:
    hf = {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert budgets(hf).max_model_len == 4096
    assert budgets(hf, max_model_len=8192).max_model_len == 8192
    with pytest.raises(ConfigError, match="made for 8192"):
        budgets(hf, max_model_len=8193)


def test_row_24_defaults_come_from_the_hardware_and_the_mode() -> None:
    plain, fast = budgets(), budgets(performance_mode="throughput")
    assert (plain.max_num_batched_tokens, plain.max_num_seqs) == (2048, 128)
    assert (fast.max_num_batched_tokens, fast.max_num_seqs) == (4096, 256)
    assert budgets(performance_mode="throughput", max_num_seqs=3).max_num_seqs == 3
    # No step can hold more tokens than all requests have.
    assert budgets(max_num_seqs=2, max_model_len=100).max_num_batched_tokens == 200


def test_row_24_a_small_budget_lowers_the_default_of_requests_but_not_what_the_user_set() -> None:
    found = budgets(max_num_batched_tokens=16)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (16, 16)
    assert "max_num_seqs lowered from 128 to 16" in found.notes[0]
    with pytest.raises(ConfigError, match="--max-num-batched-tokens is 16, less than --max-num-seqs 17"):
        budgets(max_num_batched_tokens=16, max_num_seqs=17)


def test_a_budget_that_no_step_can_use_is_lowered_and_said() -> None:
    assert budgets(max_num_batched_tokens=200, max_num_seqs=2, max_model_len=100).notes == ()
    found = budgets(max_num_batched_tokens="1t", max_num_seqs=2, max_model_len=100)
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (200, 2)
    (note,) = found.notes
    assert (
        note
        == "max_num_batched_tokens lowered from 1000000000000 to 200, all that max_num_seqs and max_model_len allow"
    )
    assert budgets(max_num_batched_tokens="1t").max_num_batched_tokens == 128 * 4096
    assert budgets(max_num_batched_tokens="1t", enable_chunked_prefill=False).max_num_batched_tokens == 128 * 4096


def test_row_26_without_chunks_a_step_holds_the_longest_prompt() -> None:
    found = budgets(enable_chunked_prefill=False)
    assert (found.is_chunked_prefill, found.max_num_batched_tokens) == (False, 4096)
    assert "raised from 2048 to 4096" in found.notes[0]
    with pytest.raises(ConfigError, match="--max-num-batched-tokens is 100, less than the context of 4096"):
        budgets(enable_chunked_prefill=False, max_num_batched_tokens=100, max_num_seqs=4)
    assert budgets(enable_chunked_prefill=True, max_num_batched_tokens=100).max_num_batched_tokens == 100


def test_row_14_async_scheduling_is_on_unless_it_is_switched_off() -> None:
    assert budgets().is_async
    assert budgets(async_scheduling=True).is_async
    assert not budgets(async_scheduling=False).is_async


def test_the_share_of_one_prompt_is_at_most_the_context() -> None:
    assert budgets(long_prefill_token_threshold=4096).max_model_len == 4096
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold is 4097, more than the context of 4096"):
        budgets(long_prefill_token_threshold=4097)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    length=st.integers(1, 10_000),
    tokens=st.none() | st.integers(1, 10_000),
    seqs=st.none() | st.integers(1, 500),
    is_chunked=st.booleans(),
    asked=st.none() | st.integers(1, 10_000),
)
def test_whatever_is_asked_each_request_gets_a_token_a_step(
    length: int, tokens: int | None, seqs: int | None, is_chunked: bool, asked: int | None
) -> None:
    try:
        found = budgets(
            {"max_position_embeddings": length},
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            enable_chunked_prefill=is_chunked,
            max_model_len=asked,
        )
    except ConfigError as error:
        assert error.field is not None
        return
    assert 1 <= found.max_num_seqs <= found.max_num_batched_tokens
    assert 1 <= found.max_model_len <= length
    assert is_chunked or found.max_num_batched_tokens >= found.max_model_len
    most = found.max_num_seqs * found.max_model_len
    assert found.max_num_batched_tokens == min(tokens or found.max_num_batched_tokens, most)
