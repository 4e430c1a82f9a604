"""Plugins that break their contract in a real engine: the start ends with their name, and no request ends the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rabbet import LLM, SamplingParams
from rabbet.errors import PluginError, RequestFailedError
from rabbet.registry.onefile import stage_file

PLUGIN = Path(__file__).with_name("odd_plugins.py")
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 64, "kv_cache_memory_bytes": "1M", "enforce_eager": True,
    "use_tqdm_on_load": False, "plugin": [str(PLUGIN)], "max_num_batched_tokens": 64, "max_num_seqs": 4,
}  # fmt: skip

BROKEN = {
    "model raises": "model/OddForCausalLM of (this process) failed in __init__(): KeyError: 'no such layer'",
    "hidden none": "model/OddForCausalLM of (this process) is broken: forward() returned None, but must return Tensor",
    "hidden short": "model/OddForCausalLM is broken: forward() returned shape (63, 64), but must return (64,)",
    "hidden flat": "model/OddForCausalLM is broken: forward() returned shape (4096,), but must return (64,)",
    "logits none": "model/OddForCausalLM of (this process) is broken: compute_logits() returned None, but must return",
    "logits list": "model/OddForCausalLM of (this process) is broken: compute_logits() returned [[",
    "logits narrow": "model/OddForCausalLM is broken: compute_logits() returned shape (4, 3), but must return (4, ",
    "logits empty": "model/OddForCausalLM is broken: compute_logits() returned shape (0, ",
    "device none": "platform/odd of (this process) is broken: init_device() returned None, but must return device",
    "device text": "platform/odd of (this process) is broken: init_device() returned 'cpu', but must return device",
    "memory none": "platform/odd of (this process) is broken: memory() returned None, but must return MemoryInfo",
    "memory bytes": "platform/odd of (this process) is broken: memory() returned ",
    "ops number": "platform/odd of (this process) is broken: layer_ops() returned 3, but must return",
    "configuration none": "quantization/odd of (this process) is broken: from_config() returned None, but must return",
    "configuration class": "quantization/odd of (this process) is broken: from_config() returned <class ",
    "method number": "OddQuantization.get_quant_method() returned 3 for model.",
    "method class": "OddQuantization.get_quant_method() returned <class ",
}


def start(model: Path, **options: Any) -> LLM:
    changes = {"architectures": ["OddForCausalLM"]}
    return LLM(str(model), device="odd", quantization="odd", hf_overrides=changes, **OPTIONS, **options)


@pytest.mark.parametrize("how", BROKEN)
def test_a_start_with_a_broken_plugin_ends_with_its_name_and_method(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(sys.modules[stage_file(PLUGIN)], "HOW", how)
    with pytest.raises(PluginError) as caught:
        start(tiny_model, engine_process=False)
    told = str(caught.value)
    assert told.startswith(BROKEN[how]) and "\n" not in told and len(told) < 400
    assert caught.value.kind == BROKEN[how].partition("/")[0] or how.startswith("method")


def test_the_same_plugins_without_faults_serve(tiny_model: Path) -> None:
    with start(tiny_model, engine_process=False) as llm:
        output = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert output[0].outputs[0].finish_reason == "length"


def test_no_request_ends_an_engine_through_a_logits_processor(tiny_model: Path) -> None:
    """The processor is in a file of its own, so the front process has to find it as the engine process does."""
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    reasons = {
        "leave": "failed: SystemExit", "leave at add": "failed: SystemExit", "raise": "failed: RuntimeError",
        "none": "failed: TypeError", "list": "failed: TypeError", "narrow": "failed: TypeError", "nan": "left no token",
    }  # fmt: skip
    with LLM(str(tiny_model), device="cpu", logits_processors=["odd"], **OPTIONS) as llm:
        expected = llm.generate([[7, 8]], plain, use_tqdm=False)[0].outputs[0].token_ids
        for how, reason in reasons.items():
            bad = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args={"how": how})
            # Alone in its step: what a processor breaks there, it breaks for all rows that it sees.
            with pytest.raises(RequestFailedError, match=f"the logits processor odd {reason}"):
                llm.generate([[1, 2]], bad, use_tqdm=False)
            assert llm.generate([[7, 8]], plain, use_tqdm=False)[0].outputs[0].token_ids == expected
