"""The offline benchmarks: random token ids in, a fixed number of tokens out."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rabbet.config.load import parse_configs
from rabbet.front.llm import LLM
from rabbet.types.sampling import SamplingParams

__all__ = ["Shape", "run_latency", "run_throughput"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many prompts of which lengths."""

    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    prefix_len: int
    seed: int

    def draw(self, vocab_size: int, repetition: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
        """Prompts and parameters; each repetition has other ids, so that a prefix cache gives no help."""
        rng = random.Random(self.seed)
        low, high = 10, vocab_size - 300
        head = [rng.randint(low, high) for _ in range(self.prefix_len)]
        prompts = [
            head + [rng.randint(low, high) for _ in range(rng.randint(*self.input_len))]
            for _ in range(self.num_prompts)
        ]
        shifted = [[(token + 7 * repetition) % high for token in prompt] for prompt in prompts]
        lengths = [rng.randint(*self.output_len) for _ in range(self.num_prompts)]
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        return [{"prompt_token_ids": ids} for ids in shifted], params


def _open(arguments: Sequence[str]) -> LLM:
    engine, _ = parse_configs(list(arguments))
    return LLM.from_config(engine)


def run_throughput(arguments: Sequence[str], shape: Shape, *, repeat: int) -> dict[str, Any]:
    """Median over ``repeat`` runs after a short one that is not counted."""
    started = time.monotonic()
    with _open(arguments) as llm:
        ready_s = time.monotonic() - started
        vocab_size = llm.model_info.vocab_size
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        seconds, num_input, num_output = [], 0, 0
        for repetition in range(repeat):
            prompts, params = shape.draw(vocab_size, repetition)
            began = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.monotonic() - began)
            num_input = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
            num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
            if num_output != sum(item.max_tokens or 0 for item in params):
                raise RuntimeError(f"{num_output} tokens came out, which is not what was asked for")
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "seconds_min": min(seconds),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "tokens_per_s": (num_input + num_output) / median,
        "output_tokens_per_s": num_output / median,
        "requests_per_s": shape.num_prompts / median,
        "ready_s": ready_s,
        "peak_memory_mib": _peak_memory_mib(),
        **{f"shape_{key}": str(value) for key, value in asdict(shape).items()},
    }


def run_latency(arguments: Sequence[str], shape: Shape, *, repeat: int) -> dict[str, Any]:
    """Medians of the time to the first token and of the time a token after it."""
    started = time.monotonic()
    with _open(arguments) as llm:
        ready_s = time.monotonic() - started
        vocab_size = llm.model_info.vocab_size
        first, per_token = [], []
        for repetition in range(repeat + 1):
            prompts, params = shape.draw(vocab_size, repetition)
            began = time.time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if repetition == 0:
                continue
            starts = [output.metrics.first_token_time_s or began for output in outputs if output.metrics]
            ends = [output.metrics.finished_time_s or began for output in outputs if output.metrics]
            first.append(max(starts) - began)
            steps = max(shape.output_len[1] - 1, 1)
            per_token.append((max(ends) - max(starts)) / steps)
    return {
        "time_to_first_token_ms": 1000 * statistics.median(first),
        "time_per_token_ms": 1000 * statistics.median(per_token),
        "time_per_token_min_ms": 1000 * min(per_token),
        "batch_size": shape.num_prompts,
        "input_len": shape.input_len[0],
        "output_len": shape.output_len[0],
        "ready_s": ready_s,
        "peak_memory_mib": _peak_memory_mib(),
    }


def _peak_memory_mib() -> float:
    """Peak of the largest process of ours that has ended: the engine's."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
