#!/usr/bin/env python3
"""Compares the linear kernels with torch on the shapes of a 135M model, side by side; prints the least times and ratios."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rabbet_hw_cpu import native
from rabbet_hw_cpu.linear import CpuLinear

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
ROWS = (1, 4, 8, 32, 64, 512, 2048)
SWEEP_BYTES = 80 << 20
"""Weights that are gone over in turn, so that they come from memory as they do in a model."""


def least(work: Callable[[Any], object], weights: Sequence[Any], rounds: int) -> float:
    """The least time of a call in microseconds. Threads of the other side are given time to fall asleep first."""
    time.sleep(0.02)
    best = float("inf")
    for _ in range(rounds):
        for weight in weights:
            started = time.perf_counter()
            work(weight)
            best = min(best, time.perf_counter() - started)
    return best * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    dtype = getattr(torch, parser.parse_args().dtype)
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    native.start(num_threads=len(cores), cores=cores)
    backend = CpuLinear()
    print(f"{'inputs':>6} {'outputs':>7} {'rows':>5} {'torch us':>10} {'own us':>10} {'ratio':>6}")
    for inputs, outputs in SHAPES:
        count = max(2, SWEEP_BYTES // (dtype.itemsize * inputs * outputs))
        weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
        packed = [backend.pack(weight) for weight in weights]
        for rows in ROWS:
            if rows * outputs > 1 << 23:
                continue
            x = torch.randn(rows, inputs).to(dtype)
            used, rounds = (count, 6) if rows <= 64 else (2, 6)
            plain = least(lambda weight, x=x: F.linear(x, weight), weights[:used], rounds)  # type: ignore[misc]
            own = least(lambda weight, x=x: backend.apply(x, weight), packed[:used], rounds)  # type: ignore[misc]
            print(f"{inputs:>6} {outputs:>7} {rows:>5} {plain:>10.0f} {own:>10.0f} {own / plain:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
