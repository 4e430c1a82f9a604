"""One rank in a process of its own: ``python -m rabbet.worker.process`` with its start message on standard input.

Standard input stays open as long as the engine lives; its end ends the worker.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import zmq

from rabbet._util.log import log_to_stderr
from rabbet._util.memory import lacks_memory
from rabbet.config.resolved import resolved_from_bytes
from rabbet.errors import RabbetError
from rabbet.registry.onefile import stage_file
from rabbet.runner.runner import DeviceRunner
from rabbet.worker.child import EXIT_DEAD, make_visible, read_start
from rabbet.worker.messages import (
    Close,
    Done,
    Execute,
    FromWorker,
    InitializeCache,
    Load,
    Loaded,
    Profiled,
    Stepped,
    ToWorker,
    WorkerFailed,
    WorkerStart,
    decode_to_worker,
    encode,
)

__all__ = ["main"]

logger = logging.getLogger(__name__)


class _Worker:
    """A rank that obeys."""

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        make_visible(start)
        self._resolved = resolved_from_bytes(start.resolved)
        plugins = self._resolved.config.plugins
        for file in plugins.files:
            stage_file(Path(file), limit_s=plugins.import_timeout_s)
        self._resolved.composition.verify()
        self._runner = DeviceRunner(
            self._resolved, rank=start.rank, world_size=start.world_size, init_method=start.init_method
        )

    def obey(self, command: ToWorker) -> FromWorker:
        """Run one command."""
        rank = self._start.rank
        if isinstance(command, Load):
            self._runner.load()
            return Loaded(rank=rank, specs=self._runner.kv_cache_specs(), digest=self._resolved.composition.digest)
        if isinstance(command, InitializeCache):
            self._runner.initialize_cache(command.config)
            self._runner.warm_up()
            settled = self._resolved.composition.settled(is_strict=self._resolved.config.plugins.strict)
            return Done(rank=rank, tampered=list(settled.tampered))
        if isinstance(command, Execute):
            result = self._runner.execute(command.plan)
            return Stepped(rank=rank, step_id=command.plan.step_id, result=result if rank == 0 else None)
        return Profiled(rank=rank, report=self._runner.profile_memory())

    def close(self) -> None:
        """Free everything."""
        self._runner.close()


def _answer(worker: _Worker, rank: int, command: ToWorker) -> FromWorker:
    try:
        return worker.obey(command)
    except BaseException as error:  # noqa: BLE001  the edge of the process: the executor decides what it means
        return _failure(rank, error)


def _failure(rank: int, error: BaseException) -> WorkerFailed:
    if isinstance(error, RabbetError):
        return WorkerFailed(rank=rank, kind=type(error).__name__, message=str(error))
    logger.error("failed", exc_info=None if lacks_memory(error) else error)
    return WorkerFailed(rank=rank, kind="other", message=f"{type(error).__name__}: {error}")


def main() -> int:
    """Entry of the process."""
    start = read_start(WorkerStart)
    log_to_stderr("warning", who=f"rank {start.rank}: ")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind(f"ipc://{start.socket_dir}/rank-{start.rank}")
    outbox.connect(f"ipc://{start.socket_dir}/results")
    worker: _Worker | None = None
    try:
        try:
            worker = _Worker(start)
        except BaseException as error:  # noqa: BLE001  the edge of the process: the cause must not be lost with it
            outbox.send(encode(_failure(start.rank, error)))
            return EXIT_DEAD
        while True:
            command = decode_to_worker(inbox.recv())
            if isinstance(command, Close):
                return 0
            outbox.send(encode(_answer(worker, start.rank, command)))
    finally:
        if worker is not None:
            worker.close()
        inbox.close(linger=0)
        outbox.close(linger=1000)
        context.term()


if __name__ == "__main__":
    sys.exit(main())
