"""What is decided for real models on this machine, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.config.resolved import load_hf_config, resolved_from_bytes, resolved_to_bytes
from rabbet.errors import ConfigError, PluginPolicyError, PluginRefusedError, UnknownPluginError, WeightsError
from rabbet.weights.dummy import DummyFormat

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "dtype": "float32", "eos_token_id": [2, 3],
}  # fmt: skip


def model(directory: Path, **changes: Any) -> str:
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(directory)


def run(directory: Path, *, server: bool = False, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    options.setdefault("load_format", "dummy")
    return resolve(engine_config_from_kwargs(model(directory, **(changes or {})), **options), is_server=server)


def test_everything_is_decided_and_survives_the_way_to_another_process(tmp_path: Path) -> None:
    resolved = run(tmp_path)
    kinds = [decision.kind for decision in resolved.composition.decisions]
    assert kinds == ["platform", "weights", "model", "attention", "linear", "executor", "scheduler"]
    assert (resolved.dtype, resolved.kv_cache_dtype, resolved.max_model_len) == ("float32", "float32", 256)
    assert resolved.eos_token_ids == (2, 3) and resolved.is_async and resolved.is_chunked_prefill
    again = resolved_from_bytes(resolved_to_bytes(resolved))
    assert again == resolved
    again.composition.verify()


def test_row_24_budgets_depend_on_use_context_and_mode(tmp_path: Path) -> None:
    long = {"max_position_embeddings": 8192}
    server, offline = run(tmp_path, server=True, changes=long), run(tmp_path, changes=long)
    assert (server.max_num_batched_tokens, server.max_num_seqs) == (2048, 128)
    assert (offline.max_num_batched_tokens, offline.max_num_seqs) == (4096, 256)
    assert run(tmp_path, changes=long, performance_mode="throughput").max_num_batched_tokens == 8192
    assert run(tmp_path, max_num_seqs=2).max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "the model was made for 256"), ({"block_size": 8}, "multiples of"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "less than --max-num-seqs 8"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "chunked prefill is off"),
        ({"kv_cache_dtype": "bfloat16"}, "the model runs in float32"), ({"tensor_parallel_size": 3}, "3 ranks|fits neither"),
        ({"spec_method": "ngram"}, "proposer"),
        ({"speculative_config": {"method": "custom_class", "model": "a.b:C"}}, "runs no proposer plugins yet"),
        ({"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_both"}}, "kv_connector"),
        ({"plugin_config": {"nothing": {"a": 1}}}, "nothing"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_the_reason(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownPluginError, PluginRefusedError), match=message):
        run(tmp_path, **options)


def test_a_type_may_be_given_by_its_other_name(tmp_path: Path) -> None:
    assert run(tmp_path, dtype="float").dtype == "float32"
    with pytest.raises(PluginRefusedError, match="float16"):
        run(tmp_path, dtype="half")


def test_row_2_unknown_backend_lists_names_and_means_something(tmp_path: Path) -> None:
    with pytest.raises(UnknownPluginError, match="did you mean cpu.*installed: cpu"):
        run(tmp_path, attention_backend="cpuu")


def test_row_49_quantization_is_checked_against_the_checkpoint(tmp_path: Path) -> None:
    changes = {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ConfigError, match="the checkpoint was quantised with 'awq'"):
        run(tmp_path, changes=changes, quantization="fp8")
    with pytest.raises(UnknownPluginError, match="needs the quantization method 'awq'.*pip install"):
        run(tmp_path, changes=changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "acme4"}}, "needs quantization 'acme4': pip install acme-quant"),
        ({"architectures": ["AcmeForCausalLM"]}, "needs model 'AcmeForCausalLM': pip install acme-model"),
    ],
)
def test_missing_parts_are_told_from_config_json_before_any_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    """No weights are there, and of a hub name only config.json was asked for: so nothing else was looked at."""
    import huggingface_hub

    asked = []

    def download(name: str, *, allow_patterns: list[str], **_options: Any) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    known = {("quantization", "acme4"): "acme-quant", ("model", "AcmeForCausalLM"): "acme-model"}
    monkeypatch.setattr(
        "rabbet.registry.catalog.install_hint", lambda kind, name, *_: f"pip install {known[kind, name]}"
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    directory = model(tmp_path, **changes)
    for name in (directory, "acme/model-4bit"):
        config = engine_config_from_kwargs(name, model_impl="native", load_format="safetensors")
        with pytest.raises(UnknownPluginError, match=words):
            resolve(config, is_server=True)
    assert asked == [["config.json"]]


def test_missing_model_and_missing_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither a directory"):
        resolve(engine_config_from_kwargs(str(tmp_path / "none")), is_server=True)
    with pytest.raises(WeightsError, match=r"config\.json|neither a directory"):
        resolve(engine_config_from_kwargs(str(tmp_path)), is_server=True)
    with pytest.raises(ConfigError, match="no list of architectures"):
        run(tmp_path, changes={"architectures": None})


def test_weights_format_that_fails_is_passed_over_by_auto_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_query: Any) -> bool:
        raise OSError("libmissing.so.1 is not there")

    monkeypatch.setattr(DummyFormat, "matches", fail)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    resolved = run(tmp_path, load_format="auto")
    assert resolved.composition.get("weights").name == "safetensors"
    # That this test changed core is told too, by another logger.
    records = [record for record in caplog.records if record.name != "rabbet.registry.tamper"]
    warnings = [record.getMessage() for record in records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "weights/dummy" in warnings[0] and "libmissing.so.1" in warnings[0]
    with pytest.raises(PluginPolicyError, match="weights/dummy.*--plugins-strict"):
        run(tmp_path, load_format="auto", plugins_strict=True, device="cpu")


@pytest.mark.parametrize(
    ("name", "load_format", "hint"),
    [
        ("tiny-strorm", "auto", "; did you mean 'tiny-storm'?"),
        ("tiny-strorm", "safetensors", ""),
        ("tiny-storm", "auto", ""),
        ("entirely/else", "auto", ""),
    ],
)
def test_a_mistyped_short_name_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, load_format: str, hint: str
) -> None:
    """``tiny-storm`` is what a format provides that only says so in its manifest."""
    package, info = tmp_path / "acme_storm", tmp_path / "acme_storm-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    table = 'kind = "weights"\nname = "storm"\ncontract = ">=1.0,<2"\n[provides.claims]\nmodels = ["tiny-storm"]\n'
    (package / "rabbet.toml").write_text(f"schema = 1\n[[provides]]\n{table}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-storm\nVersion: 1.0\n")
    points = "[rabbet.weights]\nstorm = acme_storm:Storm\n[rabbet.manifest]\nacme-storm = acme_storm:rabbet.toml\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = engine_config_from_kwargs(name, load_format=load_format, offline=True, download_dir=str(tmp_path / "hub"))
    with pytest.raises(WeightsError) as caught:
        resolve(config, is_server=True)
    text = str(caught.value)
    assert text.endswith(hint) and name in text and ("did you mean" in text) == bool(hint)


COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "num_experts", "eos_token_id")  # fmt: skip


@pytest.mark.parametrize("value", ["x", [[1]], {"a": 1}, 1.5, 1e30, -5, True, 1 << 40, "4"], ids=str)
@pytest.mark.parametrize("key", COUNTS)
def test_a_size_of_config_json_is_an_integer_in_its_range(tmp_path: Path, key: str, value: Any) -> None:
    shown = value[0] if isinstance(value, list) and key == "eos_token_id" else value
    message = (
        rf"^config.json: {key} is {re.escape(repr(shown))}, but must be an integer from (-1|0|1) to \d+; --hf-overrides"
    )
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, changes={key: value})
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, hf_overrides={key: value})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_what_a_model_cannot_be_without_is_not_zero(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key} is 0, but must be an integer from 1"):
        run(tmp_path, changes={key: 0})


def test_so_many_layers_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000, but must be an integer from 1 to 1000"):
        run(tmp_path, changes={"num_hidden_layers": 10**6})


@pytest.mark.parametrize("value", [3, "x", [1], True], ids=str)
def test_a_text_config_is_an_object(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="config.json: text_config is .*, but must be an object"):
        run(tmp_path, changes={"text_config": value})


def test_no_end_token_may_be_written_in_several_ways(tmp_path: Path) -> None:
    for value in (None, -1, [], [-1]):
        assert run(tmp_path, changes={"eos_token_id": value}).eos_token_ids == ()


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": "x"}, {"intermediate_size": "x"}, {"layer_types": 3}, {"layer_types": ["x"]}, {"dtype": "nope"}, {"rope_parameters": []}],
    ids=str,
)  # fmt: skip
def test_what_the_library_refuses_of_config_json_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    files = run(tmp_path).files
    with pytest.raises(ConfigError, match="^config.json, with --hf-overrides over it, is wrong: ") as caught:
        load_hf_config(files, changes)
    assert "\n" not in str(caught.value)


def test_a_model_type_that_the_library_does_not_know_is_taken_as_it_is(tmp_path: Path) -> None:
    config = load_hf_config(run(tmp_path).files, {"model_type": "mystery", "depth": 3})
    assert (config.model_type, config.depth, config.hidden_size) == ("mystery", 3, 64)
