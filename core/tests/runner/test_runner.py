"""The runner on a model that counts upwards: rows that come and go, rows that fail, and what it refuses to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.errors import PluginRefusedError
from rabbet.kv.groups import build_cache_config
from rabbet.runner.runner import DeviceRunner
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.sampling import SamplingParams

PLUGIN = Path(__file__).parents[1] / "worker" / "faulty_plugins.py"
VOCAB_SIZE, NAN = 32, 28
GREEDY = {"temperature": 0.0}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DeviceRunner]]:
    made: list[DeviceRunner] = []

    def loaded(layer: dict[str, Any] | None = None, **options: Any) -> DeviceRunner:
        values = {
            "architectures": ["FaultyForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 4, "num_attention_heads": 1,
            "max_position_embeddings": 64, "dtype": "float32", "layer": layer or {},
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = engine_config_from_kwargs(
            str(tmp_path), device="faulty", attention_backend="faulty", load_format="dummy", plugin=[str(PLUGIN)],
            linear_backend="torch", kv_cache_memory_bytes=1 << 20, **options,
        )  # fmt: skip
        made.append(DeviceRunner(resolve(config, is_server=False)))
        made[-1].load()
        return made[-1]

    yield loaded
    for runner in made:
        runner.close()


@pytest.mark.parametrize(("num_seqs", "measured", "share"), [(512, [512 * 64], 1), (4096, [1, 512 * 64], 8)])
def test_a_start_measures_no_more_tokens_than_any_default_and_reckons_the_rest(
    make: Callable[..., DeviceRunner], monkeypatch: pytest.MonkeyPatch, num_seqs: int, measured: list[int], share: int
) -> None:
    """So that a large --max-num-batched-tokens costs memory, not minutes; what is allocated once is not multiplied."""
    runner = make(max_num_seqs=num_seqs, max_num_batched_tokens="1t")
    seen: list[int] = []
    forward = runner._model.forward
    monkeypatch.setattr(runner._model, "forward", lambda ids, *more: (seen.append(len(ids)), forward(ids, *more))[1])
    monkeypatch.setattr(runner._platform, "peak_activation_bytes", lambda: 1000)
    assert runner.profile_memory().activation_bytes == 1000 * share
    assert seen == measured


def ready(runner: DeviceRunner) -> DeviceRunner:
    runner.initialize_cache(build_cache_config(runner.kv_cache_specs(), 1 << 20, None))
    runner.warm_up()
    return runner


def new(name: str, *token_ids: int, num_prompt: int | None = None, computed: int = 0, **sampling: Any) -> NewRequest:
    return NewRequest(
        request_id=name,
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt or len(token_ids),
        num_computed_tokens=computed,
        block_ids=[[1]],
        sampling=SamplingParams(**(sampling or GREEDY)),
        seed=7,
    )


def first_step(*requests: NewRequest, step_id: int = 1, gone: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        new_requests=list(requests),
        num_scheduled_tokens={item.request_id: len(item.token_ids) - item.num_computed_tokens for item in requests},
        finished_request_ids=list(gone),
    )


def next_step(step_id: int, computed: dict[str, int], gone: tuple[str, ...] = ()) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        running_requests=[
            RunningRequest(request_id=name, num_computed_tokens=count, new_block_ids=[[]])
            for name, count in computed.items()
        ],
        num_scheduled_tokens=dict.fromkeys(computed, 1),
        finished_request_ids=list(gone),
    )


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.9}, {"logit_bias": {3: 1.0}}])
def test_row_of_nan_fails_alone(make: Callable[..., DeviceRunner], sampling: dict[str, Any]) -> None:
    runner = ready(make())
    wanted = {**sampling, "logprobs": 2}
    result = runner.execute(first_step(new("a", 4), new("bad", 3, NAN, **wanted), new("b", 9)))
    assert result.failed == {"bad": "the model's logits hold NaN or infinity"}
    assert result.sampled_token_ids == {"a": [5], "b": [10]} and not result.logprobs
    after = runner.execute(next_step(2, {"a": 1, "b": 1}, gone=("bad",)))
    assert after.sampled_token_ids == {"a": [6], "b": [11]} and not after.failed


def test_row_whose_masks_exclude_each_other_fails_alone_and_says_why(make: Callable[..., DeviceRunner]) -> None:
    runner = ready(make())
    blocked = NewRequest(
        request_id="none", token_ids=[1], num_prompt_tokens=1, num_computed_tokens=0, block_ids=[[1]],
        sampling=SamplingParams(allowed_token_ids=[8], min_tokens=2, top_k=3), seed=0, end_token_ids=[8],
    )  # fmt: skip
    result = runner.execute(first_step(blocked, new("a", 4)))
    assert set(result.failed) == {"none"} and "leave no token" in result.failed["none"]
    assert result.sampled_token_ids == {"a": [5]}


def test_rows_are_used_again_without_a_trace_of_who_had_them(make: Callable[..., DeviceRunner]) -> None:
    runner = ready(make(max_num_seqs=2))
    runner.execute(first_step(new("a", 4, 5, 6, repetition_penalty=2.0, temperature=0.0), new("b", 9)))
    # Preempted and back in one plan, with what it had generated; another takes the row of one that was aborted.
    back = new("a", 4, 5, 6, 7, num_prompt=3, temperature=0.0, frequency_penalty=2.0)
    result = runner.execute(first_step(back, new("c", 20), step_id=2, gone=("a", "b", "unknown")))
    assert result.sampled_token_ids == {"a": [8], "c": [21]}
    assert runner.execute(next_step(3, {"a": 4, "c": 1})).sampled_token_ids == {"a": [9], "c": [22]}
    assert runner.execute(StepPlan(step_id=4, finished_request_ids=["a", "c"])).sampled_token_ids == {}


def test_prompt_logprobs_in_chunks_are_those_of_the_whole(make: Callable[..., DeviceRunner]) -> None:
    runner = ready(make())
    prompt = (3, 9, 4, 17, 2, 6)
    options = {"temperature": 0.0, "prompt_logprobs": 2}
    whole = runner.execute(first_step(new("w", *prompt, **options))).prompt_logprobs["w"]
    assert [entry.token_ids[0] for entry in whole] == list(prompt[1:]) and {len(item.ranks) for item in whole} == {3}
    runner.execute(StepPlan(step_id=2, finished_request_ids=["w"]))
    parts = []
    for step_id, (computed, count) in enumerate(((0, 1), (1, 3), (4, 2)), start=3):
        running = [RunningRequest(request_id="c", num_computed_tokens=computed, new_block_ids=[[]])]
        plan = StepPlan(
            step_id=step_id,
            new_requests=[] if computed else [new("c", *prompt, **options)],
            running_requests=running if computed else [],
            num_scheduled_tokens={"c": count},
        )
        result = runner.execute(plan)
        parts += result.prompt_logprobs.get("c", [])
        assert bool(result.sampled_token_ids) is (computed + count == len(prompt))
    assert parts == whole


@pytest.mark.parametrize(
    ("layer", "message"), [({"window": 8}, "no window"), ({"soft_cap": 5.0}, "no soft cap"), ({"sinks": 1}, "no sinks")]
)
def test_backend_that_cannot_serve_a_layer_is_refused_before_weights_load(
    make: Callable[..., DeviceRunner], layer: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginRefusedError, match=f"layers.0.attn.*faulty.*{message}"):
        make(layer)
