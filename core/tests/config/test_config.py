"""Sources, spellings, sizes, refusals of options; row numbers are those of the list of statements about the surface."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import EngineConfig, ServerConfig, engine_config_from_kwargs, parse_configs
from rabbet.config.flags import flags
from rabbet.errors import ConfigError, RemovedOptionError


def parse(text: str, environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    return parse_configs(["m", *text.split()], environment=environment or {})


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 3\nmax_num_batched_tokens: 30\nport: 3\nattention_config: {backend: file}\n")
    environment = {"RABBET_MAX_NUM_SEQS": "2", "RABBET_PORT": "2"}
    engine, server = parse(f"--config {file} --max-num-seqs 1", environment)
    assert engine.scheduler.max_num_seqs == 1
    assert server.port == 2
    assert engine.scheduler.max_num_batched_tokens == 30
    assert engine.attention.backend == "file"
    assert engine.cache.block_size is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("25.6k", 25600), ("2K", 2048), ("1.5K", 1536), ("0.5G", 1 << 29), ("1m", 10**6), ("1M", 1 << 20), ("4g", 4 * 10**9), ("4G", 4 << 30), ("1T", 1 << 40), ("0.5t", 5 * 10**11), ("12", 12)],
)  # fmt: skip
def test_row_21_sizes_in_flags_and_in_nested_json(text: str, value: int) -> None:
    assert parse(f"--kv-cache-memory-bytes {text}")[0].cache.kv_cache_memory_bytes == value
    assert parse(f'--cache-config {{"kv_cache_memory_bytes":{text}}}')[0].cache.kv_cache_memory_bytes == value
    assert parse(f"--cache-config.kv_cache_memory_bytes={text}")[0].cache.kv_cache_memory_bytes == value
    assert engine_config_from_kwargs("m", kv_cache_memory_bytes=text).cache.kv_cache_memory_bytes == value


def test_row_21_what_a_fraction_leaves_over_is_dropped() -> None:
    assert parse("--max-model-len 1.3K")[0].model.max_model_len == 1331
    with pytest.raises(ConfigError, match="max-model-len is 0, but must be positive"):
        parse("--max-model-len 0.0001k")


def test_suffix_inside_a_json_string_is_text() -> None:
    assert parse('--attention-config {"backend":"4G"}')[0].attention.backend == "4G"


def test_row_20_nested_fields_as_json_dotted_and_appended() -> None:
    engine, _ = parse(
        "--attention-config.flash_attn_version=2 --compilation-config.compile_sizes+ 8 --compilation-config.compile_sizes+ 16"
    )
    assert engine.attention.flash_attn_version == 2
    assert engine.compilation.compile_sizes == [8, 16]
    assert parse("--plugin-config.acme.depth=3")[0].plugin_config == {"acme": {"depth": 3}}


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("--attention-backend a --attention-config.backend=b", "--attention-backend", "--attention-config.backend"),
        ('--spec-method a --speculative-config {"method":"b"}', "--spec-method", "--speculative-config"),
        ('--spec-tokens 2 --speculative-config.num_speculative_tokens 3', "--spec-tokens", "--speculative-config"),
        ("--cudagraph-capture-sizes 1,2 --compilation-config.cudagraph_capture_sizes+ 4", "--cudagraph-capture-sizes", "--compilation"),
        ("--max-num-seqs 2 --scheduler-config.max_num_seqs=3", "--max-num-seqs", "--scheduler-config"),
        ("--gpu-memory-utilization 0.5 --device-memory-utilization 0.6", "--gpu-memory", "--device-memory"),
    ],
)  # fmt: skip
def test_rows_22_and_28_one_field_in_two_spellings_names_both(text: str, first: str, second: str) -> None:
    with pytest.raises(ConfigError, match=f"{first}.* and {second}.*set the same option"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("--num-lookahead-slots 2", "leave it out"), ("--swap-space 4", "recomputed"), ("--best-of 2", "use n"),
        ("--lora-extra-vocab-size 2", "vocabulary"), ("--use-v2-block-manager", "one KV manager"),
        ("--num-scheduler-steps 8", "async scheduling"), ("--task embed", "--runner and --convert"),
        ("--guided-decoding-backend x", "--structured-outputs-config.backend"), ("--convert reward", "--convert embed"),
        ("--speculative-model x", "--spec-model"), ("--worker-use-ray", "--distributed-executor-backend"),
    ],
)  # fmt: skip
def test_rows_4_to_7_removed_options_say_what_replaced_them(text: str, instead: str) -> None:
    with pytest.raises(RemovedOptionError, match=instead):
        parse(text)


@pytest.mark.parametrize("name", ["swap_space", "num_lookahead_slots", "best_of"])
def test_row_4_removed_keywords_are_refused_too(name: str) -> None:
    with pytest.raises(RemovedOptionError):
        engine_config_from_kwargs("m", **{name: 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--max-modl-len 3", "did you mean max-model-len"), ("--attention-config.backnd=x", "no option 'backnd'; did you mean backend"),
        ('--attention-config {"bckend":1}', "did you mean backend"), ("--max-num-seqs 0", "scheduler.max_num_seqs is 0"),
        ("--dtype int8", "model.dtype is 'int8'"), ("--gpu-memory-utilization 1.5", "gpu_memory_utilization is 1.5"),
        ("--max-model-len -5", "must be positive"), ("--port x", "must be an integer"), ("--max-num-seqs", "needs a value"),
        ("--attention-config [1]", "must be a JSON object"), ("--attention-config {", "no valid JSON"), ("-Z", "no option -Z"),
        ("--enable-prefix-caching=maybe", "must be true or false"), ("--flash-attn-version 2", "no option"),
    ],
)  # fmt: skip
def test_row_2_wrong_options_name_field_value_and_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "tensor parallelism only"), ({"data_parallel_size": 2}, "tensor parallelism only"),
        ({"device_ids": [1, 1]}, "names a device twice"), ({"device_ids": [1, "GPU-x"]}, "mixes numbers and UUIDs"),
        ({"device_ids": [1], "tensor_parallel_size": 2}, "needs 2"), ({"runner": "pooling"}, "need a pooler"),
        ({"kv_transfer_config": {"kv_connector": "x"}}, "needs kv_role"), ({"unknown": 1}, "no option unknown"),
        ({"speculative_config": {"prompt_lookup_min": 9}}, "more than prompt_lookup_max"),
        ({"speculative_config": {"method": "custom_class"}}, "needs a model that is a class path.*not None"),
        ({"speculative_config": {"method": "custom_class", "model": "org/name"}}, "class path.*'org/name'"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config_from_kwargs("m", **options)


def test_rows_9_13_23_29_defaults_and_short_forms() -> None:
    engine, server = parse("-tp 2 -O0 --max-model-len auto --device-ids 2,3")
    assert engine.parallel.tensor_parallel_size == 2
    assert engine.optimization_level == 0
    assert engine.model.max_model_len == "auto"
    assert engine.parallel.device_ids == [2, 3]
    assert parse("-O3")[0].optimization_level == 3
    assert parse("")[0].optimization_level == 2
    assert (server.port, server.api_key, server.allowed_origins) == (8000, [], [])


def test_rows_14_15_19_26_defaults() -> None:
    engine = parse("")[0]
    assert engine.cache.enable_prefix_caching
    assert engine.scheduler.async_scheduling is None and engine.scheduler.enable_chunked_prefill is None
    assert parse("--no-async-scheduling")[0].scheduler.async_scheduling is False
    assert parse("--no-enable-prefix-caching")[0].cache.enable_prefix_caching is False
    connector = parse("--kv-transfer-config.kv_connector x --kv-transfer-config.kv_role kv_both")[0].kv_transfer
    assert connector is not None and connector.kv_load_failure_policy == "fail"


@pytest.mark.parametrize("text", ["--mamba-cache-mode align", "--disable-cascade-attn"])
def test_rows_27_and_31_options_without_effect_are_accepted_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        parse(text)
    assert "has no effect" in caplog.text


def test_row_28_other_engines_variables_are_not_read() -> None:
    engine = parse("", {"VLLM_ATTENTION_BACKEND": "X", "VLLM_USE_V1": "0"})[0]
    assert engine == parse("")[0]


def test_row_30_compile_ranges_is_a_name() -> None:
    assert parse("--compilation-config.compile_ranges+ 64")[0].compilation.compile_ranges == [64]


def test_row_8_kernels_are_chosen_by_flags() -> None:
    engine = parse("--moe-backend a --linear-backend b")[0]
    assert (engine.kernel.moe_backend, engine.kernel.linear_backend) == ("a", "b")


def test_lists_collect_and_underscores_are_dashes() -> None:
    engine, server = parse("--api_key a --api-key b --served-model-name x,y --plugins-deny p --plugins-deny q")
    assert server.api_key == ["a", "b"]
    assert engine.model.served_model_name == ["x", "y"]
    assert engine.plugins.deny == ["p", "q"]


def test_every_field_has_one_flag_and_one_variable() -> None:
    table = flags()
    variables = [flag.environment for flag in table.values()]
    assert len(variables) == len(set(variables))
    assert table["max-model-len"].environment == "RABBET_MAX_MODEL_LEN"
    undescribed = [flag.name for flag in table.values() if not flag.description]
    assert not undescribed


def test_unreadable_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(f"--config {tmp_path / 'none.yaml'}")
    bad = tmp_path / "bad.yaml"
    for text, message in (
        ("a: [", "no valid YAML"),
        ("- 1", "must hold a mapping"),
        ("max_modl_len: 1", "did you mean"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=message):
            parse(f"--config {bad}")
