"""Times the kernels on one GPU, in CUDA graphs and with the host's side: python attention.py

bfloat16, 32 query heads, 8 key heads, head size 128, pages of 16 tokens, causal. Random data, fresh for each case; medians.
Bytes are those of the keys and values read once; operations are those of the visible half of the scores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from rabbet_attention_triton.backend import TritonAttention

from rabbet.contracts.attention import AttentionContext, AttentionLayerSpec, AttentionQuery
from rabbet.contracts.batch import AttentionBatch
from rabbet.types.kv import CacheKind, KVCacheSpec

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
CASES = {
    "prefill 4 x 4096": [(4096, 4096)] * 4,
    "prefill 32 x 512": [(512, 512)] * 32,
    "2048 new of 16384": [(2048, 16384)],
    "decode 256 x 1024": [(1, 1024)] * 256,
    "decode 32 x 1024": [(1, 1024)] * 32,
    "decode 1 x 1024": [(1, 1024)],
    "decode 8 x 30000": [(1, 30000)] * 8,
    "64 decodes of 1000 and one prefill of 2048": [(1, 1000)] * 64 + [(2048, 2048)],
}


def build(
    rows: list[tuple[int, int]], dim: int = DIM, tune: Callable[[TritonAttention], None] = lambda _: None
) -> tuple[Callable[[], None], torch.Tensor]:
    """A call of one layer's attention, metadata built once as for all layers of a step, and its output."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    blocks = [-(-length // BLOCK) for _, length in rows]
    order = torch.randperm(sum(blocks), dtype=torch.int32) + 1
    table = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    slots, start = [], 0
    for index, ((count, length), used) in enumerate(zip(rows, blocks, strict=True)):
        table[index, :used] = order[start : start + used]
        at = torch.arange(length - count, length)
        slots.append(table[index, at // BLOCK].long() * BLOCK + at % BLOCK)
        start += used
    counts = torch.tensor([count for count, _ in rows])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    total = int(starts[-1])
    batch = AttentionBatch(
        num_requests=len(rows), num_tokens=total, max_query_len=int(counts.max()), max_seq_len=int(lengths.max()),
        query_start=starts.to(device), query_start_cpu=starts, seq_lens=lengths.to(device), seq_lens_cpu=lengths,
        positions=torch.zeros(total, dtype=torch.int64, device=device), block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
    )  # fmt: skip
    spec = KVCacheSpec(
        kind=CacheKind.FULL_ATTENTION, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=dim, head_dim_v=dim,
        dtype="bfloat16", page_size_bytes=2 * BLOCK * KV_HEADS * dim * 2, window=None,
    )  # fmt: skip
    query = AttentionQuery(
        device_type="cuda", arch="", dtype="bfloat16", kv_cache_dtype="bfloat16", num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=dim, head_dim_v=dim, block_size=BLOCK,
    )  # fmt: skip
    backend = TritonAttention(
        AttentionContext(
            spec=spec, query=query, device=device, max_num_tokens=total, max_num_requests=len(rows),
            max_model_len=int(lengths.max()),
        )
    )
    cache = torch.randn(sum(blocks) + 1, 2, KV_HEADS, BLOCK, dim, device=device).bfloat16()
    q = torch.randn(total, HEADS, dim, device=device).bfloat16()
    k, v = (torch.randn(total, KV_HEADS, dim, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(q)
    layer = AttentionLayerSpec(name="layer", scale=dim**-0.5)
    tune(backend)
    made = backend.build_metadata(batch)
    return (lambda: backend.forward(layer, q, k, v, cache, made, out)), out


def median_us(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median time of one call in microseconds, by events."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def graphed_us(call: Callable[[], None], count: int = 10) -> float:
    """Median time of one call inside a graph of several."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    return median_us(graph.replay) / count


def main() -> None:
    """Print a line a case, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    results = {}
    arguments = parser.parse_args()
    for name, rows in CASES.items():
        call, _ = build(rows)
        call()
        torch.cuda.synchronize()
        alone, graphed = median_us(call), graphed_us(call)
        seen = sum(count * length - count * (count - 1) // 2 for count, length in rows)
        rate = 4 * seen * HEADS * DIM / graphed / 1e6
        speed = sum(length for _, length in rows) * 2 * KV_HEADS * DIM * 2 / graphed / 1e3
        results[name] = {"us": alone, "us_in_graph": graphed, "tflops": rate, "gbytes_s": speed}
        print(f"{name:45s} {alone:9.1f} us, in a graph {graphed:9.1f} us: {rate:6.1f} TFLOP/s, {speed:6.0f} GB/s", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123  a script
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
