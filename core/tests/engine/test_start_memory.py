"""Starts that ask for more memory than there is: refused before, or told after, with the options to lower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rabbet._util.memory import lacks_memory
from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.contracts.executor import MemoryReport
from rabbet.engine.process import build
from rabbet.engine.sizing import check_steps, fit_context
from rabbet.errors import ConfigError, EngineDeadError
from rabbet.types.kv import KVCacheSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 30, "rms_norm_eps": 1e-5,
}  # fmt: skip


def config_of(folder: Path, **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return engine_config_from_kwargs(str(folder), **{"load_format": "dummy", "device": "cpu", **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 10**12}, "--max-num-seqs (now 1000000000000)"),
        ({"max_num_batched_tokens": 10**15}, f"--max-num-batched-tokens (now {128 << 30})"),
        ({"max_num_seqs": 10**12, "max_model_len": 1}, "--max-model-len (now 1)"),
        ({"hf_overrides": {"vocab_size": (1 << 31) - 1}}, "a step needs at least"),
        ({"max_num_seqs": 10**9, "num_gpu_blocks_override": 7}, "or --num-gpu-blocks-override"),
    ],
    ids=str,
)
def test_a_step_larger_than_the_device_is_refused_before_anything_is_allocated(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match="a step needs at least .* GiB, but the device has .* GiB; lower") as caught:
        check_steps(resolve(config_of(tmp_path, **options), is_server=True))
    assert words in str(caught.value)


def test_usual_steps_are_not_refused(tmp_path: Path) -> None:
    check_steps(resolve(config_of(tmp_path, max_num_batched_tokens=65536, max_num_seqs=1024), is_server=True))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "(MemoryError:)"),
        (RuntimeError("[enforce fail]\nDefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
        (EngineDeadError("rank 0 failed: MemoryError: Unable to allocate 24.5 GiB"), "rank 0 failed"),
    ],
    ids=["python", "torch", "another process"],
)
def test_memory_that_runs_out_is_told_with_the_phase_and_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def engine(_resolved: Any, *, on_phase: Any) -> Any:
        on_phase("allocating the KV cache and warming up")
        raise error

    monkeypatch.setattr("rabbet.engine.process.EngineCore", engine)
    with pytest.raises(ConfigError, match="memory ran out while allocating the KV cache and warming up") as caught:
        build(config_of(tmp_path, max_num_seqs=3, max_model_len=8), is_server=True, send=lambda _message: None)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert "--max-num-seqs (now 3)" in str(caught.value) and caught.value.__cause__ is error


def test_other_failures_of_a_start_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(_resolved: Any, *, on_phase: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr("rabbet.engine.process.EngineCore", engine)
    with pytest.raises(KeyError):
        build(config_of(tmp_path), is_server=True, send=lambda _message: None)


def test_a_kv_cache_larger_than_the_device_is_refused(tmp_path: Path) -> None:
    report = MemoryReport(total_bytes=100, weights_bytes=1, activation_bytes=1, available_kv_bytes=101)
    resolved = resolve(config_of(tmp_path, kv_cache_memory_bytes=101, max_model_len=8), is_server=True)
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes is 101, but the device has 100 bytes"):
        fit_context(resolved, {}, 5, report)


@pytest.mark.parametrize(("activation", "is_lowered"), [(10 << 20, True), (0, False)])
def test_a_step_that_leaves_no_room_for_the_cache_is_told(tmp_path: Path, activation: int, is_lowered: bool) -> None:
    report = MemoryReport(total_bytes=1 << 30, weights_bytes=1, activation_bytes=activation, available_kv_bytes=1 << 20)
    resolved = resolve(config_of(tmp_path, max_num_batched_tokens=4096, max_model_len=8192), is_server=True)
    page: dict[str, Any] = {
        "num_kv_heads": 2,
        "head_dim": 16,
        "head_dim_v": 16,
        "dtype": "float32",
        "page_size_bytes": 4096,
    }
    specs = {"0": KVCacheSpec(block_size=16, **page)}
    with pytest.raises(ConfigError, match="Raise --gpu-memory-utilization") as caught:
        fit_context(resolved, specs, 2, report)
    told = "Lower --max-num-batched-tokens (now 4096; such a step takes 10.000 MiB)" in str(caught.value)
    assert told == is_lowered


def test_a_lack_of_memory_is_known_by_its_signs() -> None:
    with pytest.raises(MemoryError) as caught:
        np.zeros((1 << 30, 1 << 20), np.int64)
    assert lacks_memory(caught.value)
    assert lacks_memory(type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"))
    assert not lacks_memory(RuntimeError("shapes differ")) and not lacks_memory(KeyError("memory"))
