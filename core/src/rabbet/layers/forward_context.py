"""What attention layers read while the model runs: caches and metadata, set by the runner for the length of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.attention import AttentionBackend
    from rabbet.contracts.kv_connector import ConnectorWorker

__all__ = ["ForwardContext", "get_forward_context", "set_forward_context"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """One step.

    Attributes:
        kv_caches: Attention layer to its cache tensor; empty while memory is profiled.
        metadata: Attention layer to what its backend made of the step.
        backends: Attention layer to its backend.
        num_tokens: Real tokens; rows past it are padding.
        connector: Worker half of the KV connector, or None.
    """

    kv_caches: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    backends: Mapping[str, AttentionBackend] = field(default_factory=dict)
    num_tokens: int = 0
    connector: ConnectorWorker | None = None


_current: ContextVar[ForwardContext | None] = ContextVar("rabbet_forward_context", default=None)


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Make ``context`` the one that layers of this thread see."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The context of the step that runs.

    Raises:
        RuntimeError: If no step runs in this thread.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError("no forward context: attention layers run inside a step of the model runner only")
    return context
