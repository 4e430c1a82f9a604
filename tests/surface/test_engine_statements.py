"""What is decided at the start: async scheduling, budgets, chunked prefill, prefix cache, backends, capacity."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.engine.core import EngineCore
from rabbet.errors import ConfigError, PluginRefusedError, UnknownPluginError
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def resolved(*, server: bool = True, config: dict[str, Any] | None = None, **options: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **(config or {})}))
        options.setdefault("load_format", "dummy")
        return resolve(engine_config_from_kwargs(str(tmp_path), **options), is_server=server)

    return resolved


def test_async_scheduling_is_the_normal_path_and_can_be_switched_off(run: Any) -> None:
    assert run().is_async and run(async_scheduling=True).is_async
    assert not run(async_scheduling=False).is_async


def test_async_scheduling_that_the_executor_cannot_do_is_off_by_default_and_refused_if_asked_for(
    null: ModuleType, model_dir: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(null.NullExecutor, "max_concurrent_steps", property(lambda self: 1), raising=False)
    closed: list[bool] = []
    monkeypatch.setattr(null.NullExecutor, "shutdown", lambda self: closed.append(True))
    plain = resolve(engine_config_from_kwargs(str(model_dir), **options), is_server=False)
    assert EngineCore(plain).scheduler.context.is_async is False
    asked = resolve(engine_config_from_kwargs(str(model_dir), async_scheduling=True, **options), is_server=False)
    with pytest.raises(ConfigError, match="--async-scheduling is set, but the executor hollow runs one step at a time"):
        EngineCore(asked)
    assert closed == [True]


def test_prefix_caching_is_on_by_default_and_reaches_the_engine(
    null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=2)
    for asked, is_on in (({}, True), ({"enable_prefix_caching": False}, False)):
        core = EngineCore(resolve(engine_config_from_kwargs(str(model_dir), **options, **asked), is_server=False))
        cached = []
        for name in "ab":
            news = core.add(
                EngineRequest(request_id=name, prompt_token_ids=list(range(1, 129)), sampling=sampling, max_tokens=2)
            )
            while core.has_work():
                news += core.step()
            cached.append(max(delta.num_cached_tokens for delta in news))
        assert cached[0] == 0
        # The last token of the prompt is computed anew in any case.
        assert 0 < cached[1] < 128 if is_on else cached[1] == 0


def test_batch_defaults_follow_use_mode_context_and_requests(run: Any) -> None:
    def budget(**options: Any) -> tuple[int, int]:
        found = run(**options)
        return found.max_num_batched_tokens, found.max_num_seqs

    assert budget(server=True) == (2048, 128)
    assert budget(server=False) == (4096, 256)
    assert budget(performance_mode="throughput") == (4096, 256)
    assert budget(performance_mode="throughput", max_num_seqs=7) == (4096, 7)
    assert budget(performance_mode="interactivity") == (2048, 128)
    assert budget(max_model_len=16, max_num_seqs=4) == (64, 4)
    assert budget(max_num_batched_tokens=64) == (64, 64)
    assert budget(server=True, enable_chunked_prefill=False)[0] == 8192


def test_chunked_prefill_is_on_by_default_and_without_it_a_step_must_hold_the_context(run: Any) -> None:
    assert run().is_chunked_prefill
    with pytest.raises(ConfigError, match="is 100, less than the context of 8192, and chunked prefill is off"):
        run(enable_chunked_prefill=False, max_num_batched_tokens=100, max_num_seqs=8)
    assert not run(
        enable_chunked_prefill=False, max_num_batched_tokens=100, max_num_seqs=8, max_model_len=100
    ).is_chunked_prefill


def test_a_context_longer_than_the_model_was_made_for_is_refused_with_the_way_to_extend_it(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 8193, .* made for 8192 tokens; .*--hf-overrides"):
        run(max_model_len=8193)
    assert run(max_model_len="auto").is_max_model_len_auto and run(max_model_len=-1).is_max_model_len_auto
    assert run(max_model_len=8192).is_max_model_len_auto is False


def test_the_longest_context_that_fits_is_found_and_a_cache_that_holds_nothing_is_an_error(
    null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    resolved = resolve(engine_config_from_kwargs(str(model_dir), **options), is_server=False)
    auto = replace(resolved, is_max_model_len_auto=True, max_model_len=1 << 20)
    for blocks in (3, 10, 41, 200):
        core = EngineCore(replace(auto, kv_cache_memory_bytes=16 * blocks))
        length = core.info.max_model_len
        assert 0 < length <= core.info.capacity_tokens
        # One token more is refused, and the message says the number that was found.
        with pytest.raises(ConfigError, match=f"that fits is {length}"):
            EngineCore(
                replace(
                    resolved, is_max_model_len_auto=False, max_model_len=length + 4, kv_cache_memory_bytes=16 * blocks
                )
            )
    with pytest.raises(ConfigError, match="KV cache"):
        EngineCore(replace(auto, kv_cache_memory_bytes=16))


def test_the_start_says_capacity_and_concurrency_in_one_line(
    null: ModuleType, model_dir: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        core = EngineCore(resolve(engine_config_from_kwargs(str(model_dir), **options), is_server=False))
    lines = [record.getMessage() for record in caplog.records if "maximum concurrency" in record.getMessage()]
    assert len(lines) == 1
    assert (
        f"{core.info.capacity_tokens} tokens" in lines[0]
        and f"{core.info.max_model_len} tokens per request" in lines[0]
    )


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("attention_backend", "FLASH_ATTN"), ("attention_backend", "XFORMERS"), ("moe_backend", "triton"),
        ("linear_backend", "cutlass"), ("distributed_executor_backend", "external_launcher"), ("scheduling_policy", "sjf"),
        ("device", "tpu"), ("load_format", "tensorizer"), ("kv_cache_dtype", "fp8"), ("quantization", "awq"),
    ],
)  # fmt: skip
def test_an_unknown_name_lists_the_names_that_there_are(run: Any, option: str, name: str) -> None:
    moe = {"architectures": ["LlamaForCausalLM"], "num_local_experts": 4, "num_experts": 4}
    with pytest.raises(UnknownPluginError) as caught:
        run(**{option: name}, config=moe if option == "moe_backend" else None)
    message = str(caught.value)
    assert name.casefold().replace("-", "_") in message.casefold() and (
        "installed: " in message or "pip install" in message
    )


@pytest.mark.parametrize("name", ["cpu", "CPU", "cpu_"])
def test_a_backend_is_found_whatever_its_case_and_a_slip_is_answered_with_what_was_meant(run: Any, name: str) -> None:
    if name != "cpu_":
        assert run(attention_backend=name).composition.name("attention") == "cpu"
        return
    with pytest.raises(UnknownPluginError, match="did you mean cpu"):
        run(attention_backend=name)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype is bfloat16, but the model runs in float32"),
        ({"block_size": 7}, "multiples of"), ({"long_prefill_token_threshold": 9000}, "more than the context of 8192"),
        ({"speculative_config": {"num_speculative_tokens": 2}}, "--speculative-config is set.*no proposer"),
        ({"spec_method": "ngram"}, "proposer"), ({"kv_transfer_config": {"kv_role": "kv_both"}}, "--kv-transfer-config is set"),
        ({"kv_transfer_config": {"kv_load_failure_policy": "recompute"}}, "--kv-transfer-config is set.*no kv_connector"),
        ({"kv_events_config": {"enable_kv_cache_events": True}}, "--kv-events-config is set.*publishes no events"),
        ({"kv_events_config": {"endpoint": "tcp://127.0.0.1:1"}}, "--kv-events-config is set"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "--structured-outputs-config is set.*no grammar"),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, "grammar"),
        ({"attention_config": {"flash_attn_version": 3}}, "--attention-config.flash-attn-version is set.*no FlashAttention"),
        ({"quantization_config": {"linear": "fp8"}}, "--quantization-config is set.*for --quantization only"),
        ({"tokenizer_revision": "main"}, "--tokenizer-revision is set.*--revision"),
        ({"device_ids": [0]}, "device"), ({"model_impl": "native", "config": {"architectures": ["NoSuchForCausalLM"]}}, "NoSuch"),
        ({"tensor_parallel_size": 999}, "999|ranks"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_and_never_ignored(run: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownPluginError, PluginRefusedError), match=message):
        run(**asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"optimization_level": 0},
        {"optimization_level": 3},
        {"compilation_config": {"compile_ranges": [64]}},
        {"cudagraph_capture_sizes": [1]},
    ],
)
def test_levels_and_graphs_that_change_nothing_on_a_platform_say_so(
    null: ModuleType,
    model_dir: Path,
    options: dict[str, Any],
    asked: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolve(engine_config_from_kwargs(str(model_dir), **options), is_server=False)
    assert "changes nothing here" not in caplog.text
    resolve(engine_config_from_kwargs(str(model_dir), **options, **asked), is_server=False)
    assert "some of --compilation-config and -O changes nothing here" in caplog.text


def test_quantised_checkpoints_name_the_method_that_is_missing_and_a_mismatch(run: Any) -> None:
    stored = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(UnknownPluginError, match="the checkpoint needs the quantization method 'gptq'"):
        run(config=stored)
    with pytest.raises(ConfigError, match="--quantization is 'awq', but the checkpoint was quantised with 'gptq'"):
        run(config=stored, quantization="awq")
