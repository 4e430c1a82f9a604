"""What comes back: from a step to the scheduler, and from the engine to a front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["FinishReason", "KVTransferResult", "RequestDelta", "StepResult", "TokenLogprobs"]


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position.

    Attributes:
        token_ids: The chosen (or prompt) token first, then the reported alternatives, likeliest first. The
            chosen token stands again among the alternatives where it is one of them.
        logprobs: Natural logarithms, aligned with ``token_ids``.
        ranks: 1-based ranks in the whole vocabulary, aligned with ``token_ids``.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferResult:
    """What a KV connector's worker half reports after a step.

    Attributes:
        finished_loading: Requests whose asynchronous load is complete, failed ones included.
        finished_saving: Requests whose blocks may be freed now.
        failed_block_ids: For each request whose load failed: the block ids of each cache group that hold no
            valid data. Reported no later than the completion of the load.
        payload: Bytes for the scheduler half of the same connector.
    """

    finished_loading: list[str] = field(default_factory=list)
    finished_saving: list[str] = field(default_factory=list)
    failed_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)
    payload: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the model runner computed for one ``StepPlan``.

    Attributes:
        step_id: That of the plan.
        sampled_token_ids: For each request that reached its last known token: the new tokens, one, or with
            speculation the accepted drafts and one more. A request that is still catching up is absent.
        logprobs: For requests that asked: one entry a sampled token.
        prompt_logprobs: For requests that asked: one entry for each prompt position from the second that the
            step computed, in order.
        draft_token_ids: Proposed tokens for the next step.
        failed: Request id to message, for requests whose row failed (for example a NaN logit). No token is
            reported for them.
        kv_transfer: Report of the KV connector, if there is one.
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    kv_transfer: KVTransferResult | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDelta:
    """News of one request, from the engine to its front end.

    A request gets any number of deltas without ``finish_reason`` and then exactly one with it.

    Attributes:
        request_id: The engine's id of the request.
        new_token_ids: Tokens since the last delta; may be empty.
        logprobs: One entry for each new token, if asked for.
        prompt_logprobs: One entry for each prompt position computed since the last delta, if asked for.
        finish_reason: Set on the last delta.
        stop_reason: The stop id that ended the request; None for the end token.
        error: What went wrong, where ``finish_reason`` is ``ERROR``. Fit to be shown to the client.
        error_kind: Name of a class of ``rabbet.errors`` where the request was refused (the client's fault, or too many
            wait); None where it failed.
        num_cached_tokens: Prompt tokens whose KV was found in a cache.
        queued_s: Seconds between arrival and first scheduling; set on the first delta.
        num_preemptions: How often the request was preempted so far.
        kv_transfer_params: What a KV connector wants the client to know; set on the last delta.
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: str | None = None
    num_cached_tokens: int = 0
    queued_s: float | None = None
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
