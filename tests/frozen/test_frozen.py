"""Plugins built when their contract was current go on working."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rabbet.contracts import KINDS
from rabbet.contracts.attention import AttentionContext, AttentionLayerSpec, AttentionQuery
from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.logits_processor import LogitsBatch, LogitsProcessorContext
from rabbet.contracts.observability import RequestRecord
from rabbet.contracts.proposer import DraftBatch, ProposerContext, ProposerQuery
from rabbet.contracts.quantization import QuantizationQuery
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.registry import Catalog, HookBus, PluginPolicy, compose, select
from rabbet.types.kv import KVCacheSpec
from rabbet.types.sampling import SamplingParams

HERE = Path(__file__).parent
WHEELS = sorted((HERE / "wheels").glob("*.whl"))
_spec = importlib.util.spec_from_file_location(
    "frozen_registry_conftest", HERE.parents[1] / "core/tests/registry/conftest.py"
)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
forget_staged = _module.forget_staged
CPU = torch.device("cpu")


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Catalog]]:
    """Puts the wheel of a kind and version on the path, as an installer would."""

    def place(name: str) -> Catalog:
        (wheel,) = (path for path in WHEELS if path.name.startswith(f"frozen_{name}-"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        return Catalog.scan(PluginPolicy(), path=[str(tmp_path)])

    yield place
    for name in [name for name in sys.modules if name.startswith("frozen_") and name.endswith("_0")]:
        del sys.modules[name]


def chosen(catalog: Catalog, kind: str, query: Any = None) -> Any:
    (name,) = catalog.names(kind)
    return compose([select(catalog, kind, name=name, query=query)])


def test_no_wheel_was_ever_changed_and_each_previous_version_has_one() -> None:
    kept = dict(reversed(line.split()) for line in (HERE / "SHA256SUMS").read_text().splitlines())  # type: ignore[misc]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in WHEELS} == kept
    names = {path.name.partition("-")[0] for path in WHEELS}
    for kind in KINDS.values():
        for version in kind.previous:
            assert f"frozen_{kind.name}_{version.replace('.', '_')}" in names


def test_attention_1_0_attends(unpack: Callable[[str], Catalog]) -> None:
    query = AttentionQuery(
        device_type="cpu", arch="any", dtype="float32", kv_cache_dtype="float32", num_heads=2, num_kv_heads=1, head_dim=4,
        head_dim_v=4, block_size=4,
    )  # fmt: skip
    spec = KVCacheSpec(block_size=4, num_kv_heads=1, head_dim=4, head_dim_v=4, dtype="float32", page_size_bytes=128)
    composition = chosen(unpack("attention_1_0"), "attention", query)
    layout = composition.load("attention").kv_layout(spec)
    context = AttentionContext(
        spec=spec, query=query, device=CPU, max_num_tokens=8, max_num_requests=1, max_model_len=8
    )
    backend = composition.build("attention", context)
    cache = torch.full((4, *layout.shape), float("nan"))
    starts, lengths = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    batch = AttentionBatch(
        num_requests=1, num_tokens=6, max_query_len=6, max_seq_len=6, query_start=starts, query_start_cpu=starts,
        seq_lens=lengths, seq_lens_cpu=lengths, positions=torch.arange(6), block_table=torch.tensor([[2, 1]], dtype=torch.int32),
        slot_mapping=torch.tensor([8, 9, 10, 11, 4, 5]),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 4, generator=generator) for heads in (2, 1, 1))
    out = torch.full((6, 2, 4), float("nan"))
    backend.forward(AttentionLayerSpec(name="l", scale=0.5), q, k, v, cache, backend.build_metadata(batch), out)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.expand(6, 2, 4).transpose(0, 1),
        v.expand(6, 2, 4).transpose(0, 1),
        is_causal=True,
        scale=0.5,
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_quantization_1_0_computes(unpack: Callable[[str], Catalog]) -> None:
    query = QuantizationQuery(device_type="cpu", arch="any", dtype="float32")
    composition = chosen(unpack("quantization_1_0"), "quantization", query)
    layer = torch.nn.Module()
    method = composition.load("quantization").from_config({}).get_quant_method(layer, "layers.0.proj")
    method.create_weights(
        layer, input_size_per_partition=3, output_partition_sizes=[2], input_size=3, output_size=2,
        params_dtype=torch.float32, weight_loader=None,
    )  # fmt: skip
    layer.weight.data.copy_(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    method.process_weights_after_loading(layer)
    assert method.apply(layer, torch.ones(1, 3), torch.tensor([1.0, 0])).tolist() == [[7.0, 15.0]]


def test_proposer_1_0_proposes(unpack: Callable[[str], Catalog]) -> None:
    query = ProposerQuery(
        device_type="cpu",
        arch="any",
        dtype="float32",
        target_architecture="X",
        vocab_size=9,
        num_speculative_tokens=2,
        is_async=True,
    )
    context = ProposerContext(
        query=query, device=CPU, max_num_requests=2, max_model_len=8, target=None, build_context=None
    )
    made = chosen(unpack("proposer_1_0"), "proposer", query).build("proposer", context)
    batch = DraftBatch(request_ids=["a", "b"], token_ids=[[1, 2], [3]], num_tokens=[2, 1], max_drafts=[2, 0])
    assert made.propose(batch).token_ids == [[2, 2], []]


def test_logits_processor_1_0_runs_through_the_adapter(
    unpack: Callable[[str], Catalog], caplog: pytest.LogCaptureFixture
) -> None:
    composition = chosen(unpack("logits_processor_1_0"), "logits_processor")
    assert composition.decisions[0].contract == "1.0"
    made = composition.build("logits_processor", LogitsProcessorContext(device=CPU, max_num_requests=2, vocab_size=4))
    made.add(1, SamplingParams(), [0])
    batch = LogitsBatch(logits_BV=torch.zeros(2, 4), slots=[0, 1], output_token_ids=[[2], [3]])
    assert made.apply(batch).tolist() == [[0.0] * 4, [0.0, 0.0, 0.0, float("-inf")]]
    made.remove(1)
    assert "docs/migrations/logits_processor-2.md" in caplog.text


def test_hooks_1_0_are_told(unpack: Callable[[str], Catalog]) -> None:
    bus = HookBus.load(unpack("hooks_1_0"), PluginPolicy())
    assert bus.call("bug_report_sections") == [{"frozen": "still here"}]


def test_stat_logger_1_0_counts(unpack: Callable[[str], Catalog], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    made = chosen(unpack("stat_logger_1_0"), "stat_logger").build("stat_logger", SimpleNamespace())
    numbers = {
        "num_running": 3,
        "num_waiting": 0,
        "kv_usage": 0.0,
        "prefix_queries": 0,
        "prefix_hits": 0,
        "num_preemptions": 0,
    }
    made.on_stats(SchedulerStats(**numbers, num_prompt_tokens=0, num_generation_tokens=0))
    made.on_request(
        RequestRecord(
            request_id="r", model="m", num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=5, finish_reason="stop",
            queued_s=0.0, time_to_first_token_s=None, total_s=1.0,
        )
    )  # fmt: skip
    made.close()
    assert (made.running, made.tokens) == (3, 5) and not caplog.text
