"""Logits processors through whole engines: greedy tokens are the same alone, in batches, on two ranks, in any schedule."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rabbet import LLM, SamplingParams

PROCESSOR = "rabbet_sdk.strict.logits_processor:StrictLogits"
"""The sealed twin: it raises on anything that the contract does not offer."""
NUM_TOKENS = 24
WISHES = (0, 1, 3, 8, 0, 30, 2, 5)
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(3 + 5 * i)] for i in range(len(WISHES))]
COMMON: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_model_len": 128, "logits_processors": [PROCESSOR],
    "engine_process": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(__file__).parents[1] / "e2e/tiny_model.py"
    spec = importlib.util.spec_from_file_location("processors_tiny_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_tiny_model(tmp_path_factory.mktemp("tiny"))


def sampling(wish: int) -> SamplingParams:
    extra = {"no_repeat_last": wish} if wish else None
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra)


def run(tiny: Path, **options: Any) -> list[list[int]]:
    with LLM(str(tiny), **(COMMON | options)) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = llm.generate(prompts, [sampling(wish) for wish in WISHES], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[list[int]]:
    """One request after the other."""
    return run(tiny, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)


def test_requests_get_what_they_asked_for(alone: list[list[int]], tiny: Path) -> None:
    plain = run(tiny, max_num_seqs=1, logits_processors=[])
    for tokens, other, wish in zip(alone, plain, WISHES, strict=True):
        if wish:
            repeated = [i for i, token in enumerate(tokens) if token in tokens[max(0, i - wish) : i]]
            assert not repeated, f"no_repeat_last {wish}: {tokens}"
        else:
            assert tokens == other, "a request without a wish is changed"
    assert sum(tokens != other for tokens, other in zip(alone, plain, strict=True)) >= 4, "the model never repeats"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 8},
        {"max_num_seqs": 8, "async_scheduling": False},
        {"max_num_seqs": 3},
        {"max_num_seqs": 8, "max_num_batched_tokens": 9},
        {"max_num_seqs": 8, "num_gpu_blocks_override": 14, "block_size": 16},
        {"max_num_seqs": 8, "engine_process": True},
        {"max_num_seqs": 8, "engine_process": True, "tensor_parallel_size": 2},
        {"max_num_seqs": 3, "engine_process": True, "tensor_parallel_size": 2, "async_scheduling": False},
    ],
    ids=["batch", "batch-sync", "slots-again", "chunks", "preempted", "process", "ranks", "ranks-sync"],
)  # fmt: skip
def test_tokens_are_those_of_each_request_alone(options: dict[str, Any], tiny: Path, alone: list[list[int]]) -> None:
    assert run(tiny, **options) == alone
