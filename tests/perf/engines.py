"""One engine as a process that runs workloads and prints what it measured, a JSON object a line.

    python tests/perf/engines.py ENGINE MODEL [--workloads A,B] [--repeat 3] [--max-seconds 90] [--option NAME=VALUE]

ENGINE is rabbet, vllm, transformers, transformers-cb (its continuous batching) or llamacpp (``--option command=JSON`` is
the command of llama-server with ``{port}``). Runs in an environment where that engine is installed; nothing else is needed.
Lines: ``{"event": "first_token"}`` when the engine has started and answered one request, then for each workload
``{"event": "workload", "name": ..., "seconds": [...]}``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workloads import WORKLOADS

Run = Callable[[list[list[int]], list[int]], list[int]]
"""Generates as many tokens as asked for each prompt; returns how many came."""

MAX_MODEL_LEN = 4096
KV_BYTES = 2**30


@contextlib.contextmanager
def rabbet(model: str, options: dict[str, str]) -> Iterator[tuple[Run, int]]:
    """The offline API: engine process and messages included."""
    from rabbet import LLM, SamplingParams

    with LLM(model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=KV_BYTES, **options) as llm:

        def run(prompts: list[list[int]], lengths: list[int]) -> list[int]:
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return [len(output.outputs[0].token_ids) for output in outputs]

        yield run, llm.model_info.vocab_size


@contextlib.contextmanager
def vllm(model: str, options: dict[str, str]) -> Iterator[tuple[Run, int]]:
    """Its offline API at its defaults."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=MAX_MODEL_LEN, **options)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    yield run, llm.llm_engine.model_config.get_vocab_size()


def _load_transformers(model: str):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()


@contextlib.contextmanager
def transformers(model: str, options: dict[str, str]) -> Iterator[tuple[Run, int]]:
    """``generate`` on static batches of up to 8 requests, padded on the left, sorted by length."""
    import torch

    loaded = _load_transformers(model)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[int]:
        counts = [0] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), lengths[index]))
        for start in range(0, len(order), 8):
            batch = order[start : start + 8]
            width = max(len(prompts[index]) for index in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
                mask[row, width - len(prompts[index]) :] = 1
            longest = max(lengths[index] for index in batch)
            with torch.inference_mode():
                output = loaded.generate(
                    ids, attention_mask=mask, min_new_tokens=longest, max_new_tokens=longest, do_sample=False
                )
            assert output.shape[1] == width + longest
            for index in batch:
                counts[index] = lengths[index]  # the rest of the longest answer is thrown away
        return counts

    yield run, loaded.config.vocab_size


@contextlib.contextmanager
def transformers_cb(model: str, options: dict[str, str]) -> Iterator[tuple[Run, int]]:
    """Its continuous batching, which has one limit of tokens for all requests of a manager."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    loaded = _load_transformers(model)
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=128)
    batching = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=2048)
    with loaded.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching
    ) as manager:

        def run(prompts: list[list[int]], lengths: list[int]) -> list[int]:
            counts = dict.fromkeys(range(len(prompts)), 0)
            names = {
                manager.add_request(ids, max_new_tokens=length): index
                for index, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
            }
            while names:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("transformers' continuous batching gave no result in 60 s")
                if result.is_finished():
                    counts[names.pop(result.request_id)] = len(result.generated_tokens)
            return list(counts.values())

        yield run, loaded.config.vocab_size


@contextlib.contextmanager
def llamacpp(model: str, options: dict[str, str]) -> Iterator[tuple[Run, int]]:
    """llama-server with 16 slots over its own HTTP route, since it has no offline API with batching."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [part.format(port=port) for part in json.loads(options["command"])]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def one(work: tuple[list[int], int]) -> int:
        body = {"prompt": work[0], "n_predict": work[1], "ignore_eos": True, "temperature": 0, "cache_prompt": True}
        request = urllib.request.Request(
            f"{base}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with opener.open(request, timeout=600) as answer:
            return int(json.load(answer)["tokens_predicted"])

    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                opener.open(f"{base}/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("llama-server did not start") from None
                time.sleep(0.02)
        with ThreadPoolExecutor(64) as pool:
            yield lambda prompts, lengths: list(pool.map(one, zip(prompts, lengths, strict=True))), 49152
    finally:
        server.terminate()
        server.wait(30)


ENGINES = {
    "rabbet": rabbet,
    "vllm": vllm,
    "transformers": transformers,
    "transformers-cb": transformers_cb,
    "llamacpp": llamacpp,
}


def main() -> None:
    """Run the workloads; the first run of each is not counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, default=90, help="no further repetition of a workload after that")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.option)
    # The engines print as they like; what is measured goes to the stream that was standard output.
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with ENGINES[arguments.engine](arguments.model, options) as (run, vocab_size):
        prompts, lengths = WORKLOADS["single_128_1"].make(vocab_size, 100)
        assert run(prompts, lengths) == lengths
        print(json.dumps({"event": "first_token"}), file=report)
        for name in arguments.workloads.split(","):
            seconds: list[float] = []
            for repetition in range(arguments.repeat + 1):
                prompts, lengths = WORKLOADS[name].make(vocab_size, repetition)
                started = time.perf_counter()
                counts = run(prompts, lengths)
                seconds.append(time.perf_counter() - started)
                if counts != lengths:
                    raise RuntimeError(f"{name}: {counts} tokens came, not {lengths}")
                if len(seconds) > 1 and sum(seconds) + seconds[-1] > arguments.max_seconds:
                    break
            print(json.dumps({"event": "workload", "name": name, "seconds": seconds[1:]}), file=report)


if __name__ == "__main__":
    main()
