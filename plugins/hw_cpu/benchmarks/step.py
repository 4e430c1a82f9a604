#!/usr/bin/env python3
"""Times one step of a 135M model made of these kernels alone: decodes, a batch, a prompt; prints the least of many."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from rabbet_hw_cpu.attention import CpuAttention
from rabbet_hw_cpu.linear import CpuLinear
from rabbet_hw_cpu.platform import CpuPlatform

from rabbet.contracts.attention import AttentionContext, AttentionLayerSpec, AttentionQuery
from rabbet.contracts.batch import AttentionBatch
from rabbet.layers.reference import TorchLayerOps
from rabbet.types.kv import KVCacheSpec

HIDDEN, HEADS, KV_HEADS, DIM, FEED, VOCAB, LAYERS = 576, 9, 3, 64, 1536, 49152, 30
BLOCK = 32


def batch_of(queries: list[int], contexts: list[int]) -> AttentionBatch:
    """Requests with so many new tokens each after so many old ones, in blocks of their own."""
    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    width = -(-max(lengths) // BLOCK)
    table = torch.arange(len(queries) * width, dtype=torch.int32).view(len(queries), width) + 1
    starts, slots, positions = [0], [], []
    for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        starts.append(starts[-1] + count)
        for position in range(context, context + count):
            positions.append(position)
            slots.append(int(table[row, position // BLOCK]) * BLOCK + position % BLOCK)
    start, length = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    return AttentionBatch(
        num_requests=len(queries), num_tokens=starts[-1], max_query_len=max(queries), max_seq_len=max(lengths),
        query_start=start, query_start_cpu=start, seq_lens=length, seq_lens_cpu=length, positions=torch.tensor(positions),
        block_table=table, slot_mapping=torch.tensor(slots),
    )  # fmt: skip


class Layers:
    """Random weights, caches, and one step over them."""

    def __init__(self, dtype: torch.dtype, blocks: int) -> None:
        name = str(dtype).removeprefix("torch.")
        self.dtype, self.linear = dtype, CpuLinear()
        self.ops = PLATFORM.layer_ops() or TorchLayerOps()
        spec = KVCacheSpec(
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            head_dim_v=DIM,
            dtype=name,
            page_size_bytes=0,
            window=None,
        )
        query = AttentionQuery(
            device_type="cpu", arch="", dtype=name, kv_cache_dtype=name, num_heads=HEADS, num_kv_heads=KV_HEADS,
            head_dim=DIM, head_dim_v=DIM, block_size=BLOCK,
        )  # fmt: skip
        self.attention = CpuAttention(
            AttentionContext(
                spec=spec,
                query=query,
                device=torch.device("cpu"),
                max_num_tokens=4096,
                max_num_requests=64,
                max_model_len=8192,
            )
        )
        shape = (blocks, *CpuAttention.kv_layout(spec).shape)
        self.caches = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]
        self.specs = [AttentionLayerSpec(name=str(i), scale=DIM**-0.5) for i in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, dtype=dtype)

        def weight(outputs: int, inputs: int) -> Any:
            return self.linear.pack((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype))

        shapes = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * FEED, HIDDEN), (HIDDEN, FEED)
        self.weights = [[weight(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.head = weight(VOCAB, HIDDEN)
        angles = torch.rand(8192, DIM // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.seconds: dict[tuple[str, int], float] = {}
        self.count = 0

    def call(self, name: str, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The work; keeps the least time of each call of a step, since a step as a whole seldom has the cores to itself."""
        started = time.perf_counter()
        result = work(*arguments, **named)
        self.count += 1
        key = name, self.count
        self.seconds[key] = min(self.seconds.get(key, 1e9), time.perf_counter() - started)
        return result

    def gated(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """The fused product, or its parts."""
        fused = self.linear.apply_gated_silu(x, packed)
        return self.ops.silu_and_mul(self.linear.apply(x, packed)) if fused is None else fused

    def step(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """All layers and the head for the last token of each request."""
        tokens = x.shape[0]
        step = self.attention.build_metadata(batch)
        residual, x = x, self.ops.rms_norm(x, self.norm, 1e-5)
        for index in range(LAYERS):
            qkv, out, gate_up, down = self.weights[index]
            heads = self.call("qkv", self.linear.apply, x, qkv).view(tokens, HEADS + 2 * KV_HEADS, DIM)
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            q, k = self.call("rotary", self.ops.rotary, q, k, batch.positions, self.cos_sin, is_neox=True)
            attended = torch.empty(tokens, HEADS, DIM, dtype=self.dtype)
            self.call(
                "attention", self.attention.forward, self.specs[index], q, k, v, self.caches[index], step, attended
            )
            x = self.call("out", self.linear.apply, attended.view(tokens, -1), out)
            x, residual = self.call("norm", self.ops.add_rms_norm, x, residual, self.norm, 1e-5)
            x = self.call("gate_up", self.gated, x, gate_up)
            x = self.call("down", self.linear.apply, x, down)
            x, residual = self.call("norm", self.ops.add_rms_norm, x, residual, self.norm, 1e-5)
        return self.call("head", self.linear.apply, x[(batch.query_start[1:] - 1).long()], self.head)


PLATFORM = CpuPlatform()


def measure(layers: Layers, name: str, queries: list[int], contexts: list[int], seconds: float) -> None:
    """Repeat a step for so long; print the least time of it, and the sums of the least times of its calls."""
    batch = batch_of(queries, contexts)
    x = torch.randn(batch.num_tokens, HIDDEN).to(layers.dtype)
    least, runs = 1e9, 0
    layers.seconds.clear()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or runs < 3:
        layers.count = 0
        started = time.perf_counter()
        layers.step(x.clone(), batch)
        least, runs = min(least, time.perf_counter() - started), runs + 1
    parts: dict[str, float] = defaultdict(float)
    for (key, _), value in layers.seconds.items():
        parts[key] += value
    split = " ".join(f"{key} {value * 1e3:.2f}" for key, value in parts.items())
    print(f"{name:>12}: step {least * 1e3:7.2f} ms, calls {sum(parts.values()) * 1e3:7.2f} ms | {split}", flush=True)


def main() -> None:
    """Print one line a workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    PLATFORM.init_device(local_rank=0, world_size=1)
    print(f"cores {sorted(os.sched_getaffinity(0))}, {CpuPlatform.detect()[0].arch}, {options.dtype}")
    layers = Layers(getattr(torch, options.dtype), 8 * 64 + 2)
    measure(layers, "decode 1", [1], [192], options.seconds)
    measure(layers, "decode 8", [1] * 8, [192] * 8, options.seconds)
    measure(layers, "decode 32", [1] * 32, [192] * 32, options.seconds)
    measure(layers, "chunk 128", [128], [0], options.seconds)
    measure(layers, "prompt 2000", [2000], [0], options.seconds)


if __name__ == "__main__":
    main()
