"""Bugs that users of other engines reported, shown not to be here: scheduler, KV cache, parameters in a mixed batch.

Numbers are those of the reports in their projects. Those about text, streams and tools have their tests beside the front
end and the server.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet import LLM, SamplingParams
from rabbet.errors import ContextLengthError, InvalidRequestError

VOCAB, CONTEXT = 257, 256
PROMPT = [5, 9, 200, 31, 7, 7, 90]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A random model with room for few blocks and small steps, so that long batches are chunked and preempted."""
    path = Path(__file__).parents[1] / "e2e/tiny_model.py"
    spec = importlib.util.spec_from_file_location("surface_tiny_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(
        str(model), engine_process=False, load_format="safetensors", dtype="float32", max_model_len=CONTEXT, max_num_batched_tokens=32, max_num_seqs=16,
        num_gpu_blocks_override=20, block_size=16,
    ) as llm:  # fmt: skip
        yield llm


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **options})


def run(llm: LLM, *requests: tuple[list[int], SamplingParams]) -> list[list[int]]:
    """Ids of each request's first output; the requests run together."""
    prompts, sampling = [prompt for prompt, _ in requests], [item for _, item in requests]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling, use_tqdm=False)]


NEIGHBOURS = {
    "plain": params(), "seeded": params(temperature=1, seed=5), "unseeded": params(temperature=1.5, max_tokens=30),
    "penalised": params(frequency_penalty=2, presence_penalty=-2, repetition_penalty=0.5), "biased": params(logit_bias={3: 100}),
    "banned": params(allowed_token_ids=[1, 2, 3], logprobs=5), "filtered": params(temperature=0.9, top_k=3, top_p=0.5, min_p=0.2),
    "prompt logprobs": params(prompt_logprobs=3),
}  # fmt: skip
CROWD = [([1 + (index * 31 + i) % 250 for i in range(50)], params(max_tokens=60)) for index in range(6)]
SUBJECTS = {
    "a repetition penalty (vllm 5607)": params(repetition_penalty=2.0),
    "a seeded request (vllm 51226)": params(temperature=0.8, seed=42, max_tokens=16),
    "penalties of output": params(presence_penalty=1.5, frequency_penalty=1.5),
    "a bias and a ban": params(logit_bias={1: 5.0, 2: -100}, temperature=1, seed=1),
    "a minimum": params(min_tokens=10, stop_token_ids=list(range(0, 250, 2)), ignore_eos=False),
    "greedy": params(),
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_a_request_gets_does_not_depend_on_its_neighbours_their_order_chunks_or_preemption(
    llm: LLM, subject: str
) -> None:
    sampling = SUBJECTS[subject]
    (alone,) = run(llm, (PROMPT, sampling))
    assert run(llm, (PROMPT, sampling)) == [alone]
    for name, neighbour in NEIGHBOURS.items():
        other = (list(reversed(PROMPT)), neighbour)
        assert run(llm, (PROMPT, sampling), other)[0] == alone, f"before {name}"
        assert run(llm, other, (PROMPT, sampling))[1] == alone, f"behind {name}"
    assert run(llm, *CROWD[:3], (PROMPT, sampling), *CROWD[3:])[3] == alone, "in a crowd that is chunked and preempted"


def test_the_crowd_of_these_tests_is_preempted(llm: LLM) -> None:
    before = llm.get_metrics().num_preemptions
    run(llm, *CROWD)
    assert llm.get_metrics().num_preemptions > before


def test_vllm_50440_one_seed_for_many_prompts_gives_each_its_own_draws_and_the_same_ones_again(llm: LLM) -> None:
    sampling = params(temperature=1, seed=7, max_tokens=12)
    first = run(llm, *[(PROMPT, sampling)] * 1)
    shared = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 16, sampling, use_tqdm=False)]
    again = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 16, sampling, use_tqdm=False)]
    assert shared == again and len({tuple(ids) for ids in shared}) == 16 and shared[0] == first[0]
    many = params(temperature=1, seed=7, max_tokens=12, n=16)
    one, two = (llm.generate([PROMPT], many, use_tqdm=False)[0] for _ in range(2))
    assert [output.token_ids for output in one.outputs] == [output.token_ids for output in two.outputs]
    assert len({tuple(output.token_ids) for output in one.outputs}) == 16


def test_vllm_44319_a_log_probability_does_not_depend_on_how_many_are_asked_for(llm: LLM) -> None:
    def rows(outputs: Any) -> list[dict[int, Any]]:
        logprobs = outputs.outputs[0].logprobs
        assert logprobs is not None
        return logprobs  # type: ignore[no-any-return]

    counts = (0, 1, 4, 10, 20)
    asked = [params(logprobs=count, temperature=1, seed=3) for count in counts]
    together = llm.generate([PROMPT] * len(counts), asked, use_tqdm=False)
    alone = [llm.generate([PROMPT], item, use_tqdm=False)[0] for item in asked]
    for outputs in (alone, together):
        chosen = [
            [row[token].logprob for row, token in zip(rows(o), o.outputs[0].token_ids, strict=True)] for o in outputs
        ]
        assert all(values == chosen[0] for values in chosen)
        for count, output in zip(counts, outputs, strict=True):
            for row, token, widest in zip(rows(output), output.outputs[0].token_ids, rows(outputs[-1]), strict=True):
                # The chosen token stands first; it is one of the count likeliest, or beside them.
                assert next(iter(row)) == token
                ranked = sorted((e for k, e in row.items() if k != token or e.rank <= count), key=lambda e: e.rank)
                others = [entry.rank for key, entry in row.items() if key != token]
                assert others == sorted(others) and [entry.rank for entry in ranked] == list(range(1, count + 1))
                assert count <= len(row) <= count + 1 and len(ranked) == count
                assert [e.logprob for e in ranked] == sorted((e.logprob for e in ranked), reverse=True)
                assert all(widest[key].logprob == entry.logprob for key, entry in row.items())


@pytest.mark.parametrize(
    "bad",
    [
        {"stop_token_ids": [VOCAB, -1, 10**9], "min_tokens": 1}, {"logit_bias": {191222: -100, 5: 2}}, {"logit_bias": {-3: 1}},
        {"allowed_token_ids": [10**9]}, {"logprob_token_ids": [VOCAB]}, {"logprobs": 21},
    ],
    ids=str,
)  # fmt: skip
def test_gonka_1170_and_vllm_16529_an_id_outside_the_vocabulary_is_one_requests_error(
    llm: LLM, bad: dict[str, Any]
) -> None:
    good = [(PROMPT[:length], params()) for length in (2, 3, 5, 7)]
    expected = run(llm, *good)
    with pytest.raises(InvalidRequestError) as caught:
        run(llm, *good, (PROMPT, params(**bad)))
    assert caught.value.field in bad and (str(VOCAB - 1) in str(caught.value) or "20" in str(caught.value))
    assert run(llm, *good) == expected


def test_vllm_21987_nothing_but_the_limit_ends_a_request_below_its_minimum(llm: LLM) -> None:
    (greedy,) = run(llm, (PROMPT, params(max_tokens=40)))
    stops = sorted(set(greedy[:10]))
    output = llm.generate([PROMPT], params(max_tokens=40, min_tokens=20, stop_token_ids=stops), use_tqdm=False)[0]
    ids = output.outputs[0].token_ids
    assert len(ids) >= 20 and not set(ids[:20]) & set(stops)
    if output.outputs[0].finish_reason == "stop":
        assert output.outputs[0].stop_reason == ids[-1] and ids[-1] in stops


def test_vllm_33418_the_error_of_the_context_names_the_limit_itself(llm: LLM) -> None:
    with pytest.raises(ContextLengthError) as caught:
        llm.generate([[1] * (CONTEXT + 1)], params(), use_tqdm=False)
    assert str(CONTEXT) in str(caught.value) and str(CONTEXT + 1) in str(caught.value)


# ---- the scheduler alone


@pytest.mark.parametrize("is_async", [False, True])
def test_vllm_9028_a_chunked_prompt_gives_no_news_until_its_last_chunk(harness: ModuleType, is_async: bool) -> None:
    loop, _ = harness.make_loop(max_num_batched_tokens=8, is_async=is_async)
    news: list[Any] = []
    take = loop.take
    loop.take = lambda deltas: (news.extend(deltas), take(deltas))
    loop.scheduler.add(harness.make_request("long", [1 + i % 40 for i in range(40)], max_tokens=1))
    loop.run()
    assert [delta.request_id for delta in news] == ["long"] and len(news[0].new_token_ids) == 1
    assert sum(plan.num_tokens for plan in loop.plans) == 40 and len(loop.plans) >= 5
    assert loop.scheduler.stats().num_prompt_tokens == 40


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("is_async", [False, True])
def test_vllm_41758_drafts_right_or_wrong_change_no_token(harness: ModuleType, num_drafts: int, is_async: bool) -> None:
    prompts = {f"r{index}": [1 + (index + i) % (2 + index) for i in range(6 + index)] for index in range(6)}
    found = []
    for drafts in (0, num_drafts):
        loop, _ = harness.make_loop(num_drafts=drafts, is_async=is_async, num_blocks=24, seed=num_drafts)
        for name, prompt in prompts.items():
            loop.scheduler.add(harness.make_request(name, prompt, max_tokens=20))
        loop.run()
        found.append(loop.outputs)
    assert found[0] == found[1]
    assert found[0] == {name: harness.reference(prompt, 20)[0] for name, prompt in prompts.items()}


def test_no_order_of_arrival_abort_and_preemption_leaves_a_block_behind(harness: ModuleType) -> None:
    loop, kv = harness.make_loop(num_blocks=13, is_async=True, max_num_batched_tokens=16)
    free = kv.num_free_blocks
    for index in range(8):
        loop.scheduler.add(
            harness.make_request(f"r{index}", [1 + (index * 7 + i) % 40 for i in range(5 + 3 * index)], 9)
        )
        loop.turn()
        if index % 3 == 2:
            loop.take(loop.scheduler.finish([f"r{index - 1}"], harness.FinishReason.ABORT))
    loop.run()
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().kv_usage == 0 and loop.scheduler.stats().num_preemptions > 0
    assert kv.num_free_blocks == free
    assert len(loop.ends) == 8
