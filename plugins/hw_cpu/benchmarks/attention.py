#!/usr/bin/env python3
"""Compares paged attention with torch's own on contiguous tensors, one layer of a 135M model; prints least times and ratios."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import step
import torch
import torch.nn.functional as F

CASES = (
    ("prompt 2000", [2000], [0]),
    ("prompt 512", [512], [0]),
    ("500 after 1500", [500], [1500]),
    ("decode 1 x 200", [1], [200]),
    ("decode 1 x 2000", [1], [2000]),
    ("decode 32 x 200", [1] * 32, [200] * 32),
)


def least(work: Callable[[], object], seconds: float) -> float:
    """The least time of a call in microseconds. Threads of the other side are given time to fall asleep first."""
    time.sleep(0.02)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


def contiguous(queries: list[int], contexts: list[int], dtype: torch.dtype) -> Callable[[], object]:
    """torch's attention over tensors that need no pages, one call for requests of one length."""
    size, length = len(queries), queries[0] + contexts[0]
    q = torch.randn(size, step.HEADS, queries[0], step.DIM).to(dtype)
    k, v = (torch.randn(size, step.KV_HEADS, length, step.DIM).to(dtype) for _ in range(2))
    if queries[0] == 1 or contexts[0] == 0:
        is_causal = queries[0] > 1
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    mask = torch.ones(queries[0], length, dtype=torch.bool).tril(contexts[0])
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    dtype = getattr(torch, parser.parse_args().dtype)
    step.PLATFORM.init_device(local_rank=0, world_size=1)
    torch.set_num_threads(len(step.os.sched_getaffinity(0)))
    step.LAYERS = 1
    layers = step.Layers(dtype, 32 * 64)
    print(f"{'case':>16} {'torch us':>10} {'own us':>10} {'ratio':>6}")
    for name, queries, contexts in CASES:
        batch = step.batch_of(queries, contexts)
        metadata = layers.attention.build_metadata(batch)
        heads = torch.randn(batch.num_tokens, step.HEADS + 2 * step.KV_HEADS, step.DIM).to(dtype)
        q, k, v = heads.split((step.HEADS, step.KV_HEADS, step.KV_HEADS), dim=1)
        out = torch.empty(batch.num_tokens, step.HEADS, step.DIM, dtype=dtype)
        arguments = (layers.specs[0], q, k, v, layers.caches[0], metadata, out)
        plain = least(contiguous(queries, contexts, dtype), 0.5)
        own = least(lambda arguments=arguments: layers.attention.forward(*arguments), 0.5)  # type: ignore[misc]
        print(f"{name:>16} {plain:>10.0f} {own:>10.0f} {own / plain:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
