"""The executor for several ranks of one machine: a process a rank, plans broadcast over unix sockets."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import zmq

import rabbet.errors as errors
from rabbet.config.resolved import resolved_to_bytes
from rabbet.contracts import Refusal, register_executor, staged_registrations
from rabbet.contracts.executor import Executor, ExecutorQuery, MemoryReport
from rabbet.errors import CompositionMismatchError, EngineDeadError, RabbetError
from rabbet.registry.onefile import MODULE_PREFIX
from rabbet.types.kv import KVCacheConfig, KVCacheSpec
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan
from rabbet.worker.child import spawn
from rabbet.worker.directory import SocketDirectory
from rabbet.worker.messages import (
    Close,
    Done,
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
_STEP_LIMIT_S = 300.0


@dataclass(slots=True)
class _Pending:
    """A command under way: answers by rank, who waits, and how long a rank may take once it is the oldest."""

    future: Future[list[FromWorker]]
    limit_s: float | None
    answers: dict[int, FromWorker] = field(default_factory=dict)


@register_executor("mp")
class MultiprocessExecutor(Executor):
    """One process a rank. Commands and their answers keep their order, so answers need no ids.

    The death of a rank is told once, by its first cause, to everyone who waits and to everyone who asks later.

    Attributes:
        step_limit_s: A step that takes longer hangs, and so does the rank that has not answered. Loading, measuring and
            warming up have no limit: weights may come from a slow disk, kernels may be compiled.
    """

    step_limit_s = _STEP_LIMIT_S

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
        self._directory = SocketDirectory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._results = self._context.socket(zmq.PULL)
        self._results.bind(self._directory.address("results"))
        self._outboxes = []
        for rank in range(self._world_size):
            # This side connects, so that what is sent waits for a rank that is not there yet or no more. Were it bound,
            # sending would block for ever, with the lock held that telling of the rank's death needs.
            outbox = self._context.socket(zmq.PUSH)
            outbox.set_hwm(0)
            outbox.connect(self._directory.address(f"rank-{rank}"))
            self._outboxes.append(outbox)
        self._pending: deque[_Pending] = deque()
        self._oldest_since = time.monotonic()
        self._lock = threading.Lock()
        self._death: RabbetError | None = None
        self._evidence: list[tuple[str, str]] = []
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started: Future[None] = Future()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="rabbet-ranks", daemon=True)
        self._keeper.start()
        try:
            self._started.result()
        except BaseException:
            self.shutdown()
            raise

    def _keep(self) -> None:
        """Start the ranks and read their answers. The kernel ends them with this thread, so it stays until they are gone."""
        try:
            for rank in range(self._world_size):
                self._processes.append(spawn("rabbet.worker.process", self._start_message(rank)))
            self._started.set_result(None)
        except Exception as error:  # noqa: BLE001  handed to the thread that makes the executor
            self._started.set_exception(error)
        else:
            self._read()
        self._ended.wait()

    def _start_message(self, rank: int) -> WorkerStart:
        return WorkerStart(
            resolved=resolved_to_bytes(self.config),
            rank=rank,
            world_size=self._world_size,
            init_method=f"file://{self._directory.path}/rendezvous",
            socket_dir=str(self._directory.path),
            path=[path for path in sys.path if path],
            modules=_importable_modules(),
        )

    # ---- commands

    def _command(self, message: ToWorker, limit_s: float | None = None) -> Future[list[FromWorker]]:
        """Send to all ranks; the future holds their answers in the order of ranks."""
        future: Future[list[FromWorker]] = Future()
        data = encode(message)
        with self._lock:
            if self._death is not None:
                raise self._death
            if not self._pending:
                self._oldest_since = time.monotonic()
            self._pending.append(_Pending(future, limit_s))
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
        # All ranks are connected, and nobody else shall be.
        for name in ("results", *(f"rank-{rank}" for rank in range(self._world_size))):
            (self._directory.path / name).unlink(missing_ok=True)
        return answers[0].specs

    def profile_memory(self) -> MemoryReport:
        """See ``Executor``."""
        answers = self._command(Profile()).result()
        reports = [answer.report for answer in answers if isinstance(answer, Profiled)]
        return min(reports, key=lambda report: report.available_kv_bytes)

    def initialize_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor``."""
        answers = self._command(InitializeCache(config=config)).result()
        self._evidence = sorted({pair for answer in answers if isinstance(answer, Done) for pair in answer.tampered})

    def evidence(self) -> Sequence[tuple[str, str]]:
        """See ``Executor``."""
        return self._evidence

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """See ``Executor``."""
        result: Future[StepResult] = Future()

        def hand_over(answers: Future[list[FromWorker]]) -> None:
            if not result.set_running_or_notify_cancel():
                return
            error = answers.exception()
            first = None if error is not None else answers.result()[0]
            if isinstance(first, Stepped) and first.result is not None and first.step_id == plan.step_id:
                result.set_result(first.result)
            else:
                result.set_exception(error or EngineDeadError(f"rank 0 answered step {plan.step_id} with {first}"))

        self._command(Execute(plan=plan), self.step_limit_s).add_done_callback(hand_over)
        return result

    # ---- answers

    def _read(self) -> None:
        try:
            while not self._ended.is_set():
                if self._results.poll(_POLL_MS):
                    self._take(decode_from_worker(self._results.recv()))
                elif (problem := self._problem()) is not None:
                    self._die(EngineDeadError(problem))
                    return
        except Exception as error:  # the edge of the thread: nobody may wait for an answer that never comes
            logger.error("reading the answers of ranks failed", exc_info=error)
            self._die(EngineDeadError(f"reading the answers of ranks failed: {type(error).__name__}: {error}"))

    def _problem(self) -> str | None:
        """What is wrong with a rank that says nothing, or None."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                return f"the process of rank {rank} ended with status {process.returncode}"
        with self._lock:
            oldest = self._pending[0] if self._pending else None
            if oldest is None or oldest.limit_s is None or time.monotonic() - self._oldest_since < oldest.limit_s:
                return None
            silent = [str(rank) for rank in range(self._world_size) if rank not in oldest.answers]
        return f"no answer of rank {', '.join(silent)} within {oldest.limit_s:g} s of a step"

    def _take(self, answer: FromWorker) -> None:
        """An answer belongs to the oldest command that its rank has not answered."""
        with self._lock:
            pending = next((item for item in self._pending if answer.rank not in item.answers), None)
            if pending is None:
                # A rank that could not even start says so without being asked.
                if isinstance(answer, WorkerFailed):
                    self._death = self._death or _error_of(answer)
                return
            pending.answers[answer.rank] = answer
            if len(pending.answers) < self._world_size and not isinstance(answer, WorkerFailed):
                return
            self._pending.remove(pending)
            self._oldest_since = time.monotonic()
        if isinstance(answer, WorkerFailed):
            # One rank alone cannot go on: the others may wait for it in a collective for ever. Death comes first, so that
            # whoever sees the failure finds the executor dead.
            self._die(EngineDeadError(f"rank {answer.rank} failed: {answer.message}"))
            pending.future.set_exception(_error_of(answer))
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
        """See ``Executor``. A healthy rank ends by itself, any other is killed; who still waits is told."""
        if self._is_closing:
            return
        self._is_closing = True
        wait([self._started])
        is_healthy = self._death is None and self._started.exception() is None
        self._die(EngineDeadError("the executor is shut down"))
        for outbox in self._outboxes:
            outbox.send(encode(Close()), zmq.NOBLOCK)
        # One deadline for all: they end side by side.
        deadline = time.monotonic() + (_EXIT_WAIT_S if is_healthy else 0.1)
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._ended.set()
        self._keeper.join()
        for socket in (*self._outboxes, self._results):
            socket.close(linger=0)
        self._context.term()
        self._directory.close()


def _importable_modules() -> list[str]:
    """The user's modules that register something. Files are left out, those of other engines too: ranks load their own."""
    modules = {record.module for record in staged_registrations()}
    return sorted(name for name in modules if name != "__main__" and not name.startswith(MODULE_PREFIX))


def _error_of(answer: WorkerFailed) -> RabbetError:
    cls = getattr(errors, answer.kind, None)
    if isinstance(cls, type) and issubclass(cls, RabbetError):
        return cls(answer.message)
    return EngineDeadError(f"rank {answer.rank} failed: {answer.message}")
