"""A request inside the engine process: what was asked (frozen) and how far it is (changed by the scheduler)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rabbet.types.outputs import FinishReason
from rabbet.types.sampling import SamplingParams

__all__ = ["EngineRequest", "Request", "RequestStatus"]


class RequestStatus(str, Enum):
    """Where a request stands."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """A checked and tokenised request, as a front end sends it to the engine.

    Attributes:
        request_id: Unique for the life of the engine; made by the front end, never by a client.
        prompt_token_ids: At least one id, all inside the vocabulary.
        sampling: n is 1 here: a front end turns n > 1 into n requests.
        max_tokens: The resolved limit on new tokens.
        eos_token_ids: End tokens of the model; empty with ``ignore_eos``.
        bad_words_token_ids: ``sampling.bad_words`` as token sequences.
        arrival_time_s: ``time.time()`` at the front end.
        priority: Lower goes first, under the priority policy.
        cache_salt: Requests with different salts never share cached blocks.
        adapter: Name of the adapter, or None.
        kv_transfer_params: For a KV connector.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: list[int] = field(default_factory=list)
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    arrival_time_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """State of a request; owned by the scheduler, read by the KV manager.

    ``token_ids`` holds the prompt and every token whose value the scheduler knows. With async scheduling
    ``num_pending_tokens`` more are being computed: planning counts them, stop checks do not.

        0            num_computed_tokens      num_known_tokens
        |--- KV in cache ---|---- to compute ----|-- pending --|
    """

    spec: EngineRequest
    token_ids: list[int]
    seed: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_scheduled_time_s: float | None = None

    @property
    def request_id(self) -> str:
        """The engine's id."""
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt tokens and generated tokens whose value is known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose value is known."""
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether its last delta has been made."""
        return self.status is RequestStatus.FINISHED
