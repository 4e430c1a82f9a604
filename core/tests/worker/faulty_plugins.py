"""A model of one table whose ranks fail when they are asked to. A one-file plugin, so that worker processes find it.

``fault`` of config.json says what rank 1 does while it loads, the first token of a prompt what it does in a step.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

from rabbet.contracts import register_attention_backend, register_model, register_platform
from rabbet.contracts.attention import AttentionBackend, KVLayout
from rabbet.contracts.model import Model
from rabbet.contracts.platform import BatchDefaults, DeviceInfo, MemoryInfo, Platform
from rabbet.errors import WeightsError
from rabbet.layers import Attention

VOCAB_SIZE = 32
NAN, RAISE, EXIT, HANG = 28, 29, 30, 31
EXIT_STATUS = 7


def hang() -> None:
    """Wait for signals, none of which ends this process."""
    while True:
        signal.pause()


@register_platform("faulty")
class FaultyPlatform(Platform):
    """The processor, with a gigabyte."""

    device_type = "cpu"

    @classmethod
    def detect(cls) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(index=0, name="faulty", arch="faulty", total_memory_bytes=1 << 30),)

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    @classmethod
    def batch_defaults(cls, *, is_server: bool, world_size: int) -> BatchDefaults:
        return BatchDefaults(max_num_batched_tokens=64, max_num_seqs=4, memory_fraction=0.5)

    def init_device(self, *, local_rank: int, world_size: int) -> torch.device:
        torch.set_num_threads(1)
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total_bytes=1 << 30, free_bytes=1 << 29, used_by_process_bytes=1 << 20)


@register_attention_backend("faulty")
class FaultyAttention(AttentionBackend):
    """Adds nothing."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        from rabbet.contracts import Refusal

        asked = {"window": query.window, "soft cap": query.has_soft_cap, "sinks": query.has_sinks}
        return tuple(Refusal(code="NO", message=f"no {name}") for name, value in asked.items() if value)

    @classmethod
    def kv_layout(cls, spec: Any) -> KVLayout:
        return KVLayout(name="flat-1", axes=("slot",), shape=(spec.block_size,), dtype="float32")

    def build_metadata(self, batch: Any) -> Any:
        return batch

    def forward(
        self, layer: Any, q_THD: Any, k_TKD: Any, v_TKE: Any, kv_cache: Any, metadata: Any, out_THE: Any
    ) -> None:
        out_THE.zero_()


@register_model("FaultyForCausalLM")
class FaultyModel(nn.Module, Model):
    """The next token is the last one plus one: every rank holds half of the sum."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    def __init__(self, *, config: Any, context: Any) -> None:
        super().__init__()
        self.context = context
        layer = getattr(config, "layer", {})
        if "sinks" in layer:
            layer = {"sinks": torch.zeros(1)}
        self.attention = Attention(
            num_heads=1, num_kv_heads=1, head_dim=4, scale=1.0, context=context, prefix="layers.0.attn", **layer
        )
        self.head = nn.Parameter(torch.zeros(1))
        if context.parallel.tp_rank == 1:
            self._fail_to_load(getattr(config, "fault", ""))

    @staticmethod
    def _fail_to_load(fault: str) -> None:
        if fault == "weights":
            raise WeightsError("shard 2 of 2 is truncated")
        if fault == "raise":
            raise RuntimeError("no such kernel")
        if fault == "exit":
            os._exit(EXIT_STATUS)
        if fault == "hang":
            hang()

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> Any:
        if self.context.parallel.tp_rank == 1:
            first = int(input_ids[0])
            if first == RAISE:
                raise RuntimeError("a kernel failed")
            if first == EXIT:
                os._exit(EXIT_STATUS)
            if first == HANG:
                hang()
        zeros = torch.zeros(len(input_ids), 4)
        self.attention(zeros, zeros, zeros)
        return self.context.parallel.all_reduce((input_ids + 1).float() / self.context.parallel.tp_size).unsqueeze(1)

    def compute_logits(self, hidden_TN: Any) -> Any:
        next_ids = hidden_TN[:, 0].round().long()
        logits = torch.nn.functional.one_hot(next_ids % VOCAB_SIZE, VOCAB_SIZE).float() * 9
        logits[next_ids == NAN + 1] = float("nan")
        return logits

    @classmethod
    def weight_rules(cls, config: Any) -> Any:
        raise AssertionError("dummy weights only")
