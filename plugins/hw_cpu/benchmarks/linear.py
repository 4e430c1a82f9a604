#!/usr/bin/env python3
"""Compares the bfloat16 linear kernel with torch on the shapes of a 135M model, side by side; prints medians and ratios."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rabbet_hw_cpu import native
from rabbet_hw_cpu.linear import CpuLinear

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
ROWS = (1, 8, 64, 512, 2048)
ROUNDS = 9


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Time of one call."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def main() -> None:
    """Print a table."""
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    native.start(num_threads=len(cores), cores=cores)
    backend = CpuLinear()
    print(f"{'inputs':>6} {'outputs':>7} {'rows':>5} {'torch us':>10} {'tiles us':>10} {'ratio':>6}")
    for inputs, outputs in SHAPES:
        # Several copies, so that the weights come from memory as they do in a model.
        count = max(2, (64 << 20) // (2 * inputs * outputs))
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(count)]
        packed = [backend.pack(weight) for weight in weights]
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            plain, own = [], []
            for i in range(ROUNDS):
                plain.append(seconds(F.linear, x, weights[i % count]))
                own.append(seconds(backend.apply, x, packed[i % count]))
            medians = statistics.median(plain) * 1e6, statistics.median(own) * 1e6
            print(
                f"{inputs:>6} {outputs:>7} {rows:>5} {medians[0]:>10.0f} {medians[1]:>10.0f} {medians[1] / medians[0]:>6.2f}"
            )


if __name__ == "__main__":
    main()
