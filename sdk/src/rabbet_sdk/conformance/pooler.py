"""The suite of poolers: any chunks give the vector of the whole prompt, and prompts in turns are kept apart.

Claims: ``task``, ``architecture`` (leave them out to claim all) and ``features`` with ``dimensions`` (shorter vectors).
An author gives ``pool``: the same, plainly.

Shapes: T tokens, N hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rabbet.contracts.pooler import PoolerQuery
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.numerics import assert_within

__all__ = ["PoolerConformance"]

_TASKS = ("embed", "classify", "token_embed", "token_classify")
_LENGTHS = (1, 2, 7, 64, 301)
_SIZES = ((1,), (64,), (3, 0, 1, 5), (100, 1))
"""Sizes of chunks, over and over."""


def _mean(hidden_TN: torch.Tensor) -> torch.Tensor:
    """What the template promises."""
    mean_N = hidden_TN.sum(dim=0) / hidden_TN.shape[0]
    return mean_N / mean_N.square().sum().sqrt()


class PoolerConformance(SupportsConformance):
    """Subclass, name the plugin, give ``pool``.

    Attributes:
        pool: Hidden states [T, N] of a whole prompt to the result, in the dtype that it is given.
        hidden_size: N.
        architecture: An architecture that it serves.
    """

    kind = "pooler"
    pool: ClassVar[Callable[[torch.Tensor], torch.Tensor]] = staticmethod(_mean)
    hidden_size: ClassVar[int] = 24
    architecture: ClassVar[str] = "LlamaForCausalLM"
    knobs = SupportsConformance.knobs | {"pool", "hidden_size", "architecture"}

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Each task, a task of no name, an architecture of no name, and shorter vectors."""
        base = PoolerQuery(task=str(next(iter(claims.values("task")), "embed")), architecture=cls.architecture)
        queries = {task: replace(base, task=task) for task in (*_TASKS, "no_such_task")}
        queries["architecture"] = replace(base, architecture="NobodyKnowsThisForCausalLM")
        queries["dimensions"] = replace(base, dimensions=cls.hidden_size // 2)
        return [
            Case(
                id=name, value=query,
                unclaimed=claims.missing(
                    {"task": query.task, "architecture": query.architecture},
                    ["dimensions"] if query.dimensions is not None else [],
                ),
            )
            for name, query in queries.items()
        ]  # fmt: skip

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """Types of hidden states, with the sizes of values that they have to bear."""
        found = []
        for name, scale, offset in (
            ("float32", 1.0, 0.0), ("bfloat16", 1.0, 0.0), ("float16", 1.0, 0.0), ("float32_large", 1e12, 0.0),
            ("bfloat16_far", 1.0, 100.0), ("float16_large", 1e4, 0.0),
        ):  # fmt: skip
            dtype = name.partition("_")[0]
            found.append(Case(id=name, value=(dtype, scale, offset), unclaimed=claims.missing({"dtype": dtype})))
        return found

    def _hidden(
        self, length: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0, offset: float = 0.0
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return ((torch.randn(length, self.hidden_size, generator=generator) + offset) * scale).to(dtype)

    def _state(self, pooler: Any, task: str = "") -> Any:
        """Of a request of ``task``, or of the first one that is claimed."""
        task = task or str(next(iter(self.claims().values("task")), "embed"))
        return pooler.new_state_for(PoolerQuery(task=task, architecture=self.architecture))

    def _update(self, pooler: Any, state: Any, hidden_TN: torch.Tensor, sizes: Sequence[int] = (1 << 20,)) -> None:
        """In chunks, each in one buffer that is overwritten afterwards, as the engine's is."""
        start = turn = 0
        while start < hidden_TN.shape[0]:
            size = sizes[turn % len(sizes)]
            buffer = hidden_TN[start : start + size].to(self.device, copy=True)
            pooler.update(state, buffer)
            buffer.fill_(float("nan"))
            start, turn = start + size, turn + 1

    def _finish(self, pooler: Any, state: Any) -> torch.Tensor:
        result = pooler.finish(state)
        assert isinstance(result, torch.Tensor), f"finish gave {type(result).__name__}; the contract asks for a tensor"
        assert result.dtype == torch.float32, f"finish gave {result.dtype}; the contract asks for float32"
        return result

    def _whole(self, pooler: Any, hidden_TN: torch.Tensor, sizes: Sequence[int] = (1 << 20,)) -> torch.Tensor:
        state = self._state(pooler)
        self._update(pooler, state, hidden_TN, sizes)
        return self._finish(pooler, state).cpu()

    def _check(self, got: torch.Tensor, hidden_TN: torch.Tensor, record: Any = None) -> None:
        exact, plain = type(self).pool(hidden_TN.double()), type(self).pool(hidden_TN.float())
        assert got.shape == exact.shape, f"{tuple(got.shape)} for {tuple(hidden_TN.shape)}; pool says {exact.shape}"
        assert_within(got, plain=plain, oracle=exact, record=record)

    @level(2)
    @cases("dtype_cases")
    def test_result_is_what_is_promised(self, subject: Subject, case: Case, record_property: Any) -> None:
        """Against ``pool`` in float64, for prompts of one token and of thousands, with large and distant values."""
        name, scale, offset = case.value
        pooler = subject.plugin_class()
        for length in (*_LENGTHS, 5000):
            hidden = self._hidden(length, dtype=getattr(torch, name), scale=scale, offset=offset)
            self._check(self._whole(pooler, hidden), hidden, record_property)

    def test_tasks_have_their_shape(self, subject: Subject) -> None:
        """One vector a prompt, or one a token: each claimed task, by turns on one instance."""
        pooler, hidden = subject.plugin_class(), self._hidden(7)
        claimed = [task for task in _TASKS if subject.claims.allows("task", task)]
        states = {task: self._state(pooler, task) for task in claimed}
        for task, state in states.items():
            self._update(pooler, state, hidden)
            got, wanted = self._finish(pooler, state), 2 if task.startswith("token_") else 1
            assert got.ndim == wanted and (wanted == 1 or got.shape[0] == 7), f"{tuple(got.shape)} for {task}"

    @level(2)
    def test_chunks_change_nothing(self, subject: Subject) -> None:
        """However a prompt is cut, an empty chunk among them."""
        pooler = subject.plugin_class()
        for sizes in _SIZES:
            for length in _LENGTHS:
                hidden = self._hidden(length)
                self._check(self._whole(pooler, hidden, sizes), hidden)

    @level(3)
    def test_nothing_points_into_the_engines_memory(self, subject: Subject) -> None:
        """Every chunk comes in the same buffer, with padding behind it and between its rows."""
        pooler, hidden = subject.plugin_class(), self._hidden(40)
        memory = torch.full((16, 2 * self.hidden_size), float("nan"), device=self.device)
        state = self._state(pooler)
        for start in range(0, 40, 10):
            view = memory[:10, : self.hidden_size]
            view.copy_(hidden[start : start + 10])
            pooler.update(state, view)
        memory.fill_(float("nan"))
        self._check(self._finish(pooler, state).cpu(), hidden)

    def test_hidden_states_stay_as_they_are(self, subject: Subject) -> None:
        """Logits may be computed from them too."""
        pooler, hidden = subject.plugin_class(), self._hidden(9).to(self.device)
        before, state = hidden.clone(), self._state(pooler)
        pooler.update(state, hidden)
        self._finish(pooler, state)
        assert torch.equal(hidden, before), "hidden states have changed"

    @level(3)
    def test_prompts_in_turns_are_kept_apart(self, subject: Subject) -> None:
        """Chunks of several requests, mixed, one that is given up and one that is NaN among them."""
        pooler = subject.plugin_class()
        prompts = [self._hidden(20, seed) for seed in range(4)]
        states = [self._state(pooler) for _ in prompts]
        broken = self._state(pooler)
        for start in range(0, 20, 4):
            for prompt, state in zip(prompts, states, strict=True):
                self._update(pooler, state, prompt[start : start + 4])
            self._update(pooler, broken, torch.full((3, self.hidden_size), float("nan")))
        results = [self._finish(pooler, state) for state in reversed(states)][::-1]
        # Only now: a result that is written again by a later one is seen here.
        for prompt, result in zip(prompts, results, strict=True):
            self._check(result.cpu(), prompt)

    @level(3)
    def test_two_poolers_share_no_state(self, subject: Subject) -> None:
        """Two engines in one process, twice over."""
        for _ in range(2):
            first, second = subject.plugin_class(), subject.plugin_class()
            one, two = self._state(first), self._state(second)
            for start in range(0, 12, 3):
                self._update(first, one, self._hidden(12, 1)[start : start + 3])
                self._update(second, two, self._hidden(12, 2)[start : start + 3])
            self._check(self._finish(first, one).cpu(), self._hidden(12, 1))
            self._check(self._finish(second, two).cpu(), self._hidden(12, 2))
