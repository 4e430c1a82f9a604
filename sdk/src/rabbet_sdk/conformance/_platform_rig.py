"""What the suite of platforms runs in fresh processes: ``python -m ... JOB PLUGIN FILE ARGUMENTS``; results as JSON in FILE.

``look`` detects, ``hold`` takes the bytes that its standard input says, ``rank`` is one of several that compute sums.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rabbet.contracts.platform import PlatformQuery
from rabbet.registry.loader import load_entry
from rabbet_sdk.conformance.subject import find_entry
from rabbet_sdk.environment import child_environment

__all__ = ["SIZES", "look", "run_ranks", "start"]

_TIMEOUT_S = 90
SIZES = (0, 1, 33, 4099)
"""Elements of the tensors that ranks exchange."""


def start(
    job: str, plugin: str, file: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Begin a job; standard input and output are pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, job, plugin, str(file), *arguments], env=child_environment(**(env or {})), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> str:
    """What it wrote, once it has ended.

    Raises:
        AssertionError: If it does not end.
    """
    try:
        return process.communicate(timeout=_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"no end within {_TIMEOUT_S} s") from error
    finally:
        process.kill()
        process.wait()


@cache
def look(plugin: str, hidden: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """What import and detection do in a fresh process, under the environment ``hidden``; done once."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "facts.json"
        process = start("look", plugin, file, env=dict(hidden))
        output = _end(process)
        last = (output.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"error": last}
        return found | {"output": output}


def run_ranks(plugin: str, directory: Path, size: int, dtypes: list[str]) -> list[str]:
    """What is wrong with the collectives of ``size`` ranks, one process each."""
    ranks = [
        start("rank", plugin, directory / f"rank-{rank}", str(rank), str(size), str(directory / "meet"), *dtypes)
        for rank in range(size)
    ]
    problems: list[str] = []
    try:
        for rank, process in enumerate(ranks):
            output, file = _end(process), directory / f"rank-{rank}"
            problems += json.loads(file.read_text()) if file.exists() else [f"rank {rank} died: {output[-1500:]}"]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return problems


def _state() -> dict[str, Any]:
    """What detection has no business to change."""
    return {
        **{f"${key}": value for key, value in os.environ.items()},
        "the threads": sorted(thread.name for thread in threading.enumerate()),
        "the cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "signal handlers": [
            str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ],
        "the working directory": str(Path.cwd()),
    }


def _look(plugin: type[Any], file: Path) -> None:
    facts: dict[str, Any] = {"error": "", "torch": "torch" in sys.modules}
    before = _state()
    try:
        found = [plugin.detect(), plugin.detect()]
        facts["devices"] = [[asdict(device) for device in devices] for devices in found]
        queries = [PlatformQuery(dtype=dtype) for dtype in ("auto", "float32", "bfloat16", "float16")]
        facts["accepted"] = [query.dtype for query in queries if not plugin.supports(query)]
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything; told by the test
        facts["error"] = f"{type(error).__name__}: {error}"
    after = _state()
    facts["changed"] = [
        f"{key}: {before.get(key)} -> {after.get(key)}" for key in before | after if before.get(key) != after.get(key)
    ]
    facts["cuda"] = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    file.write_text(json.dumps(facts))


def _hold(plugin: type[Any], _file: Path) -> None:
    import torch

    platform, held = plugin(), []
    device = platform.init_device(local_rank=0, world_size=1)
    print("ready", flush=True)
    for line in sys.stdin:
        held.append(torch.ones(int(line), dtype=torch.uint8, device=device))
        platform.synchronize()
        print("done", flush=True)


def _rank(plugin: type[Any], file: Path, rank: str, world_size: str, meet: str, *dtypes: str) -> None:
    import torch

    from rabbet.parallel import init_parallel

    platform, size = plugin(), int(world_size)
    problems: list[str] = []
    device = platform.init_device(local_rank=int(rank), world_size=size)
    state = init_parallel(
        rank=int(rank), world_size=size, init_method=f"file://{meet}", backend=platform.collective_backend()
    )

    def mine(of: int, count: int) -> torch.Tensor:
        """Small whole numbers, whose sums are exact in every type."""
        return torch.arange(count) % 7 + 10 * of

    for dtype in dtypes:
        for count in SIZES:
            tensor = mine(int(rank), count).to(getattr(torch, dtype)).to(device)
            gathered = state.all_gather(tensor).cpu().double()
            summed = state.all_reduce(tensor).cpu().double()
            every = [mine(of, count).double() for of in range(size)]
            for name, got, wanted in (
                ("all_reduce", summed, torch.stack(every).sum(0)), ("all_gather", gathered, torch.cat(every)),
            ):  # fmt: skip
                if got.shape != wanted.shape or not torch.equal(got, wanted):
                    problems.append(f"{name} of {count} x {dtype} on rank {rank} is wrong")
    torch.distributed.destroy_process_group()
    file.write_text(json.dumps(problems))


_JOBS: dict[str, Callable[..., None]] = {"look": _look, "hold": _hold, "rank": _rank}

if __name__ == "__main__":
    _JOBS[sys.argv[1]](load_entry(find_entry(sys.argv[2])), Path(sys.argv[3]), *sys.argv[4:])
