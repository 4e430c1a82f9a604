"""Thousands of random arrivals, aborts, preemptions, hits, drafts and loads; the books balance after each step."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from sched_harness import BLOCK, VOCABULARY, FakeConnector, Loop, make_loop, make_request, reference

from rabbet.errors import ClientError
from rabbet.sched.admission import longest_request
from rabbet.types.outputs import FinishReason
from rabbet.types.request import EngineRequest

NUM_REQUESTS = 25


def drive(loop: Loop, rng: random.Random, *, longest_prompt: int) -> dict[str, EngineRequest]:
    """Random traffic until everything has ended; the requests that were accepted."""
    scheduler = loop.scheduler
    # A few blocks that come again, so that equal blocks stand behind different ones.
    heads = [[rng.randrange(VOCABULARY) for _ in range(BLOCK)] for _ in range(3)]
    requests: dict[str, EngineRequest] = {}
    left = NUM_REQUESTS
    longest = longest_request(scheduler.context)

    def between() -> bool:
        nonlocal left
        while left and rng.random() < 0.3:
            left -= 1
            prompt = [token for _ in range(rng.randint(0, 4)) for token in rng.choice(heads)]
            prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 16))]
            request = make_request(
                f"r{left}", prompt[:longest_prompt], rng.randint(1, 20), priority=rng.randrange(3), arrival_time_s=25.0 - left,
                cache_salt=rng.choice([None, None, None, "salt"]),
            )  # fmt: skip
            try:
                scheduler.add(request)
            except ClientError:
                assert len(request.prompt_token_ids) >= longest
            else:
                requests[request.request_id] = request
        if requests and rng.random() < 0.05:
            loop.take(scheduler.finish([rng.choice(list(requests)), "unknown"], FinishReason.ABORT))
            scheduler.check_integrity()
        return left > 0

    loop.run(between=between)
    return requests


def check_answers(loop: Loop, requests: dict[str, EngineRequest]) -> None:
    longest = longest_request(loop.scheduler.context)
    assert set(loop.ends) == set(requests), "a request never ended"
    for request_id, end in loop.ends.items():
        request, output = requests[request_id], loop.outputs[request_id]
        expected, reason = reference(request.prompt_token_ids, request.max_tokens, longest)
        if end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert output == expected[: len(output)]
        else:
            assert (output, end.finish_reason) == (expected, reason)


SETUPS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 10**6),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "is_async": st.booleans(),
    "windows": st.sampled_from([(None,), (None, 6), (9,), (5, None, 14)]),
    "num_blocks": st.integers(16, 70),
    "caching": st.booleans(),
}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    step=st.sampled_from([(4, True, 0), (16, True, 0), (64, True, 0), (64, True, 5), (32, False, 0)]),
    num_drafts=st.sampled_from([0, 0, 3]),
    min_shared=st.sampled_from([BLOCK, 256]),
    **SETUPS,
)
def test_random_traffic_gives_every_request_its_own_tokens_and_one_end(
    seed: int, step: tuple[int, bool, int], min_shared: int, **setup: Any
) -> None:
    budget, is_chunked, threshold = step
    loop, kv = make_loop(
        seed=seed, max_num_batched_tokens=budget, is_chunked_prefill=is_chunked, long_prefill_token_threshold=threshold,
        **setup,
    )  # fmt: skip
    with patch("rabbet.sched.scheduler._MIN_SHARED_TOKENS", min_shared):
        requests = drive(loop, random.Random(seed), longest_prompt=32)
    check_answers(loop, requests)
    assert kv.usage == 0 and kv.num_free_blocks == setup["num_blocks"] - 1
    assert sum(end.num_preemptions for end in loop.ends.values()) == loop.scheduler.stats().num_preemptions


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    budget=st.sampled_from([6, 16, 64]),
    faults=st.sampled_from([0.0, 0.3]),
    raises=st.booleans(),
    load_policy=st.sampled_from(["fail", "recompute"]),
    **SETUPS,
)
def test_random_traffic_with_a_connector_that_is_late_or_fails(
    seed: int, budget: int, faults: float, raises: bool, load_policy: str, **setup: Any
) -> None:
    connector = FakeConnector(seed, faults=faults, raises=raises)
    loop, kv = make_loop(
        seed=seed, max_num_batched_tokens=budget, connector=connector, kv_load_failure_policy=load_policy, **setup
    )
    requests = drive(loop, random.Random(seed), longest_prompt=32)
    check_answers(loop, requests)
    errors = [end for end in loop.ends.values() if end.finish_reason is FinishReason.ERROR]
    assert not errors or (load_policy == "fail" and connector.num_failures)
    assert all("could not be loaded" in (end.error or "") for end in errors)
    assert not loop.runner.loads and not loop.runner.saves
    assert kv.usage == 0 and kv.num_free_blocks == setup["num_blocks"] - 1
