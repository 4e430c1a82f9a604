"""Contract of a speculative proposer: it guesses tokens that the target then verifies in one step.

Lookup methods (n-gram, suffix trees) read token ids only; draft models own a model and cache groups; heads read the
target's hidden states. All of them get the same object and take what they need.

Shapes: B requests, T tokens, N hidden size, V vocabulary, k drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

    from rabbet.types.kv import KVCacheSpec

__all__ = ["DraftBatch", "DraftResult", "Proposer", "ProposerContext", "ProposerQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerQuery:
    """What a proposer is asked about before it is built."""

    device_type: str
    arch: str
    dtype: str
    target_architecture: str
    vocab_size: int
    num_speculative_tokens: int
    is_async: bool
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposerContext:
    """What a proposer is built from. ``target`` is the loaded model, for heads that share its embedding."""

    query: ProposerQuery
    device: torch.device
    max_num_requests: int
    max_model_len: int
    target: Any
    build_context: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBatch:
    """State of the batch after the target has sampled.

    Attributes:
        request_ids: B ids; a row stands for the same request until it is in ``finished_request_ids``.
        token_ids: For each request all accepted tokens. Host lists, valid until the next call; None where the
            sampled tokens are still on the device only (``sampled_ids``).
        num_tokens: Accepted tokens of each request.
        max_drafts: Most drafts wanted for each request in this step; 0 for rows that must not draft.
        sampled_ids: int64 [B, k + 1] on the device: tokens accepted in this step, -1 past their number.
        num_sampled: int32 [B] on the device.
        hidden_states: [T, N] of the target's step, if ``needs_hidden_states``.
        last_token_index: int64 [B]: row in ``hidden_states`` of each request's last accepted token.
        attention: ``AttentionBatch`` for each of the proposer's cache groups.
        finished_request_ids: Requests to forget.
        sampling: Temperature and the like, a request.
    """

    request_ids: Sequence[str]
    token_ids: Sequence[Sequence[int]] | None
    num_tokens: Sequence[int]
    max_drafts: Sequence[int]
    sampled_ids: torch.Tensor | None = None
    num_sampled: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    last_token_index: torch.Tensor | None = None
    attention: Mapping[int, Any] = field(default_factory=dict)
    finished_request_ids: Sequence[str] = ()
    sampling: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftResult:
    """Drafts, on the host or on the device.

    Attributes:
        token_ids: For each request up to ``max_drafts`` ids; may be empty. None if on the device.
        device_token_ids: int64 [B, k], -1 where there is no draft. None if on the host.
        probabilities: float32 [B, k, V]: the distribution that each draft was drawn from, or None for
            deterministic drafts (then q is 1 at the draft).
    """

    token_ids: list[list[int]] | None = None
    device_token_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None


class Proposer(ABC):
    """Proposes drafts. One instance a rank; all ranks must propose the same."""

    needs_hidden_states: bool = False
    """Whether ``DraftBatch.hidden_states`` is wanted."""

    @classmethod
    @abstractmethod
    def supports(cls, query: ProposerQuery) -> tuple[Refusal, ...]:
        """Every reason why it cannot work; empty: it can."""

    def __init__(self, context: ProposerContext) -> None:
        self.context = context

    def load(self) -> None:
        """Load weights, if there are any. Called once, before memory is divided."""
        return None

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Cache of the proposer's own layers, under names that the target does not use."""
        return {}

    def bind_cache(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors for the layers of ``kv_cache_specs``."""
        return None

    def warm_up(self) -> None:
        """Capture graphs, compile."""
        return None

    @abstractmethod
    def propose(self, batch: DraftBatch) -> DraftResult:
        """Up to ``max_drafts`` tokens a request. Does not wait for the device if it returns device ids."""
