#!/usr/bin/env python3
"""Rabbet beside transformers' generate on the same bfloat16 weights, in one run; prints medians and ratios.

    python tests/perf/cpu_bench.py MODEL_DIR [--repeat 3]

Prompts are random token ids, other ones in each repetition; every output has a fixed length, which is checked.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """One row: prompts of one length, outputs of one length."""

    name: str
    count: int
    input_len: int
    output_len: int

    def prompts(self, vocab_size: int, repetition: int) -> list[list[int]]:
        """Random ids."""
        rng = random.Random(f"{self.name}-{repetition}")
        return [[rng.randint(10, vocab_size - 300) for _ in range(self.input_len)] for _ in range(self.count)]


WORKLOADS = (
    Workload("single_128_128", 1, 128, 128),
    Workload("single_128_1", 1, 128, 1),
    Workload("batch8_decode", 8, 128, 64),
    Workload("prefill_2000", 1, 2000, 1),
)


def medians(run: Callable[[list[list[int]], int], None], vocab_size: int, repeat: int) -> dict[str, float]:
    """Median seconds of each workload after a run that is not counted."""
    found = {}
    for workload in WORKLOADS:
        seconds = []
        for repetition in range(repeat + 1):
            prompts = workload.prompts(vocab_size, repetition)
            started = time.perf_counter()
            run(prompts, workload.output_len)
            seconds.append(time.perf_counter() - started)
        found[workload.name] = statistics.median(seconds[1:])
    return found


def with_rabbet(model: str, repeat: int) -> dict[str, float]:
    """Through ``LLM``, engine process included."""
    from rabbet import LLM, SamplingParams

    with LLM(model, dtype="bfloat16", max_model_len=4096, kv_cache_memory_bytes="1G") as llm:

        def run(prompts: list[list[int]], length: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == length for output in outputs)

        return medians(run, llm.model_info.vocab_size, repeat)


def with_transformers(model: str, repeat: int) -> dict[str, float]:
    """``generate`` with its own cache and attention."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(prompts: list[list[int]], length: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = loaded.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=length, max_new_tokens=length, do_sample=False
            )
        assert output.shape[1] == ids.shape[1] + length

    return medians(run, loaded.config.vocab_size, repeat)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    own = with_rabbet(arguments.model, arguments.repeat)
    other = with_transformers(arguments.model, arguments.repeat)
    print(f"cores {len(os.sched_getaffinity(0))}; medians of {arguments.repeat}, seconds")
    print(f"{'workload':<16} {'rabbet':>8} {'transformers':>13} {'ratio':>6}")
    for name in own:
        print(f"{name:<16} {own[name]:>8.3f} {other[name]:>13.3f} {own[name] / other[name]:>6.2f}")


if __name__ == "__main__":
    main()
