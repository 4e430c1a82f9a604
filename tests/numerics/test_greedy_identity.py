"""On the float32 reference, greedy tokens are those of transformers, whatever the engine does around them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rabbet import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
COMMON: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_model_len": 512}


def run(model_dir: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Tokens of each prompt, in order."""
    with LLM(str(model_dir), **(COMMON | options)) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_same(got: list[list[int]], expected: list[list[int]]) -> None:
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    assert not different, {i: (got[i], expected[i]) for i in different[:2]}


@pytest.mark.parametrize(("batch_size", "count"), [(1, 2), (2, 4), (3, 6), (5, 10), (8, 16), (16, 20)])
def test_batch_size_changes_nothing(
    batch_size: int, count: int, model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Small batches take so many steps that a part of the prompts has to do."""
    assert_same(run(model_dir, prompts[:count], max_num_seqs=batch_size), expected[:count])


@pytest.mark.parametrize(("chunk", "count"), [(16, 8), (17, 8), (64, 10), (256, 16), (2048, 20)])
def test_chunk_size_changes_nothing(
    chunk: int, count: int, model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    got = run(model_dir, prompts[:count], max_num_batched_tokens=chunk, max_num_seqs=min(16, chunk))
    assert_same(got, expected[:count])


def test_prefix_hits_change_nothing(model_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with LLM(str(model_dir), **COMMON) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        first = llm.generate(inputs, GREEDY, use_tqdm=False)
        second = llm.generate(inputs, GREEDY, use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in second)
    for outputs in (first, second):
        assert_same([list(output.outputs[0].token_ids) for output in outputs], expected)


def test_no_prefix_cache_changes_nothing(model_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert_same(run(model_dir, prompts, enable_prefix_caching=False), expected)


def test_forced_preemption_changes_nothing(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with LLM(
        str(model_dir), **(COMMON | {"num_gpu_blocks_override": 33, "block_size": 16, "max_model_len": 128})
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
        num_preemptions = llm.get_metrics().num_preemptions
    assert num_preemptions > 0
    assert_same([list(output.outputs[0].token_ids) for output in outputs], expected)


def test_synchronous_scheduling_changes_nothing(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert_same(run(model_dir, prompts, async_scheduling=False), expected)


def test_two_ranks_change_nothing(model_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """9 query heads and 3 key heads over 2 ranks: the uneven split is padded with heads of zeros."""
    assert_same(run(model_dir, prompts, tensor_parallel_size=2), expected)


def test_steps_without_graphs_change_nothing(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert_same(run(model_dir, prompts, enforce_eager=True), expected)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 32}, {"enforce_eager": True}])
def test_steps_launched_ahead_change_nothing(
    options: dict[str, Any], model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Sampled ids that the host does not know yet feed the next step; every fourth request makes the host wait."""
    device = {"device": "ahead", "plugin": [str(Path(__file__).parent / "ahead_platform.py")]}
    # Only kernels that its own author would name know such a device.
    backends = {"attention_backend": "cpu", "linear_backend": "cpu"}
    random = SamplingParams(temperature=0.9, seed=4, max_tokens=24)
    params = [GREEDY, replace(GREEDY, logprobs=1), random, replace(random, top_k=9)]
    prompts, expected = prompts[:8], expected[:8]
    with LLM(str(model_dir), **COMMON, **device, **backends, **({"max_num_seqs": 8} | options)) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, [params[i % 4] for i in range(len(inputs))], use_tqdm=False)
        again = llm.generate(inputs[2:4], [params[2], params[3]], use_tqdm=False)
    got = [list(output.outputs[0].token_ids) for output in outputs]
    for kind in (0, 1):
        assert_same(got[kind::4], expected[kind::4])
    assert [list(output.outputs[0].token_ids) for output in again] == got[2:4], "company changed a draw"
