"""Contract of a pooler: one vector (or one a token) out of hidden states, for embeddings, scores and classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

__all__ = ["Pooler", "PoolerQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerQuery:
    """A task (``embed``, ``classify``, ``token_embed``, ``token_classify``) for an architecture."""

    task: str
    architecture: str
    dimensions: int | None = None


class Pooler(ABC):
    """Pools the hidden states of a request. State is kept by the caller, so that a prompt may come in chunks."""

    @classmethod
    @abstractmethod
    def supports(cls, query: PoolerQuery) -> tuple[Refusal, ...]:
        """Every reason why it cannot be used; empty: it can."""

    @abstractmethod
    def new_state(self) -> Any:
        """State of one request."""

    def new_state_for(self, query: PoolerQuery) -> Any:
        """The same for a request of this task and these dimensions; core calls this one.

        A class that serves several tasks keeps the query in the state, for ``finish``.
        """
        return self.new_state()

    @abstractmethod
    def update(self, state: Any, hidden_TN: torch.Tensor) -> None:
        """Take in the next tokens of the request."""

    @abstractmethod
    def finish(self, state: Any) -> torch.Tensor:
        """The pooled vector, float32 [N]; for ``token_`` tasks one a token, [T, N]. Classes in the place of N."""
