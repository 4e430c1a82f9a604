"""What the suite of executors drives: a scripted model that does as its tokens say, and an executor with its plans."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from rabbet.contracts import register_model
from rabbet.contracts.executor import MemoryReport
from rabbet.kv.groups import build_cache_config
from rabbet.layers import BuildContext
from rabbet.types.outputs import StepResult
from rabbet.types.plan import NewRequest, RunningRequest, StepPlan
from rabbet.types.sampling import SamplingParams
from rabbet_sdk.fakes.engine import resolve_tiny
from rabbet_sdk.fakes.model import ScriptedForCausalLM, scripted_config
from rabbet_sdk.fakes.platform import NullPlatform

__all__ = ["DEVICE", "EXIT", "FAIL", "WAIT", "WAIT_S", "Bench", "Obedient", "told"]

FAIL, EXIT, WAIT = 61, 62, 63
"""Tokens on which the model raises, ends its process, or waits for a byte in its pipe."""
WAIT_S = 60.0
DEVICE: str = NullPlatform.__rabbet_registrations__[0].name  # type: ignore[attr-defined]
_PATIENCE_S = 1.5


@register_model("ObedientForCausalLM")
class Obedient(ScriptedForCausalLM):
    """config.json has ``pipe``, the path of a pipe, and ``is_broken``: it cannot be built."""

    def __init__(self, *, config: Any, context: BuildContext) -> None:
        super().__init__(config=config, context=context)
        if config.is_broken:
            raise ValueError("told to fail at the start")
        self.pipe = config.pipe

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As its parent, once it has done what the tokens say."""
        assert input_ids is not None
        told = set(input_ids.tolist())
        if FAIL in told:
            raise RuntimeError("told to fail in a step")
        if EXIT in told:
            os._exit(7)
        if WAIT in told:
            # Not for ever: an executor that waits here itself has to be seen, not to hang.
            end = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
            if select.select([end], [], [], _PATIENCE_S)[0]:
                os.read(end, 1)
            os.close(end)
        return super().forward(input_ids, positions)


class Bench:
    """One executor for a script, and the plans of its requests: request n has block n of every group.

    Attributes:
        executor: Made, not loaded.
        report: Once ``ready`` was called.
    """

    def __init__(
        self, plugin_class: type[Any], name: str, directory: Path, *, world_size: int = 1,
        script: Sequence[tuple[Sequence[int], Sequence[int]]] = (((5, 6), (7, 8)),), is_broken: bool = False,
        device: str = DEVICE,
    ) -> None:  # fmt: skip
        directory.mkdir(parents=True)
        os.mkfifo(directory / "pipe")
        # Both ends are held open, so that what is written early waits for its reader.
        self._pipe = os.open(directory / "pipe", os.O_RDWR)
        config = scripted_config(script) | {
            "architectures": ["ObedientForCausalLM"], "pipe": str(directory / "pipe"), "is_broken": is_broken
        }  # fmt: skip
        self.world_size, self.groups, self.steps = world_size, 0, 0
        self.report: MemoryReport | None = None
        self.lengths: dict[str, int] = {}
        self.executor = plugin_class(
            resolve_tiny(
                directory, config, distributed_executor_backend=name, tensor_parallel_size=world_size, device=device
            )
        )

    def ready(self) -> Bench:
        """Load, measure, allocate."""
        self.specs = self.executor.load()
        self.report = self.executor.profile_memory()
        config = build_cache_config(self.specs, 1 << 20, 16)
        self.groups = len(config.groups)
        self.executor.initialize_cache(config)
        return self

    def start(self, name: str, *prompt: int) -> Future[StepResult]:
        """Run the whole prompt of a new request."""
        self.lengths[name] = len(prompt)
        request = NewRequest(
            request_id=name, token_ids=list(prompt), num_prompt_tokens=len(prompt), num_computed_tokens=0,
            block_ids=[[len(self.lengths)]] * self.groups, sampling=SamplingParams(temperature=0.0), seed=0,
        )  # fmt: skip
        return self._execute(new_requests=[request], num_scheduled_tokens={name: len(prompt)})

    def go_on(self, name: str) -> Future[StepResult]:
        """Run the token that the last step gave."""
        running = RunningRequest(
            request_id=name, num_computed_tokens=self.lengths[name], new_block_ids=[[]] * self.groups
        )
        self.lengths[name] += 1
        return self._execute(running_requests=[running], num_scheduled_tokens={name: 1})

    def _execute(self, **plan: Any) -> Future[StepResult]:
        self.steps += 1
        future: Future[StepResult] = self.executor.execute(StepPlan(step_id=self.steps, **plan))
        return future

    def release(self) -> None:
        """Let every rank that waits go on, or the next one that will."""
        os.write(self._pipe, b"." * self.world_size)

    def close(self) -> None:
        """End it."""
        self.executor.shutdown()
        os.close(self._pipe)


def told(future: Future[StepResult]) -> dict[str, list[int]]:
    """The tokens of a step."""
    return future.result(timeout=WAIT_S).sampled_token_ids
