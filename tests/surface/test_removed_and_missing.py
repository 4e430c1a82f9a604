"""What users of older engines type: each option that is gone says what replaced it, each that is missing says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rabbet
from rabbet import SamplingParams
from rabbet.config import engine_config_from_kwargs, parse_configs
from rabbet.config.flags import flags
from rabbet.config.removed import NOT_YET, REMOVED
from rabbet.errors import ConfigError, RemovedOptionError

SOURCE = Path(rabbet.__file__).parent


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_configs(["m", *words], environment={})
    return caught.value


@pytest.mark.parametrize("name", ["LLMEngine", "AsyncLLMEngine", "MQLLMEngine"])
def test_there_is_one_engine_and_no_name_of_an_older_one(name: str) -> None:
    assert not hasattr(rabbet, name)
    assert isinstance(refusal("--use-v1"), RemovedOptionError)
    same = parse_configs(["m"], environment={"VLLM_USE_V1": "0", "RABBET_USE_V1": "0"})
    assert same == parse_configs(["m"], environment={})


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_option_is_refused_as_flag_variable_file_and_keyword_with_what_replaced_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    instead = REMOVED[name]
    for words in ([f"--{name}", "1"], [f"--{name}=1"], [f"--{name.replace('-', '_')}", "1"]):
        error = refusal(*words)
        assert isinstance(error, RemovedOptionError) and instead in str(error) and "is gone" in str(error)
    file = tmp_path / "c.yaml"
    file.write_text(f"{name}: 1\n")
    assert instead in str(refusal("--config", str(file)))
    if "." not in name:
        with pytest.raises(RemovedOptionError, match=re.escape(instead)):
            engine_config_from_kwargs("m", **{name.replace("-", "_"): 1})
    variable = "RABBET_" + name.upper().replace("-", "_").replace(".", "__")
    parse_configs(["m"], environment={variable: "1"})
    assert variable in caplog.text and instead in caplog.text


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_an_option_of_the_field_that_this_release_lacks_says_what_is_missing(name: str) -> None:
    for words in ([f"--{name}", "1"], [f"--{name}"], [f"--no-{name}"], [f"--{name}.part=1"]):
        assert NOT_YET[name] in str(refusal(*words))
    with pytest.raises(ConfigError, match=re.escape(NOT_YET[name])):
        engine_config_from_kwargs("m", **{name.replace("-", "_"): True})


def test_what_replaces_a_missing_option_exists() -> None:
    for name, reason in NOT_YET.items():
        for flag in re.findall(r"--([a-z0-9-]+)", reason):
            assert flag in flags(), f"{name} points to --{flag}"


def test_lookahead_slots_swap_space_and_a_setter_of_the_tokenizer_occur_nowhere() -> None:
    assert not hasattr(rabbet.LLM, "set_tokenizer")
    for path in SOURCE.rglob("*.py"):
        if path.name != "removed.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"num_lookahead_slots|swap_space|extra_vocab|set_tokenizer", text), path


@pytest.mark.parametrize("field", ["best_of", "logits_processors", "use_beam_search", "guided_decoding"])
def test_sampling_parameters_have_no_best_of_and_no_processors_of_a_request(field: str) -> None:
    arguments: dict[str, Any] = {field: 2}
    with pytest.raises(TypeError, match=field):
        SamplingParams(**arguments)


def test_convert_reward_becomes_convert_embed() -> None:
    for words in (("--convert", "reward"), ("--convert=reward",), ("--model-config.convert=reward",)):
        error = refusal(*words)
        assert isinstance(error, RemovedOptionError) and "use --convert embed" in str(error)
    assert "'none'" in str(refusal("--convert", "score"))


def test_ray_is_refused_with_the_executors_that_there_are() -> None:
    for words in (("--distributed-executor-backend", "ray"), ("--parallel-config.distributed_executor_backend=ray",)):
        assert "use uni for one rank, mp for several" in str(refusal(*words))
    with pytest.raises(RemovedOptionError, match="mp for several"):
        engine_config_from_kwargs("m", distributed_executor_backend="ray")


@pytest.mark.parametrize("words", [("--runner", "pooling"), ("--convert", "embed"), ("--convert", "classify")])
def test_pooling_is_refused_until_a_plugin_pools(words: tuple[str, str]) -> None:
    assert "need a pooler" in str(refusal(*words))


@pytest.mark.parametrize(
    ("words", "word"), [(("-dp", "2"), "data-parallel-size"), (("-pp", "2"), "pipeline-parallel-size")]
)
def test_copies_and_stages_are_refused(words: tuple[str, str], word: str) -> None:
    assert f"--{word} is 2; this release runs tensor parallelism only" in str(refusal(*words))


@pytest.mark.parametrize("nodes", [("--nnodes", "2"), ("--node-rank", "1"), ("--headless",), ("--master-addr", "x")])
def test_several_nodes_are_refused_with_what_one_machine_offers(nodes: tuple[str, ...]) -> None:
    assert "one machine runs it all; use --tensor-parallel-size" in str(refusal(*nodes))
