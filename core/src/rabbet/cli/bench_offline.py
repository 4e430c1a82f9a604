"""The offline benchmarks: random token ids in, a fixed number of tokens out."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rabbet.config.load import parse_configs
from rabbet.errors import ConfigError, RabbetError, shorten
from rabbet.front.llm import LLM
from rabbet.front.outputs import RequestOutput
from rabbet.types.sampling import SamplingParams

__all__ = ["BenchError", "Shape", "run_latency", "run_throughput"]

_MAX_TOKENS = 10**8


@dataclass(frozen=True, slots=True)
class Shape:
    """How many prompts of which lengths."""

    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    prefix_len: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse what takes hours to draw, before a model is loaded.

        Raises:
            ConfigError: With the number of tokens and the limit.
        """
        total = self.num_prompts * (self.prefix_len + self.input_len[1] + self.output_len[1])
        if total > _MAX_TOKENS:
            raise ConfigError(
                f"{shorten(self.num_prompts)} prompts are {shorten(total)} tokens with their outputs, more than "
                f"{_MAX_TOKENS}; lower their number or --input-len, --output-len, --prefix-len",
                field="num_prompts",
            )

    def draw(self, vocab_size: int, repetition: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
        """Prompts and parameters; each repetition has other ids, so that a prefix cache gives no help."""
        rng = random.Random(self.seed)
        # Control tokens lie at either end; a tiny vocabulary has none.
        low, high = (10, vocab_size - 300) if vocab_size > 400 else (0, vocab_size - 1)
        head = [rng.randint(low, high) for _ in range(self.prefix_len)]
        prompts = [
            head + [rng.randint(low, high) for _ in range(rng.randint(*self.input_len))]
            for _ in range(self.num_prompts)
        ]
        shifted = [[(token + 7 * repetition) % max(high, 1) for token in prompt] for prompt in prompts]
        lengths = [rng.randint(*self.output_len) for _ in range(self.num_prompts)]
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        return [{"prompt_token_ids": ids} for ids in shifted], params


class BenchError(RabbetError):
    """The engine did not do the work that was to be measured."""


def _open(arguments: Sequence[str]) -> LLM:
    engine, _ = parse_configs(list(arguments))
    if not engine.model.model:
        raise ConfigError("no model was given: rabbet bench throughput|latency MODEL [OPTIONS]", field="model")
    return LLM.from_config(engine)


def _check(outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> int:
    """The number of tokens that came out.

    Raises:
        BenchError: If a request failed, or gave fewer tokens than were asked for.
    """
    for number, (output, wanted) in enumerate(zip(outputs, params, strict=True)):
        completion = output.outputs[0]
        if completion.error is not None:
            raise BenchError(f"request {number} failed: {completion.error}")
        if len(completion.token_ids) != wanted.max_tokens:
            raise BenchError(
                f"request {number} gave {len(completion.token_ids)} tokens, not {wanted.max_tokens}; raise --max-model-len"
            )
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def run_throughput(arguments: Sequence[str], shape: Shape, *, repeat: int) -> dict[str, Any]:
    """Median over ``repeat`` runs after a short one that is not counted."""
    started = time.monotonic()
    with _open(arguments) as llm:
        ready_s = time.monotonic() - started
        model, vocab_size = llm.config.model.model, llm.model_info.vocab_size
        warm_up = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        llm.generate({"prompt_token_ids": [1, 2, 3]}, warm_up, use_tqdm=False)
        seconds, num_input, num_output = [], 0, 0
        for repetition in range(repeat):
            prompts, params = shape.draw(vocab_size, repetition)
            began = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.monotonic() - began)
            num_input = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
            num_output = _check(outputs, params)
    median = statistics.median(seconds)
    return {
        "model": model,
        "seconds": median,
        "seconds_min": min(seconds),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "tokens_per_s": (num_input + num_output) / median,
        "output_tokens_per_s": num_output / median,
        "requests_per_s": shape.num_prompts / median,
        "ready_s": ready_s,
        "peak_memory_mib": _peak_memory_mib(),
        "input_len": ":".join(map(str, shape.input_len)),
        "output_len": ":".join(map(str, shape.output_len)),
        "prefix_len": shape.prefix_len,
        "num_prompts": shape.num_prompts,
        "seed": shape.seed,
        "repeat": repeat,
    }


def run_latency(arguments: Sequence[str], shape: Shape, *, repeat: int) -> dict[str, Any]:
    """Medians of the time to the first token and of the time a token after it."""
    started = time.monotonic()
    with _open(arguments) as llm:
        ready_s = time.monotonic() - started
        model, vocab_size = llm.config.model.model, llm.model_info.vocab_size
        first, per_token = [], []
        for repetition in range(repeat + 1):
            prompts, params = shape.draw(vocab_size, repetition)
            began = time.time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            _check(outputs, params)
            if repetition == 0:
                # The first one warms up.
                continue
            starts = [output.metrics.first_token_time_s or began for output in outputs if output.metrics]
            ends = [output.metrics.finished_time_s or began for output in outputs if output.metrics]
            first.append(max(starts) - began)
            steps = max(shape.output_len[1] - 1, 1)
            per_token.append((max(ends) - max(starts)) / steps)
    return {
        "model": model,
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
