"""Times the workloads of one NVIDIA GPU, offline, with random weights: python gpu_bench.py --model qwen3-0.6b

Prompts are random ids, all requests are there at the start, temperature 0.6, the end token is ignored, so that the number
of tokens is known. A row is the median of its repetitions, after one run that is not counted; ids differ in each, so that
the prefix cache helps only where the workload has a prefix. Times are those of ``LLM.generate`` as its caller sees them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from workloads import GPU_WORKLOADS

from rabbet import LLM, SamplingParams

MODELS = Path(__file__).parent / "models"
ROWS = {
    "qwen3-0.6b": ("nano_256", "single_1024_256", "batch32_decode"),
    "llama3.1-8b": ("mixed_512", "single_1024_256", "batch32_decode", "batch256_decode", "prefill_64x4096", "prefix_256x2048"),
}
FIRST = {"single_1024_256": "single_1024_1", "long_8x30000": "long_8x30000_1"}
"""Workloads whose first tokens are timed by a workload of one token, and taken off."""


class Bench:
    """One engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        options: dict[str, Any] = {"max_model_len": arguments.max_model_len, "gpu_memory_utilization": 0.85}
        if arguments.attention_backend:
            options["attention_backend"] = arguments.attention_backend
        started = time.perf_counter()
        self.llm = LLM(
            str(MODELS / arguments.model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            optimization_level=arguments.O, engine_process=not arguments.profile, **options,
        )  # fmt: skip
        self.start_s = time.perf_counter() - started
        self.vocab_size = json.loads((MODELS / arguments.model / "config.json").read_text())["vocab_size"]
        self.repetition = 0

    def run(self, name: str) -> float:
        """Seconds of one run of a workload."""
        prompts, lengths = GPU_WORKLOADS[name].make(self.vocab_size, self.repetition)
        self.repetition += 1
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        return seconds

    def check(self) -> bool:
        """Whether one greedy request gets the same tokens again: kernels that do not wait for each other would show.

        One request alone, and the first run not compared: other company, or another hit in the prefix cache, are other shapes,
        whose sums are rounded otherwise.
        """
        prompts, _ = GPU_WORKLOADS["batch32_decode"].make(self.vocab_size, 99)
        params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        runs = [self.llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False) for _ in range(4)]
        return len({tuple(run[0].outputs[0].token_ids) for run in runs[1:]}) == 1

    def row(self, name: str, repeats: int) -> dict[str, float]:
        """Medians of one row."""
        self.run(name)
        seconds = statistics.median(self.run(name) for _ in range(repeats))
        prompts, lengths = GPU_WORKLOADS[name].make(self.vocab_size, 0)
        num_prompt, num_output = sum(map(len, prompts)), sum(lengths)
        result = {"s": seconds, "output_tok_s": num_output / seconds, "tok_s": (num_prompt + num_output) / seconds}
        if name in FIRST:
            self.run(FIRST[name])
            first = statistics.median(self.run(FIRST[name]) for _ in range(repeats))
            result |= {"ttft_ms": first * 1e3, "ms_per_tok": (seconds - first) / (max(lengths) - 1) * 1e3}
        return result

    def profile(self, name: str, path: Path) -> None:
        """Times of kernels in one run, and the share of the decode phase in which the GPU idles."""
        from torch.profiler import ProfilerActivity, profile

        self.run(name)
        # Not the host's operations: recording them would slow the host, and the GPU would wait for it.
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run(name)
        kernels = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
        spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
        # The second half of the run: no prompt is left.
        middle = (spans[0][0] + spans[-1][1]) / 2
        spans = [span for span in spans if span[0] > middle]
        idle, end = 0.0, spans[0][0]
        for start, stop in spans:
            idle += max(0.0, start - end)
            end = max(end, stop)
        whole = end - spans[0][0]
        text = profiler.key_averages().table(sort_by="self_device_time_total", row_limit=24, max_name_column_width=60)
        path.write_text(f"idle {idle / whole:.1%} of {whole / 1e3:.1f} ms, {len(spans)} kernels\n{text}\n")
        print(f"{name}: GPU idles {idle / whole:.1%} of the second half ({whole / 1e3:.1f} ms, {len(spans)} kernels)", flush=True)


def main() -> None:
    """Print a line a row, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(ROWS))
    parser.add_argument("--rows", default="", help="comma-separated; default: all of the model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention-backend", default="")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("-O", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="folder for tables of kernels; the engine then runs in this process")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    results: dict[str, Any] = {"startup": {"s": bench.start_s}}
    print(f"{arguments.model}: ready after {bench.start_s:.1f} s", flush=True)
    print("one greedy request gets the same tokens each time:", bench.check(), flush=True)
    for name in arguments.rows.split(",") if arguments.rows else ROWS[arguments.model]:
        if arguments.profile:
            bench.profile(name, arguments.profile / f"{arguments.model}_{name}.txt")
            continue
        results[name] = bench.row(name, arguments.repeats)
        print(f"{name:18s}", {key: round(value, 3) for key, value in results[name].items()}, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({arguments.model: results}, indent=1))
    bench.llm.close()


if __name__ == "__main__":
    main()
