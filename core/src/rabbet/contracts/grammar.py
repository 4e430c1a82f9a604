"""Contract of a structured-output grammar engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import numpy as np

    from rabbet.types.sampling import StructuredOutputsParams

__all__ = ["Grammar", "GrammarBackend", "GrammarContext", "GrammarQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarQuery:
    """The kinds of specification that are needed: ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``,
    ``structural_tag``."""

    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarContext:
    """Built once an engine. ``tokenizer`` is transformers' object."""

    tokenizer: Any
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Grammar(ABC):
    """The state of one request in its grammar."""

    @abstractmethod
    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by the longest accepted prefix of ``token_ids``; returns its length."""

    @abstractmethod
    def count_accepted(self, token_ids: Sequence[int]) -> int:
        """Length of the prefix that ``accept`` would take, without advancing (for drafts)."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Go back, exactly."""

    @abstractmethod
    def fill_bitmask(self, row: np.ndarray) -> None:
        """Set bit i of the int32 words of ``row`` iff token i may come next; all other bits are cleared."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether only an end token may follow."""


class GrammarBackend(ABC):
    """Compiles specifications. ``compile`` runs in threads or in a killable process, never in the engine's step."""

    @classmethod
    @abstractmethod
    def supports(cls, query: GrammarQuery) -> tuple[Refusal, ...]:
        """Every reason why it cannot be used; empty: it can."""

    def __init__(self, context: GrammarContext) -> None:
        self.context = context

    @abstractmethod
    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """A fresh grammar state.

        Raises:
            rabbet.errors.InvalidRequestError: With the place inside the specification that cannot be compiled.
        """
