"""The executor for several ranks of one machine: a process a rank, plans broadcast over unix sockets."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

import rabbet.errors as errors
from rabbet.config.resolved import resolved_to_bytes
from rabbet.contracts import Refusal, register_executor, staged_registrations
from rabbet.contracts.executor import Executor, ExecutorQuery, MemoryReport
from rabbet.errors import CompositionMismatchError, EngineDeadError, RabbetError
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan
from rabbet.worker.messages import (
    Close,
    Execute,
    FromWorker,
    InitializeCache,
    Load,
    Loaded,
    Profile,
    Profiled,
    Stepped,
    ToWorker,
    WorkerFailed,
    WorkerStart,
    decode_from_worker,
    encode,
)

__all__ = ["MultiprocessExecutor"]

logger = logging.getLogger(__name__)
_POLL_MS = 100
_EXIT_WAIT_S = 5.0


@dataclass(slots=True)
class _Pending:
    """A command under way: answers by rank, and who waits."""

    future: Future[list[FromWorker]]
    answers: dict[int, FromWorker] = field(default_factory=dict)


@register_executor("mp")
class MultiprocessExecutor(Executor):
    """One process a rank. Commands and their answers keep their order, so answers need no ids."""

    @classmethod
    def supports(cls, query: ExecutorQuery) -> tuple[Refusal, ...]:
        """Any number of ranks on this machine."""
        if query.num_nodes > 1:
            return (Refusal(code="NODES", message=f"one machine only, not {query.num_nodes}"),)
        return ()

    def __init__(self, config: Any) -> None:
        """See ``Executor``. Starts the processes."""
        super().__init__(config)
        self._world_size: int = config.world_size
        self._directory = Path(tempfile.mkdtemp(prefix="rabbet-ranks-"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._results = self._context.socket(zmq.PULL)
        self._results.bind(f"ipc://{self._directory}/results")
        self._outboxes = []
        for rank in range(self._world_size):
            outbox = self._context.socket(zmq.PUSH)
            outbox.bind(f"ipc://{self._directory}/rank-{rank}")
            self._outboxes.append(outbox)
        self._pending: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._death: RabbetError | None = None
        self._is_closing = False
        self._processes = [self._spawn(rank) for rank in range(self._world_size)]
        self._reader = threading.Thread(target=self._read, name="rabbet-ranks-reader", daemon=True)
        self._reader.start()

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        start = WorkerStart(
            resolved=resolved_to_bytes(self.config),
            rank=rank,
            world_size=self._world_size,
            init_method=f"file://{self._directory}/rendezvous",
            socket_dir=str(self._directory),
            path=[path for path in sys.path if path],
            modules=sorted({record.module for record in staged_registrations() if record.module != "__main__"}),
        )
        data = msgspec.msgpack.encode(start)
        process = subprocess.Popen([sys.executable, "-m", "rabbet.worker.process"], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()
        return process

    # ---- commands

    def _command(self, message: ToWorker) -> Future[list[FromWorker]]:
        """Send to all ranks; the future holds their answers in the order of ranks."""
        future: Future[list[FromWorker]] = Future()
        data = encode(message)
        with self._lock:
            if self._death is not None:
                raise self._death
            self._pending.append(_Pending(future))
            for outbox in self._outboxes:
                outbox.send(data)
        return future

    def load(self) -> dict[str, KVCacheSpec]:
        """See ``Executor``.

        Raises:
            CompositionMismatchError: If a rank holds other plugins.
        """
        answers = [answer for answer in self._command(Load()).result() if isinstance(answer, Loaded)]
        digests = {answer.digest for answer in answers}
        if len(digests) != 1:
            raise CompositionMismatchError(f"ranks hold different plugins: {sorted(digests)}")
        return answers[0].specs

    def profile_memory(self) -> MemoryReport:
        """See ``Executor``."""
        answers = self._command(Profile()).result()
        reports = [answer.report for answer in answers if isinstance(answer, Profiled)]
        return min(reports, key=lambda report: report.available_kv_bytes)

    def initialize_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor``."""
        self._command(InitializeCache(config=config)).result()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """See ``Executor``."""
        result: Future[StepResult] = Future()

        def hand_over(answers: Future[list[FromWorker]]) -> None:
            error = answers.exception()
            if error is not None:
                result.set_exception(error)
                return
            first = answers.result()[0]
            assert isinstance(first, Stepped) and first.result is not None and first.step_id == plan.step_id
            result.set_result(first.result)

        self._command(Execute(plan=plan)).add_done_callback(hand_over)
        return result

    # ---- answers

    def _read(self) -> None:
        while not self._is_closing:
            if self._results.poll(_POLL_MS):
                self._take(decode_from_worker(self._results.recv()))
                continue
            for rank, process in enumerate(self._processes):
                if process.poll() is not None and not self._is_closing:
                    self._die(EngineDeadError(f"the process of rank {rank} ended with status {process.returncode}"))
                    return

    def _take(self, answer: FromWorker) -> None:
        """An answer belongs to the oldest command that its rank has not answered."""
        with self._lock:
            pending = next((item for item in self._pending if answer.rank not in item.answers), None)
            if pending is None:
                # A rank that could not even start says so without being asked.
                if isinstance(answer, WorkerFailed):
                    self._death = _error_of(answer)
                return
            pending.answers[answer.rank] = answer
            if len(pending.answers) < self._world_size:
                failed = isinstance(answer, WorkerFailed)
                if not failed:
                    return
            self._pending.remove(pending)
        failures = [item for item in pending.answers.values() if isinstance(item, WorkerFailed)]
        if failures:
            # One rank alone cannot go on: the others may wait for it in a collective for ever.
            error = _error_of(failures[0])
            pending.future.set_exception(error)
            self._die(EngineDeadError(f"rank {failures[0].rank} failed: {failures[0].message}"))
        else:
            pending.future.set_result([pending.answers[rank] for rank in range(self._world_size)])

    def _die(self, error: RabbetError) -> None:
        with self._lock:
            self._death = self._death or error
            pending, self._pending = list(self._pending), deque()
        for item in pending:
            if not item.future.done():
                item.future.set_exception(self._death)

    def check_health(self) -> None:
        """See ``Executor``."""
        if self._death is not None:
            raise self._death
        if self._is_closing:
            raise EngineDeadError("the executor is shut down")

    def shutdown(self) -> None:
        """See ``Executor``."""
        if self._is_closing:
            return
        self._is_closing = True
        self._reader.join()
        for outbox in self._outboxes:
            outbox.send(encode(Close()), zmq.NOBLOCK)
        for process in self._processes:
            try:
                process.wait(timeout=0.1 if self._death is not None else _EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for socket in (*self._outboxes, self._results):
            socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _error_of(answer: WorkerFailed) -> RabbetError:
    cls = getattr(errors, answer.kind, None)
    if isinstance(cls, type) and issubclass(cls, RabbetError):
        return cls(answer.message)
    return EngineDeadError(f"rank {answer.rank} failed: {answer.message}")
