"""Sources, spellings and values of options, as the statements about the surface word them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import EngineConfig, engine_config_from_kwargs, parse_configs
from rabbet.config.flags import fields, flags, sections
from rabbet.errors import ConfigError


def engine(*words: str, **environment: str) -> EngineConfig:
    return parse_configs(["m", *words], environment=environment)[0]


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        engine(*words)
    return str(caught.value)


def test_every_section_refuses_unknown_keys_with_what_was_meant() -> None:
    for section, cls in sections().items():
        with pytest.raises((TypeError, ValueError), match="nothing_such"):
            cls(nothing_such=1)
        known = next(place[1] for place in fields() if place[0] == section)
        wrong = known[:-1] + ("x" if known[-1] != "x" else "y")
        flag = f"--{section.replace('_', '-')}-config"
        for words in ((f"{flag}.{wrong}=1",), (flag, f'{{"{wrong}": 1}}')):
            message = refusal(*words)
            assert f"{section} has no option '{wrong}'" in message and "did you mean" in message, message


def test_every_section_takes_json_and_dots_and_json_wins_over_nothing_it_does_not_name() -> None:
    for section in sections():
        flag = f"--{section.replace('_', '-')}-config"
        parse_configs(["m", flag, "{}"], environment={})
        assert "must be a JSON object" in refusal(flag, "3")
    merged = engine("--cache-config", '{"block_size": 32}', "--cache-config.enable_prefix_caching=false")
    assert (merged.cache.block_size, merged.cache.enable_prefix_caching) == (32, False)


@pytest.mark.parametrize("text", ["--attention-config.flash_attn_version=2", "--attention_config.flash-attn-version=2"])
def test_dotted_flags_set_one_field_with_dashes_or_underscores(text: str) -> None:
    assert engine(text).attention.flash_attn_version == 2


def test_a_plus_appends_to_a_list_and_to_nothing_else() -> None:
    words = ("--compilation-config.compile_sizes", "[1]", "--compilation-config.compile_sizes+", "2")
    assert engine(*words).compilation.compile_sizes == [1, 2]
    assert "is no list, so nothing can be appended" in refusal("--attention-config.backend+", "x")


def test_a_key_given_twice_warns_and_the_last_value_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert engine("--max-num-seqs", "3", "--max-num-seqs", "4").scheduler.max_num_seqs == 4
    assert "--max-num-seqs is given more than once; the last value counts" in caplog.text


SIZES = ("max-model-len", "max-num-batched-tokens", "kv-cache-memory-bytes", "max-num-queued-reqs", "max-body-bytes")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("text", "value"), [("64k", 64_000), ("64K", 65_536), ("25.6k", 25_600), ("1.5K", 1536), ("0.5m", 500_000), ("1M", 1 << 20)])  # fmt: skip
def test_sizes_are_powers_of_1000_in_small_and_of_1024_in_large_letters(name: str, text: str, value: int) -> None:
    flag = flags()[name]
    section, field = flag.place

    def read(*words: str) -> Any:
        found, server = parse_configs(["m", *words], environment={})
        return getattr(server if section == "server" else getattr(found, section), field)

    dotted = f"--{section.replace('_', '-')}-config"
    assert read(f"--{name}", text) == read(f"{dotted}.{field}={text}") == value
    assert read(dotted, f'{{"{field}": {text}}}') == value


@pytest.mark.parametrize("text", ["4GB", "4 G", "G", "1e3k", "0x10", "4.G", "1kk"])
def test_what_is_no_size_says_which_letters_may_follow(text: str) -> None:
    assert "k m g t (1000) and K M G T (1024)" in refusal(f"--kv-cache-memory-bytes={text}")


@pytest.mark.parametrize(
    ("flag", "section", "key"),
    [
        ("--speculative-config", "speculative", "max_model_len"),
        ("--kv-transfer-config", "kv_transfer", "kv_connector_extra_config.size"),
        ("--hf-overrides", "model", "max_position_embeddings"),
        ("--plugin-config", "plugin_config", "acme.bytes"),
    ],
)
def test_sizes_are_read_in_every_json_of_the_command_line(flag: str, section: str, key: str) -> None:
    outer, _, inner = key.partition(".")
    document = f'{{"{outer}": {{"{inner}": 2K}}}}' if inner else f'{{"{outer}": 2K}}'
    assert "2048" in repr(getattr(engine(flag, document), section))
    assert "2048" in repr(getattr(engine(f"{flag}.{key}", "2K"), section))


PAIRS = [
    (("--attention-backend", "a"), ("--attention-config.backend=a",)),
    (("--attention-backend", "a"), ("--attention-config", '{"backend": "b"}')),
    (("--spec-method", "a"), ("--speculative-config", '{"method": "a"}')),
    (("--spec-model", "a"), ("--speculative-config.model=a",)),
    (("--spec-tokens", "2"), ("--speculative-config", '{"num_speculative_tokens": 2}')),
    (("--cudagraph-capture-sizes", "1,2"), ("--compilation-config", '{"cudagraph_capture_sizes": [1]}')),
    (("--max-cudagraph-capture-size", "8"), ("--compilation-config.max_cudagraph_capture_size=8",)),
    (("--moe-backend", "a"), ("--kernel-config.moe_backend=a",)),
    (("--linear-backend", "a"), ("--kernel-config", '{"linear_backend": "a"}')),
    (("--scheduler-cls", "fcfs"), ("--scheduling-policy", "fcfs")),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
def test_a_field_by_flag_and_by_its_section_is_an_error_that_names_both(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    for words in ((*one, *other), (*other, *one)):
        message = refusal(*words)
        assert one[0] in message and other[0].partition("=")[0].partition(" ")[0] in message
        assert "set the same option; keep one of them" in message


def test_two_spellings_in_two_sources_are_no_conflict_but_an_order() -> None:
    found = engine("--attention-backend", "flag", RABBET_ATTENTION_CONFIG__BACKEND="variable")
    assert found.attention.backend == "flag"


def test_the_attention_backend_is_set_by_options_and_not_by_another_engines_variable() -> None:
    for name in ("VLLM_ATTENTION_BACKEND", "ATTENTION_BACKEND"):
        assert engine(**{name: "FLASHINFER"}).attention.backend is None
    assert engine("--attention-backend", "auto").attention.backend in (None, "auto")
    assert engine("--attention-config.backend", "x").attention.backend == "x"


def test_kernels_are_chosen_by_flags_with_auto_as_their_default_and_no_variable_of_the_reference() -> None:
    kernel = engine(VLLM_MOE_BACKEND="triton", VLLM_LINEAR_BACKEND="cutlass").kernel
    assert (kernel.moe_backend, kernel.linear_backend) == ("auto", "auto")
    kernel = engine("--kernel-config", '{"moe_backend": "a", "linear_backend": "b"}').kernel
    assert (kernel.moe_backend, kernel.linear_backend) == ("a", "b")


@pytest.mark.parametrize("name", ["compile_ranges", "compile_ranges_endpoints"])
def test_compile_ranges_are_taken_under_both_names(name: str) -> None:
    for words in (("--compilation-config", f'{{"{name}": [64, 1k]}}'), (f"--compilation-config.{name}", "64,1k")):
        assert engine(*words).compilation.compile_ranges == [64, 1000]
    config = engine_config_from_kwargs("m", compilation_config={name: [64]})
    assert config.compilation.compile_ranges == [64]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("0,0", "names a device twice"), ("GPU-a,GPU-a", "names a device twice"), ("0,GPU-a", "mixes numbers and UUIDs"),
        ("0", "names 1 devices, but --tensor-parallel-size needs 2"), ("-1,2", "below 0"), ("", "--device-ids is empty"),
    ],
)  # fmt: skip
def test_device_ids_are_numbers_or_uuids_each_once_and_enough_for_the_ranks(ids: str, message: str) -> None:
    assert message in refusal(f"--device-ids={ids}", "-tp", "2")


def test_placing_ranks_sets_no_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert parse_configs(["m", "--device-ids", "2,3"], environment={})[0].parallel.device_ids == [2, 3]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    source = Path(__file__).parents[2]
    written = 'environ["CUDA_VISIBLE_DEVICES"]'
    assert not [path for path in (source / "core/src").rglob("*.py") if written in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("text", ["auto", "-1", "AUTO"])
def test_the_longest_context_may_be_left_to_the_memory(text: str) -> None:
    assert engine("--max-model-len", text).model.max_model_len in ("auto", -1)
    assert engine(f"--max-model-len={text}").model.max_model_len in ("auto", -1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--enable-auto-tool-choice",), "needs --tool-call-parser"),
        (("--ssl-keyfile", "k"), "--ssl-certfile is missing"), (("--ssl-certfile", "c"), "--ssl-keyfile is missing"),
        (("--kv-transfer-config.kv_connector", "x"), "needs kv_role"), (("--api-key", "a", "--api-key="), "--api-key"),
        (("--speculative-config", '{"tensor_parallel_size": 2}'), "draft_tensor_parallel_size"),
        (("--enable-log-outputs",), "reports of single requests"), (("--gpu-memory-utilization", "0"), "gpu_memory_utilization is 0"),
        (("--gpu-memory-utilization", "nan"), "gpu_memory_utilization is nan"), (("--max-model-len", "0"), "must be positive"),
        (("--shutdown-timeout", "-1"), "shutdown_timeout is -1"), (("--block-size", "0"), "block_size is 0"),
        (("-O4",), "optimization_level is 4"), (("--performance-mode", "fast"), "performance_mode is 'fast'"),
        (("--max-logprobs", "-2"), "max_logprobs is -2"), (("--port", "65536"), "port is 65536"),
        (("--config", "a.yaml", "--config", "b.yaml"), "--config is given twice"), (("--seed", "x"), "must be an integer"),
    ],
    ids=str,
)  # fmt: skip
def test_combinations_and_values_that_are_rejected_name_the_option(words: tuple[str, ...], message: str) -> None:
    assert message in refusal(*words)


def test_defaults_are_those_that_users_of_the_field_know() -> None:
    found, server = parse_configs(["m"], environment={})
    assert (found.model.dtype, found.model.runner, found.model.convert, found.model.seed) == ("auto", "auto", "auto", 0)
    assert (found.model.max_logprobs, found.model.logprobs_mode) == (20, "raw_logprobs")
    assert (found.model.generation_config, found.load.load_format) == ("auto", "auto")
    assert (found.cache.enable_prefix_caching, found.cache.prefix_caching_hash_algo) == (True, "sha256")
    assert (found.scheduler.scheduling_policy, found.scheduler.long_prefill_token_threshold) == ("fcfs", 0)
    assert (found.optimization_level, found.performance_mode, found.shutdown_timeout) == (2, "balanced", 0)
    assert (server.port, server.allowed_origins, server.response_role) == (8000, [], "assistant")
    assert not server.enable_prompt_tokens_details and not server.enable_auto_tool_choice


def test_shorthands_mean_their_options() -> None:
    found = engine("-tp", "2", "-q", "fp8", "-O1", "-cc.compile_sizes=8", "-ac.backend=x", "-sc", '{"method": "y"}')
    assert (found.parallel.tensor_parallel_size, found.model.quantization, found.optimization_level) == (2, "fp8", 1)
    assert found.compilation.compile_sizes == [8] and found.attention.backend == "x"
    assert found.speculative is not None and found.speculative.method == "y"


REFUSED_AS_A_WHOLE = {"speculative", "kv_transfer", "kv_events", "structured_outputs"}
"""Sections in which anything that is set is refused at the start."""

ONE_VALUE = {("cache", "prefix_caching_hash_algo")}
"""Fields that have one value, so that nobody needs to read them."""


def test_every_option_is_read_by_something_so_that_none_is_ignored() -> None:
    core = Path(__file__).parents[2] / "core/src/rabbet"
    declared = {"schema.py", "flags.py", "removed.py"}
    text = "\n".join(path.read_text(encoding="utf-8") for path in core.rglob("*.py") if path.name not in declared)
    for place in fields():
        if place[0] in REFUSED_AS_A_WHOLE or place in ONE_VALUE or place == ("additional_config",):
            continue
        # enforce_eager is obeyed by a platform without graphs by itself; a runner with graphs reads it.
        if place == ("model", "enforce_eager"):
            continue
        assert re.search(rf"\.{place[-1]}\b|[\"']{place[-1]}[\"']", text), f"nobody reads {'.'.join(place)}"
