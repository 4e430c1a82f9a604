"""Spellings, sources and their order, beyond single options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet.config import EngineConfig, ServerConfig, engine_config_from_kwargs, parse_configs
from rabbet.config.flags import fields, flags
from rabbet.config.load import is_debug
from rabbet.errors import ConfigError, RabbetError, RemovedOptionError


def parse(text: str, environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    return parse_configs(["m", *text.split()], environment=environment or {})


# ---- environment


def test_each_field_of_a_section_has_a_variable() -> None:
    engine = parse("", {"RABBET_ATTENTION_CONFIG__FLASH_ATTN_VERSION": "2", "RABBET_SPECULATIVE_CONFIG__METHOD": "x"})[
        0
    ]
    assert engine.attention.flash_attn_version == 2
    assert engine.speculative is not None and engine.speculative.method == "x"


def test_a_variable_takes_a_section_as_json_and_reaches_into_mappings() -> None:
    environment = {
        "RABBET_CACHE_CONFIG": '{"kv_cache_memory_bytes": 1.5G, "block_size": 8}',
        "RABBET_PLUGIN_CONFIG__ACME__DEPTH": "3",
        "RABBET_HF_OVERRIDES": '{"a": {"b": 1}}',
    }
    engine = parse("", environment)[0]
    assert (engine.cache.kv_cache_memory_bytes, engine.cache.block_size) == (3 << 29, 8)
    assert engine.plugin_config == {"acme": {"depth": 3}}
    assert engine.model.hf_overrides == {"a": {"b": 1}}


def test_every_variable_of_the_table_sets_its_field_or_is_named_in_the_error() -> None:
    silent = []
    for flag in flags().values():
        try:
            engine, server = parse_configs([], environment={flag.environment: "true" if flag.is_switch else "1"})
        except ConfigError as error:
            if flag.environment not in str(error):
                silent.append(flag.name)
            continue
        value: Any = server if flag.place[0] == "server" else engine
        for name in flag.place[flag.place[0] == "server" :]:
            value = getattr(value, name)
        assert value in (True, 1, 1.0, "1", ["1"], [1]), flag.name
    # These contradict what is not set beside them.
    needs_more = {"enable-auto-tool-choice", "ssl-certfile", "ssl-keyfile", "kv-transfer-config.kv-connector"}
    assert set(silent) == needs_more | {"speculative-config.prompt-lookup-max"}


def test_two_variables_for_one_field_are_named() -> None:
    with pytest.raises(ConfigError, match="RABBET_ATTENTION_BACKEND and RABBET_ATTENTION_CONFIG__BACKEND set the same"):
        parse("", {"RABBET_ATTENTION_BACKEND": "a", "RABBET_ATTENTION_CONFIG__BACKEND": "b"})


def test_an_unknown_variable_warns_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse("", {"RABBET_MAX_MODL_LEN": "3"}) == parse("")
        assert parse("", {"RABBET_PROT": "3", "RABBET_CACHE_CONFIG__BLOK_SIZE": "8"}) == parse("")
    assert "no option RABBET_MAX_MODL_LEN; did you mean RABBET_MAX_MODEL_LEN" in caplog.text
    assert "no option RABBET_PROT; did you mean RABBET_PORT?" in caplog.text
    assert "cache has no option 'blok-size'; did you mean block_size?" in caplog.text


def test_a_bad_value_in_a_variable_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="RABBET_PORT is 'x', but must be an integer"):
        parse("", {"RABBET_PORT": "x"})
    with pytest.raises(ConfigError, match=r"RABBET_MAX_NUM_SEQS: scheduler.max_num_seqs is 0: input should be greater"):
        parse("", {"RABBET_MAX_NUM_SEQS": "0"})


def test_the_links_of_a_kubernetes_service_called_rabbet_are_no_options() -> None:
    links = {"RABBET_PORT": "tcp://10.0.0.1:8000", "RABBET_PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    assert parse("", links)[1].port == 8000


def test_offline_follows_the_hubs_variable_unless_ours_says_otherwise() -> None:
    assert parse("", {"HF_HUB_OFFLINE": "1"})[0].load.is_offline
    assert not parse("", {"HF_HUB_OFFLINE": "1", "RABBET_OFFLINE": "0"})[0].load.is_offline
    assert not parse("", {"HF_HUB_OFFLINE": "0"})[0].load.is_offline


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("port: 3\n")
    assert parse("", {"RABBET_CONFIG": str(tmp_path / "c.yaml")})[1].port == 3


def test_keywords_lie_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RABBET_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("RABBET_BLOCK_SIZE", "8")
    monkeypatch.setenv("RABBET_PORT", "1")
    config = engine_config_from_kwargs("m", max_num_seqs=5)
    assert (config.scheduler.max_num_seqs, config.cache.block_size, config.model.model) == (5, 8, "m")


# ---- file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nport: 2\n", "'port' stands twice"),
        ("attention_config: {backend: a, backend: b}\n", "'backend' stands twice"),
        (
            "attention-backend: a\nattention_config: {backend: b}\n",
            "attention-backend and .*attention_config set the same",
        ),
        ("max_num_seqs: 0\n", "c.yaml: max_num_seqs: scheduler.max_num_seqs is 0"),
        ("convert: reward\n", "use --convert embed"),
        ("swap_space: 4\n", "swap_space is gone"),
        ("a: &a [*a]\n", "c.yaml"),
    ],
)
def test_what_is_wrong_in_a_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(f"--config {tmp_path / 'c.yaml'}")


def test_a_file_takes_sizes_dots_and_nesting(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "max_model_len: 8K\nattention-config.backend: x\nplugin_config: {acme: {depth: 3}}\nenforce-eager: true\n"
    )
    engine = parse(f"--config {tmp_path / 'c.yaml'}")[0]
    assert (engine.model.max_model_len, engine.attention.backend, engine.model.enforce_eager) == (8192, "x", True)
    assert engine.plugin_config == {"acme": {"depth": 3}}


def test_mappings_of_several_sources_are_laid_over_one_another_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("plugin_config: {acme: {depth: 3, width: 4}}\nhf_overrides: {a: {b: 1, c: 2}}\n")
    engine = parse(f"--config {tmp_path / 'c.yaml'} --plugin-config.acme.depth=9 --hf-overrides.a.b 7")[0]
    assert engine.plugin_config == {"acme": {"depth": 9, "width": 4}}
    assert engine.model.hf_overrides == {"a": {"b": 7, "c": 2}}
    assert parse(f"--config {tmp_path / 'c.yaml'} --hf-overrides {{}}")[0].model.hf_overrides == {}
    assert parse(f"--config {tmp_path / 'c.yaml'} --hf-overrides.a=1")[0].model.hf_overrides == {"a": 1}


def test_plus_appends_to_the_sources_below_and_a_plain_flag_replaces_them(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("compilation_config: {compile_sizes: [1, 2]}\nserved_model_name: [a]\n")
    file = f"--config {tmp_path / 'c.yaml'}"
    assert parse(f"{file} --compilation-config.compile_sizes+ 4")[0].compilation.compile_sizes == [1, 2, 4]
    assert parse(f"{file} --compilation-config.compile_sizes=4")[0].compilation.compile_sizes == [4]
    assert parse(f"{file} --served-model-name+ b")[0].model.served_model_name == ["a", "b"]


# ---- flags


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("--compilation-config.compile_sizes=[1] --compilation-config.compile_sizes+ 2", [1, 2]),
        ("--compilation-config.compile_sizes+ 2 --compilation-config.compile_sizes+ 1k", [2, 1000]),
        ('--compilation-config {"compile_sizes":[1]} --compilation-config.compile_sizes+ 2,3', [1, 2, 3]),
        ("-cc.compile_sizes=4", [4]),
        ("--compilation_config.compile-sizes 4", [4]),
    ],
)
def test_row_20_spellings_of_lists(text: str, sizes: list[int]) -> None:
    assert parse(text)[0].compilation.compile_sizes == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--plugin-config.acme.depth=3 --plugin-config {\"acme\":{\"depth\":4}}", "--plugin-config.acme.depth and --plugin-config set"),
        ("--hf-overrides.a.b=3 --hf-overrides.a=4", "--hf-overrides.a.b and --hf-overrides.a set"),
        ("--attention-config {\"backend\":\"a\"} --attention-config.backend=a", "--attention-config and --attention-config.backend set"),
        ("--spec-model a --speculative-config.model=b", "--spec-model and --speculative-config.model set"),
        ("--max-cudagraph-capture-size 3 --compilation-config {\"max_cudagraph_capture_size\":4}", "set the same"),
        ("--model x", "MODEL and --model set the same"),
        ("-tp 2 --parallel-config.tensor_parallel_size=2", "--tensor-parallel-size and --parallel-config"),
        ("other", "'other' stands alone"),
        ("max-model-len 4096", "'max-model-len' stands alone.*; did you mean --max-model-len\\?$"),
        ("max_model_len=4096", "stands alone.*; did you mean --max-model-len\\?$"),
        ("4096", "'4096' stands alone; a list is written with commas, a value behind its flag$"),
        ("--served-model-name a b", "'b' stands alone; a list is written with commas"),
        ("--config a --config b", "--config is given twice"),
        ("--attention-config {\"backend\":\"a\",\"backend\":\"b\"}", "has the key 'backend' twice"),
        ("--max-num-seqs+ 3", "max_num_seqs is no list"),
        ("--attention-config+ 3", "no list|JSON object"),
        ("--attention-config.backend.x=3", "no option --attention-config.backend.x"),
        ("--attention-config.=3", "no option"),
        ("--hf-overrides.=3", "no option"),
        ("--no-max-num-seqs", "no option --no-max-num-seqs"),
        ("--no-enforce-eager=1", "takes no value; write --enforce-eager=1"),
        ("--max-model-len x", "must be an integer.*or auto"),
        ("--max-model-len " + "9" * 5000, "must be an integer"),
        ("--hf-overrides {\"a\":" + "[" * 100_000, "no valid JSON"),
        ("--plugin-config.acme.a={", "no valid JSON"),
        ("--shutdown-timeout nan", "shutdown_timeout is nan"), ("--shutdown-timeout inf", "shutdown_timeout is inf"),
        ("--gpu-memory-utilization nan", "gpu_memory_utilization is nan"), ("--log-stats-interval-s inf", "is inf"),
        ("--port 70000", "less than or equal to 65535"), ("-O4", "less than or equal to 3"), ("-tp 0", "greater than 0"),
        ("--=x", "no option"), ("--", "no option"), ("---x", "no option"),
        ("--device-ids -1,2 -tp 2", "below 0"), ("--device-ids [] ", "names 0 devices"),
        ("--device-ids 2,GPU-a -tp 2", "mixes numbers and UUIDs"),
        ("--api-key=", "--api-key is empty"), ("--enable-auto-tool-choice", "needs --tool-call-parser"),
        ("--ssl-certfile x", "--ssl-keyfile is missing"), ("--ssl-keyfile x", "--ssl-certfile is missing"),
        ("--cpu-offload-gb 2", "not possible in this release"), ("--enable-lora", "not possible in this release"),
        ("--nnodes 2", "not possible in this release"),
    ],
)  # fmt: skip
def test_contradictions_and_slips_on_the_command_line(text: str, message: str | None) -> None:
    if message is None:
        assert parse(text)[1].api_key == []
        return
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_switches_take_words_negations_and_bare_dots() -> None:
    assert parse("--enforce-eager false")[0].model.enforce_eager is False
    assert parse("--enforce-eager=on")[0].model.enforce_eager is True
    assert parse("--plugins-config.strict")[0].plugins.strict is True
    assert parse("--no-plugins-config.strict")[0].plugins.strict is False
    assert parse("--kv-events-config.enable-kv-cache-events --port 3")[0].kv_events.enable_kv_cache_events


def test_keys_of_plugins_keep_their_spelling_and_types() -> None:
    text = "--plugin-config.acme.Some_Key=4K --plugin-config.acme.name=flash --plugin-config.acme.on=true"
    assert parse(text)[0].plugin_config == {"acme": {"Some_Key": 4096, "name": "flash", "on": True}}
    assert parse("--hf-overrides a=1 --hf-overrides b=x")[0].model.hf_overrides == {"a": 1, "b": "x"}
    assert parse("--plugin-prefer attention/a=1 --plugin-prefer attention/b=2")[0].plugins.prefer == {
        "attention/a": "1", "attention/b": "2",
    }  # fmt: skip


def test_row_1_there_is_one_engine_and_no_switch() -> None:
    with pytest.raises(RemovedOptionError, match="there is one engine"):
        parse("--use-v1")
    assert parse("", {"VLLM_USE_V1": "0", "VLLM_PLUGINS": "x"}) == parse("")


def test_row_6_processors_of_logits_belong_to_the_engine() -> None:
    with pytest.raises(RemovedOptionError, match="plugins of the kind logits_processor"):
        parse("--logits-processor-pattern .*")


@pytest.mark.parametrize(
    "text", ["--nnodes 2", "--node-rank=1", "--data-parallel-rank 0", "--master-addr x", "--headless"]
)
def test_rows_43_and_44_several_nodes_are_refused_until_they_exist(text: str) -> None:
    with pytest.raises(ConfigError, match="is not possible in this release; leave it out"):
        parse(text)


def test_rows_15_and_48_a_connector_has_a_role_and_a_policy_for_failures() -> None:
    with pytest.raises(ConfigError, match="needs kv_role: kv_producer, kv_consumer or kv_both"):
        parse("--kv-transfer-config.kv_connector x")
    base = "--kv-transfer-config.kv_connector x --kv-transfer-config.kv_role kv_both"
    text = f"{base} --kv-transfer-config.kv_load_failure_policy recompute --kv-transfer-config.kv_connector_extra_config.size 1.5G"
    transfer = parse(text)[0].kv_transfer
    assert transfer is not None and transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config == {"size": 3 << 29}
    with pytest.raises(ConfigError, match="kv_load_failure_policy is 'retry'.*'fail' or 'recompute'"):
        parse(f"{base} --kv-transfer-config.kv_load_failure_policy retry")


@pytest.mark.parametrize("method", ["suffix", "ngram", "mtp", "draft_model", "custom_class", "acme"])
def test_row_53_methods_are_open_names(method: str) -> None:
    speculative = parse(f"--spec-method {method} --spec-model a.b.C --spec-tokens 4")[0].speculative
    assert speculative is not None
    assert (speculative.method, speculative.model, speculative.num_speculative_tokens) == (method, "a.b.C", 4)


@pytest.mark.parametrize("level", range(4))
def test_row_29_levels_of_optimisation(level: int) -> None:
    for text in (f"-O{level}", f"-O {level}", f"-O={level}", f"--optimization-level {level}"):
        assert parse(text)[0].optimization_level == level


def test_row_23_longest_context_is_found_by_auto_or_minus_one() -> None:
    assert parse("--max-model-len auto")[0].model.max_model_len == "auto"
    assert parse("--max-model-len -1")[0].model.max_model_len == -1
    assert parse("")[0].model.max_model_len is None


@pytest.mark.parametrize("ids", ["2,3", "GPU-aaaa,GPU-bbbb", "[2,3]"])
def test_row_9_devices_are_numbers_or_uuids(ids: str) -> None:
    found = parse(f"--device-ids {ids} -tp 2")[0].parallel.device_ids
    assert found == ([2, 3] if "2" in ids else ["GPU-aaaa", "GPU-bbbb"])


@pytest.mark.parametrize(("flag", "size"), [("-pp", 2), ("-dp", 4), ("--pipeline-parallel-size", 3)])
def test_row_42_stages_and_copies_are_refused_until_they_exist(flag: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"is {size}; this release runs tensor parallelism only"):
        parse(f"{flag} {size}")


def test_row_54_ranks_of_the_draft_model_are_one_or_those_of_the_target() -> None:
    base = "--spec-method m -tp 4 --speculative-config.draft_tensor_parallel_size"
    for size in (1, 4):
        speculative = parse(f"{base}={size}")[0].speculative
        assert speculative is not None and speculative.draft_tensor_parallel_size == size
    with pytest.raises(ConfigError, match="is 2, but must be 1 or --tensor-parallel-size, which is 4"):
        parse(f"{base}=2")
    with pytest.raises(RemovedOptionError, match="draft_tensor_parallel_size"):
        parse("--speculative-config.tensor_parallel_size=2")
    with pytest.raises(RemovedOptionError, match="draft_tensor_parallel_size"):
        engine_config_from_kwargs("m", speculative_config={"tensor_parallel_size": 2})


def test_row_57_running_requests_are_aborted_at_once_unless_a_time_is_given() -> None:
    assert parse("")[0].shutdown_timeout == 0
    assert parse("--shutdown-timeout 2.5")[0].shutdown_timeout == 2.5


def test_row_10_and_12_sampling_defaults_have_their_options() -> None:
    engine = parse('--generation-config rabbet --override-generation-config {"top_k":3}')[0]
    assert (engine.model.generation_config, engine.model.override_generation_config) == ("rabbet", {"top_k": 3})
    assert parse("")[0].model.generation_config == "auto"


def test_row_28_auto_is_a_name_for_no_choice() -> None:
    assert parse("")[0].attention.backend is None
    assert parse("--attention-backend none")[0].attention.backend is None
    assert parse("--attention-backend x")[0].attention.backend == "x"
    assert parse("--attention-config.backend=x")[0].attention.backend == "x"


# ---- keywords


def test_keywords_take_paths(tmp_path: Path) -> None:
    config = engine_config_from_kwargs(tmp_path, tokenizer=tmp_path / "t")  # type: ignore[arg-type]
    assert (config.model.model, config.model.tokenizer) == (str(tmp_path), str(tmp_path / "t"))


def test_keywords_take_sections_none_and_text() -> None:
    config = engine_config_from_kwargs(
        "m", speculative_config=None, kv_cache_memory_bytes="1.5G", quantization=None, dtype="half",
        attention_config={"backend": "x"}, plugin_config={"acme": {"a.b": 1}},
    )  # fmt: skip
    assert config.speculative is None
    assert config.cache.kv_cache_memory_bytes == 3 << 29
    assert config.plugin_config == {"acme": {"a.b": 1}}
    assert config.model.dtype == "half"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 3}, "port is an option of the server"),
        (
            {"attention_backend": "a", "attention_config": {"backend": "b"}},
            "attention_backend and attention_config set",
        ),
        ({"attention_config": {"bckend": 1}}, "no option 'bckend'; did you mean backend"),
        ({"attention_config": 3}, "must be a JSON object"),
        ({"max_modl_len": 3}, "did you mean max-model-len"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many', but must be an integer"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5"),
        ({"hf_overrides": 3}, "model.hf_overrides is 3"),
        ({"convert": "reward"}, "use --convert embed"),
        ({"enable_lora": True}, "not possible in this release"),
        ({"tokenizer_mode": "x"}, "tokenizer_mode is 'x'"),
    ],
)
def test_wrong_keywords_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_config_from_kwargs("m", **options)


@pytest.mark.parametrize("name", ["mamba_cache_mode", "disable_cascade_attn"])
def test_rows_27_and_31_keywords_without_effect_warn(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert engine_config_from_kwargs("m", **{name: True}) == engine_config_from_kwargs("m")
    assert f"{name} has no effect" in caplog.text


def test_row_27_the_mode_of_old_is_taken_with_its_value() -> None:
    engine, server = parse("--enable-prefix-caching --mamba-cache-mode align --no-disable-cascade-attn --port 3")
    assert engine.cache.enable_prefix_caching and server.port == 3


# ---- anything at all


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([f"--{flag.name}" for flag in flags().values()] + ["-tp", "-O3", "--config", "--x.y+"]),
            st.sampled_from(["1", "2K", "-1", "auto", "none", "{}", "[1]", '{"a":1}', "a=b", "nan", "", "x", "true"]),
            st.text(max_size=8),
        ),
        max_size=6,
    )
)
def test_any_command_line_gives_a_configuration_or_an_error_of_ours(arguments: list[str]) -> None:
    try:
        engine, server = parse_configs(arguments, environment={})
    except RabbetError as error:
        assert str(error)
    else:
        assert isinstance(engine, EngineConfig) and isinstance(server, ServerConfig)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.dictionaries(st.sampled_from([flag.environment for flag in flags().values()]), st.text(max_size=8), max_size=4)
)
def test_any_environment_gives_a_configuration_or_an_error_of_ours(environment: dict[str, str]) -> None:
    try:
        parse_configs(["m"], environment=environment)
    except RabbetError as error:
        assert str(error)


def test_keys_are_not_shown_with_the_configuration() -> None:
    server = parse("--api-key hunter2")[1]
    assert server.api_key == ["hunter2"] and "hunter2" not in repr(server)


def test_debug_is_seen_on_a_wrong_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_debug(["--nonsense", "--log-level", "debug"])
    assert is_debug(["--log_level=DEBUG"])
    assert not is_debug(["--log-level", "info", "debug"])
    monkeypatch.setenv("RABBET_LOG_LEVEL", "debug")
    assert is_debug([])


def test_every_field_of_the_schema_can_be_found_by_its_place() -> None:
    assert {flag.place for flag in flags().values()} == set(fields())
