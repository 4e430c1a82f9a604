"""What callers get: requests, their outputs, log probabilities. Names as users of the field know them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at one position.

    Attributes:
        logprob: Natural logarithm.
        rank: 1-based rank in the vocabulary.
        decoded_token: The token as text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds since the epoch or as durations, and how often it was preempted."""

    arrival_time_s: float
    queued_s: float | None = None
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    num_preemptions: int = 0


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        index: Its number among the ``n`` outputs.
        text: Generated text: all of it, or what is new, by ``output_kind``.
        token_ids: Likewise.
        cumulative_logprob: Sum over all tokens so far, if logprobs were asked for.
        logprobs: For each token a map from id to ``Logprob``: the chosen token and the alternatives.
        finish_reason: ``stop``, ``length``, ``abort``, ``error``, ``repetition``; None while it goes on.
        stop_reason: The stop string or stop id that ended it; None for the end token.
        error: What went wrong, with ``finish_reason`` ``error``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this output has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request, as far as it is.

    Attributes:
        request_id: Id of the request.
        prompt: The prompt as text, if it was given or rendered as text.
        prompt_token_ids: Its tokens.
        prompt_logprobs: For each prompt position (None for the first) a map from id to ``Logprob``.
        outputs: All outputs, or with ``output_kind`` ``delta`` those with news.
        finished: Whether all outputs have ended.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        metrics: Times.
        kv_transfer_params: From a KV connector.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None
