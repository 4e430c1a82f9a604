"""An engine in a process and one in a thread behave alike; nothing outlives anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet.config.load import engine_config_from_kwargs
from rabbet.contracts.registration import Registration
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine import process_client
from rabbet.engine.client import EngineClient, make_client
from rabbet.engine.messages import Abort
from rabbet.engine.process import EXIT_CONFIG, EXIT_DEAD
from rabbet.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ServerError,
    UnknownPluginError,
    WeightsError,
)
from rabbet.types.outputs import FinishReason, RequestDelta
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams

BOTH = pytest.mark.parametrize("in_process", [True, False], ids=["process", "thread"])
LONG = 100_000
WAIT_S = 30.0


class Inbox:
    """Takes what a client says; waits without sleeping."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[RequestDelta]] = {}
        self.deaths: list[EngineDeadError] = []
        self._changed = threading.Condition()

    def on_deltas(self, deltas: list[RequestDelta]) -> None:
        with self._changed:
            for delta in deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
            self._changed.notify_all()

    def on_death(self, error: EngineDeadError) -> None:
        with self._changed:
            self.deaths.append(error)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=WAIT_S), "nothing came"

    def has_end(self, request_id: str) -> bool:
        return any(delta.finish_reason for delta in self.deltas.get(request_id, ()))

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for delta in self.deltas[request_id] for token_id in delta.new_token_ids]


def config_of(model_dir: Path, options: dict[str, Any], **changes: Any) -> Any:
    return engine_config_from_kwargs(str(model_dir), **(options | changes))


@contextmanager
def started(config: Any, *, in_process: bool) -> Iterator[tuple[EngineClient, Inbox]]:
    client, inbox = make_client(config, is_server=False, log_level="error", engine_process=in_process), Inbox()
    client.start()
    client.listen(inbox.on_deltas, inbox.on_death)
    try:
        yield client, inbox
    finally:
        client.shutdown()


def request_of(request_id: str, prompt: list[int], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@BOTH
def test_requests_get_their_tokens_and_one_end(
    in_process: bool, null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    phases: list[str] = []
    found: list[str | None] = []
    client = make_client(config_of(model_dir, options), is_server=False, log_level="error", engine_process=in_process)
    client.start(phases.append, found.append)
    assert client.resolved is not None
    assert found == [str(client.resolved.files.tokenizer_dir) if client.resolved.files.tokenizer_dir else None], "told once"
    inbox = Inbox()
    client.listen(inbox.on_deltas, inbox.on_death)
    try:
        for index in range(20):
            client.add(request_of(f"r{index}", [index + 1, 2]))
        inbox.wait(lambda: all(inbox.has_end(f"r{index}") for index in range(20)))
        assert [inbox.tokens(f"r{i}") for i in range(20)] == [null.tokens_of([i + 1, 2], 5) for i in range(20)]
        assert client.call("stats").result(WAIT_S) is not None
        assert client.call("reset_prefix_cache").result(WAIT_S) is True
        client.call("check_integrity").result(WAIT_S)
        with pytest.raises(ServerError, match="no call 'open_the_door'"):
            client.call("open_the_door").result(WAIT_S)
        client.check_health()
        assert isinstance(client.stats, SchedulerStats)
        assert client.info is not None and client.info.max_model_len == 512
        assert phases[-1] == "ready" and "loading the model" in phases
    finally:
        client.shutdown()
    assert inbox.deaths == []
    assert client.exit_code == (0 if in_process else None)
    with pytest.raises(EngineDeadError):
        client.add(request_of("late", [1]))
    with pytest.raises(EngineDeadError):
        client.check_health()
    client.shutdown()


@BOTH
def test_aborted_requests_end_and_leave_nothing(in_process: bool, model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options, max_model_len=LONG), in_process=in_process) as (client, inbox):
        client.add(request_of("r", [1], LONG - 1))
        inbox.wait(lambda: "r" in inbox.deltas)
        client.abort(["r", "never"])
        inbox.wait(lambda: inbox.has_end("r"))
        assert inbox.deltas["r"][-1].finish_reason is FinishReason.ABORT
        client.call("check_integrity").result(WAIT_S)


@BOTH
def test_a_shutdown_with_time_lets_requests_end(in_process: bool, model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=in_process) as (client, inbox):
        client.add(request_of("r", [1], 300))
        client.shutdown(timeout_s=WAIT_S)
        assert inbox.deltas["r"][-1].finish_reason is FinishReason.LENGTH


@BOTH
def test_a_shutdown_without_time_aborts(in_process: bool, model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options, max_model_len=LONG), in_process=in_process) as (client, inbox):
        client.add(request_of("r", [1], LONG - 1))
        inbox.wait(lambda: "r" in inbox.deltas)
        client.shutdown()
        assert inbox.deltas["r"][-1].finish_reason is FinishReason.ABORT


@BOTH
def test_a_dead_executor_is_told_to_everybody(
    in_process: bool, null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    with started(config_of(model_dir, options), in_process=in_process) as (client, inbox):
        client.add(request_of("last", [null.DEAD_EXECUTOR]))
        inbox.wait(lambda: bool(inbox.deaths))
        assert "rank 0 has ended" in str(inbox.deaths[0])
        with pytest.raises(EngineDeadError, match="rank 0 has ended"):
            client.check_health()
        with pytest.raises(EngineDeadError, match="rank 0 has ended"):
            client.add(request_of("late", [1]))
        with pytest.raises(EngineDeadError):
            client.call("stats").result(WAIT_S)
        client.abort(["last"])
    assert client.exit_code == (EXIT_DEAD if in_process else None)
    assert len(inbox.deaths) == 1


@BOTH
@pytest.mark.parametrize(("poison", "name"), [("SYSTEM_EXIT", "SystemExit"), ("INTERRUPT", "KeyboardInterrupt")])
def test_a_plugin_that_wants_the_process_to_end_ends_the_engine_with_a_reason(
    in_process: bool, poison: str, name: str, null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    with started(config_of(model_dir, options, max_model_len=LONG), in_process=in_process) as (client, inbox):
        client.add(request_of("long", [1], LONG - 1))
        inbox.wait(lambda: "long" in inbox.deltas)
        client.add(request_of("poison", [getattr(null, poison)]))
        inbox.wait(lambda: bool(inbox.deaths))
        assert "running step" in str(inbox.deaths[0]) and name in str(inbox.deaths[0])
        with pytest.raises(EngineDeadError, match=name):
            client.check_health()
    assert client.exit_code == (EXIT_DEAD if in_process else None)
    assert len(inbox.deaths) == 1


def test_a_panic_of_compiled_code_is_a_failed_step(null: ModuleType, model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=False) as (client, inbox):
        client.add(request_of("poison", [null.PANIC]))
        inbox.wait(lambda: inbox.has_end("poison"))
        assert "Panic" in str(inbox.deltas["poison"][-1].error)
        client.add(request_of("next", [1]))
        inbox.wait(lambda: inbox.has_end("next"))
        assert inbox.tokens("next") == null.tokens_of([1], 5)
        client.call("check_integrity").result(WAIT_S)


@BOTH
def test_a_plugin_that_wants_the_process_to_end_at_the_start_is_named(
    in_process: bool, model_dir: Path, options: dict[str, Any]
) -> None:
    config = config_of(model_dir, options, additional_config={"leave_load": True})
    client = make_client(config, is_server=False, log_level="critical", engine_process=in_process)
    with pytest.raises(EngineDeadError, match="could not start: SystemExit"):
        client.start()
    assert client.exit_code == (EXIT_DEAD if in_process else None)


@BOTH
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"additional_config": {"fail_load": True}}, WeightsError, "the checkpoint has no tensor 'lm_head.weight'"),
        ({"kv_cache_memory_bytes": 64}, ConfigError, "--kv-cache-memory-bytes"),
        ({"attention_backend": "holow"}, UnknownPluginError, "hollow"),
    ],
)
def test_what_is_wrong_at_the_start_comes_as_its_own_error(
    in_process: bool,
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
    model_dir: Path,
    options: dict[str, Any],
) -> None:
    client = make_client(
        config_of(model_dir, options, **changes), is_server=False, log_level="error", engine_process=in_process
    )
    with pytest.raises(error, match=text):
        client.start()
    assert client.exit_code == (EXIT_CONFIG if in_process else None)


def test_an_engine_that_ends_while_it_starts_names_the_phase(
    null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    config = config_of(model_dir, options, additional_config={"exit_load": True})
    client = make_client(config, is_server=False, log_level="error")
    # The last words of a process that is cut off may be lost.
    with pytest.raises(EngineDeadError, match=f"status {null.EXIT_STATUS} while (choosing plugins|loading the model)"):
        client.start()
    assert client.exit_code == null.EXIT_STATUS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, None])
def test_a_process_that_dies_is_noticed(
    number: int | None, null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    with started(config_of(model_dir, options, max_model_len=LONG), in_process=True) as (client, inbox):
        assert isinstance(client, process_client.ProcessEngineClient) and client.pid is not None
        client.add(request_of("r", [1], LONG - 1))
        inbox.wait(lambda: "r" in inbox.deltas)
        if number is None:
            client.add(request_of("poison", [null.EXIT_PROCESS]))
        else:
            os.kill(client.pid, number)
        inbox.wait(lambda: bool(inbox.deaths))
        with pytest.raises(EngineDeadError, match=f"signal {number}" if number else f"status {null.EXIT_STATUS}"):
            client.check_health()
    assert client.exit_code == (-number if number else null.EXIT_STATUS)


def test_a_stopped_process_is_unhealthy_until_it_goes_on(model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options, max_model_len=LONG), in_process=True) as (client, inbox):
        assert isinstance(client, process_client.ProcessEngineClient) and client.pid is not None
        client.heartbeat_limit_s = 0.6
        client.add(request_of("r", [1], LONG - 1))
        inbox.wait(lambda: "r" in inbox.deltas)
        os.kill(client.pid, signal.SIGSTOP)
        try:
            _until(lambda: _is_unhealthy(client))
        finally:
            os.kill(client.pid, signal.SIGCONT)
        _until(lambda: not _is_unhealthy(client))
        client.abort(["r"])
        inbox.wait(lambda: inbox.has_end("r"))
        assert inbox.deaths == []


def test_signals_for_the_whole_service_are_left_to_the_front(
    null: ModuleType, model_dir: Path, options: dict[str, Any]
) -> None:
    with started(config_of(model_dir, options), in_process=True) as (client, inbox):
        assert isinstance(client, process_client.ProcessEngineClient) and client.pid is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(client.pid, number)
        client.add(request_of("r", [1]))
        inbox.wait(lambda: inbox.has_end("r"))
        assert inbox.tokens("r") == null.tokens_of([1], 5)
    assert client.exit_code == 0


def test_a_turn_that_takes_too_long_is_unhealthy(model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=False) as (client, _):
        client.turn_limit_s = -1.0
        with pytest.raises(EngineDeadError, match="in one step"):
            client.check_health()


def test_a_stopped_process_can_still_be_shut_down(model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=True) as (client, _):
        assert isinstance(client, process_client.ProcessEngineClient) and client.pid is not None
        client.heartbeat_limit_s = 0.6
        os.kill(client.pid, signal.SIGSTOP)
        _until(lambda: _is_unhealthy(client))
        client.shutdown()
        assert not is_alive(client.pid)


def test_what_is_sent_to_an_engine_that_is_gone_blocks_nobody(model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=True) as (client, _):
        assert isinstance(client, process_client.ProcessEngineClient) and client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        _until(lambda: client.exit_code is not None)
        sender = threading.Thread(target=client._deliver, args=(Abort(request_ids=["r"]),), daemon=True)
        sender.start()
        sender.join(10)
        assert not sender.is_alive()


def test_sockets_are_gone_once_the_engine_is_ready(model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=True) as (client, inbox):
        assert isinstance(client, process_client.ProcessEngineClient)
        assert not client._directory.path.exists()
        client.add(request_of("r", [1]))
        inbox.wait(lambda: inbox.has_end("r"))


def test_a_value_that_cannot_be_sent_is_the_callers_error(model_dir: Path, options: dict[str, Any]) -> None:
    with started(config_of(model_dir, options), in_process=True) as (client, inbox):
        sampling = SamplingParams(extra_args={"x": 1 << 100})
        request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=sampling, max_tokens=1)
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            client.add(request)
        client.add(request_of("next", [1]))
        inbox.wait(lambda: inbox.has_end("next"))


PARENT = """
import sys
from rabbet.config.load import engine_config_from_kwargs
from rabbet.engine.client import make_client
import json
options = json.loads(sys.argv[2])
client = make_client(engine_config_from_kwargs(sys.argv[1], **options), is_server=False, log_level="error")
client.start()
print(client.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_engine_dies_with_its_parent(is_stopped: bool, model_dir: Path, options: dict[str, Any]) -> None:
    import json

    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    _until(lambda: not is_alive(pid))
    parent.stdin.close()
    parent.stdout.close()


def test_plugins_of_the_main_script_are_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, options: dict[str, Any]
) -> None:
    record = Registration(kind="model", name="M", contract="1.0", module="__main__", qualname="M", target=object)
    monkeypatch.setattr(process_client, "staged_registrations", lambda: (record,))
    with pytest.raises(ConfigError, match="engine_process=False"):
        make_client(config_of(model_dir, options), is_server=False)


def test_the_front_of_a_process_engine_imports_no_torch(model_dir: Path, options: dict[str, Any]) -> None:
    import json

    code = PARENT.replace(
        "sys.stdin.read()", "client.shutdown(); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model_dir), json.dumps(options)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def _is_unhealthy(client: EngineClient) -> bool:
    try:
        client.check_health()
    except EngineDeadError:
        return True
    return False


def _until(condition: Callable[[], bool]) -> None:
    """Ask until it is so."""
    timer = threading.Event()
    for _ in range(600):
        if condition():
            return
        timer.wait(0.05)
    raise AssertionError("it never came about")
