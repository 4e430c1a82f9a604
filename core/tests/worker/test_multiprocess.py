"""Ranks in processes: what they compute, and that no way in which one of them ends leaves anyone waiting."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.errors import EngineDeadError, WeightsError
from rabbet.kv.groups import build_cache_config
from rabbet.types.plan import NewRequest, StepPlan
from rabbet.types.sampling import SamplingParams
from rabbet.worker.multiprocess import MultiprocessExecutor

PLUGIN = Path(__file__).parent / "faulty_plugins.py"
VOCAB_SIZE, RAISE, EXIT, HANG, EXIT_STATUS = 32, 29, 30, 31, 7
WAIT_S = 60.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MultiprocessExecutor]]:
    made: list[MultiprocessExecutor] = []

    def make(**changes: Any) -> MultiprocessExecutor:
        values = {
            "architectures": ["FaultyForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 4, "num_attention_heads": 1,
            "max_position_embeddings": 64, "dtype": "float32", **changes,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = engine_config_from_kwargs(
            str(tmp_path), device="faulty", attention_backend="faulty", load_format="dummy", plugin=[str(PLUGIN)],
            linear_backend="torch", tensor_parallel_size=2, kv_cache_memory_bytes=1 << 20,
        )  # fmt: skip
        made.append(MultiprocessExecutor(resolve(config, is_server=False)))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()


def ready(executor: MultiprocessExecutor) -> MultiprocessExecutor:
    specs = executor.load()
    executor.initialize_cache(build_cache_config(specs, executor.profile_memory().available_kv_bytes, None))
    return executor


def plan(step_id: int, *token_ids: int) -> StepPlan:
    name = f"r{step_id}"
    request = NewRequest(
        request_id=name, token_ids=list(token_ids), num_prompt_tokens=len(token_ids), num_computed_tokens=0,
        block_ids=[[step_id]], sampling=SamplingParams(temperature=0.0), seed=0,
    )  # fmt: skip
    gone = [f"r{step_id - 2}"]
    return StepPlan(
        step_id=step_id,
        new_requests=[request],
        num_scheduled_tokens={name: len(token_ids)},
        finished_request_ids=gone,
    )


def assert_gone(executor: MultiprocessExecutor) -> None:
    executor.shutdown()
    assert all(process.returncode is not None for process in executor._processes)
    assert not executor._directory.path.exists()
    with pytest.raises(EngineDeadError):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        executor.execute(plan(99, 1))


def test_ranks_compute_together_and_end_by_themselves(start: Callable[..., MultiprocessExecutor]) -> None:
    executor = ready(start())
    futures = [executor.execute(plan(step, step, step + 1)) for step in range(1, 6)]
    results = [future.result(WAIT_S) for future in futures]
    assert [result.sampled_token_ids for result in results] == [{f"r{step}": [step + 2]} for step in range(1, 6)]
    executor.check_health()
    late = executor.execute(plan(6, 1))
    late.cancel()
    executor.shutdown()
    assert [process.returncode for process in executor._processes] == [0, 0]
    with pytest.raises(CancelledError):
        late.result(WAIT_S)
    assert_gone(executor)


def test_nobody_can_speak_to_ranks_that_work(start: Callable[..., MultiprocessExecutor]) -> None:
    """Their sockets have no name any more, and what they say to one another stays on the loopback interface."""
    executor = ready(start())
    assert [path.name for path in executor._directory.path.iterdir() if path.is_socket()] == []
    for process in executor._processes:
        assert listening(process.pid) <= {"127.0.0.1"}
    assert executor.execute(plan(1, 3)).result(WAIT_S).sampled_token_ids == {"r1": [4]}


def listening(pid: int) -> set[str]:
    """IPv4 addresses at which a process listens; ``?`` for one of IPv6."""
    inodes = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(socket.inet_ntoa(bytes.fromhex(words[1][:8])[::-1]) if table == "tcp" else "?")
    return found


def test_rank_that_raises_in_a_step_fails_it_and_the_executor(
    start: Callable[..., MultiprocessExecutor], capfd: pytest.CaptureFixture[str]
) -> None:
    executor = ready(start())
    health: list[str] = []

    def look(_: Any) -> None:
        try:
            executor.check_health()
        except EngineDeadError as error:
            health.append(str(error))

    first = executor.execute(plan(1, RAISE, 2))
    first.add_done_callback(look)
    second = executor.execute(plan(2, 2))
    with pytest.raises(EngineDeadError, match="rank 1 failed: RuntimeError: a kernel failed"):
        first.result(WAIT_S)
    with pytest.raises(EngineDeadError, match="rank 1 failed"):
        second.result(WAIT_S)
    assert health == ["rank 1 failed: RuntimeError: a kernel failed"], "dead before its failure is known"
    assert_gone(executor)
    log = capfd.readouterr().err
    assert re.search(r"(?m)^\d\d:\d\d:\d\d ERROR rank 1: failed$", log), "a line has its time and its rank"


def test_rank_that_ends_in_a_step_or_is_killed_between_steps(start: Callable[..., MultiprocessExecutor]) -> None:
    executor = ready(start())
    step = executor.execute(plan(1, EXIT))
    with pytest.raises(EngineDeadError):
        step.result(WAIT_S)
    assert_gone(executor)

    executor = ready(start())
    os.kill(executor._processes[1].pid, signal.SIGKILL)
    executor._processes[1].wait(WAIT_S)
    # Whether or not the death is known already: sending must not wait for a rank that is gone.
    with pytest.raises(EngineDeadError):
        executor.execute(plan(1, 1)).result(WAIT_S)
    assert_gone(executor)


def test_rank_that_hangs_in_a_step_is_named(
    start: Callable[..., MultiprocessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiprocessExecutor, "step_limit_s", 0.5)
    executor = ready(start())
    with pytest.raises(EngineDeadError, match=r"no answer of rank .*1 within 0\.5 s of a step"):
        executor.execute(plan(1, HANG)).result(WAIT_S)
    assert_gone(executor)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("weights", WeightsError, "shard 2 of 2 is truncated"),
        ("exit", EngineDeadError, f"the process of rank 1 ended with status {EXIT_STATUS}"),
    ],
)
def test_rank_that_fails_to_load_gives_its_reason(
    start: Callable[..., MultiprocessExecutor], fault: str, error: type[Exception], message: str
) -> None:
    executor = start(fault=fault)
    with pytest.raises(error, match=message):
        executor.load()
    assert_gone(executor)


def test_rank_that_never_comes_up_does_not_stop_a_shutdown(start: Callable[..., MultiprocessExecutor]) -> None:
    executor = start(fault="hang")
    os.kill(executor._processes[0].pid, signal.SIGSTOP)
    loading = executor._command(executor_load())
    assert not loading.done()
    os.kill(executor._processes[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 ended with status -9"):
        loading.result(WAIT_S)
    assert_gone(executor)


def executor_load() -> Any:
    from rabbet.worker.messages import Load

    return Load()


def test_ranks_import_nothing_from_the_current_directory(
    start: Callable[..., MultiprocessExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('shadowed by the current directory')")
    monkeypatch.chdir(tmp_path)
    executor = ready(start())
    assert executor.execute(plan(1, 3)).result(WAIT_S).sampled_token_ids
    assert_gone(executor)


def test_ranks_outlive_the_thread_that_made_their_executor(start: Callable[..., MultiprocessExecutor]) -> None:
    made: list[MultiprocessExecutor] = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    executor = ready(made[0])
    assert executor.execute(plan(1, 3)).result(WAIT_S).sampled_token_ids == {"r1": [4]}
    executor.shutdown()
    assert [process.returncode for process in executor._processes] == [0, 0]


def test_a_rank_that_cannot_be_started_leaves_nothing(
    start: Callable[..., MultiprocessExecutor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    scratch = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(sys, "executable", str(scratch / "python"))
    with pytest.raises(FileNotFoundError):
        start()
    assert list(scratch.iterdir()) == []
