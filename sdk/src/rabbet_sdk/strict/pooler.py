"""A pooler that gives the mean of all hidden states, as a vector of length 1.

Shapes: T tokens of one chunk, N hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rabbet.contracts import Refusal, register_pooler
from rabbet.contracts.pooler import Pooler, PoolerQuery
from rabbet_sdk.strict import seal

__all__ = ["StrictPooler"]


@dataclass(slots=True)
class _Sum:
    """The state of one request: its size does not grow with the prompt."""

    total_N: torch.Tensor | None = None
    count: int = 0


@register_pooler("strict")
@seal
class StrictPooler(Pooler):
    """Mean pooling for any architecture. All state is in what ``new_state`` gives, since prompts come in turns."""

    @classmethod
    def supports(cls, query: PoolerQuery) -> tuple[Refusal, ...]:
        """One vector a text, of the model's own size."""
        refusals = []
        if query.task != "embed":
            refusals.append(Refusal(code="TASK", message=f"task {query.task!r} is not embed, the only one it knows"))
        if query.dimensions is not None:
            message = f"vectors of {query.dimensions} dimensions are asked for; it gives the model's hidden size only"
            refusals.append(Refusal(code="DIMENSIONS", message=message, fix="leave dimensions out"))
        return tuple(refusals)

    def new_state(self) -> _Sum:
        """Nothing yet."""
        return _Sum()

    def update(self, state: _Sum, hidden_TN: torch.Tensor) -> None:
        """Add to the sum, in float64: a long prompt of bfloat16 would lose its last tokens otherwise.

        The sum is a new tensor; ``hidden_TN`` is the engine's buffer, which the next step overwrites.
        """
        total_N = hidden_TN.double().sum(dim=0)
        state.total_N = total_N if state.total_N is None else state.total_N + total_N
        state.count += hidden_TN.shape[0]

    def finish(self, state: _Sum) -> torch.Tensor:
        """float32 [N]."""
        assert state.total_N is not None and state.count, "a request has at least one token"
        return torch.nn.functional.normalize(state.total_N / state.count, dim=0).float()
