"""What a completions call and a chat call have in common once they are checked."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rabbet.errors import ContextLengthError, InvalidRequestError
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.front.tokenizer import Tokenizer
from rabbet.server.protocol import SamplingRequest
from rabbet.server.state import ServerState
from rabbet.server.stream import EventWriter
from rabbet.server.usage import usage
from rabbet.types.sampling import SamplingParams

__all__ = ["Call", "truncated"]

_Body = TypeVar("_Body", bound=SamplingRequest)


@dataclass(slots=True)
class Call(Generic[_Body]):
    """One request, checked.

    Attributes:
        body: As it was sent.
        state: The server's.
        model: Name to report.
        prompts: Its prompts; one for chat.
        sampling: Parameters of each prompt.
        completion_id: Public id of the answer.
        clamp_max_tokens: A limit beyond the context is lowered and not refused.
        created: Seconds since the epoch.
    """

    body: _Body
    state: ServerState
    model: str
    prompts: list[TokenizedPrompt]
    sampling: list[SamplingParams]
    completion_id: str
    clamp_max_tokens: bool
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def as_ids(self) -> bool:
        """Whether tokens are shown as ``token_id:N``."""
        given = self.body.return_tokens_as_token_ids
        return self.state.config.return_tokens_as_token_ids if given is None else given

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, also while the server stops."""
        return self.state.llm.tokenizer if self.state.llm is not None else None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage."""
        options = self.body.stream_options
        return self.state.config.enable_force_include_usage or (options is not None and options.include_usage)

    @property
    def is_continuous(self) -> bool:
        """Whether every chunk carries usage."""
        options = self.body.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def envelope(self, kind: str) -> dict[str, Any]:
        """What stands around choices."""
        return {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}

    def writer(self, kind: str) -> EventWriter:
        """A writer of chunks."""
        return EventWriter(self.envelope(kind))

    def outputs(self, number: int = 0) -> AsyncGenerator[RequestOutput, None]:
        """What the engine makes of one prompt."""
        return self.state.generate(
            self.prompts[number],
            self.sampling[number],
            public_id=self.completion_id,
            request_id=self.body.request_id,
            priority=self.body.priority,
            clamp_max_tokens=self.clamp_max_tokens,
        )

    def usage(self, num_output: int, num_cached: int) -> dict[str, Any]:
        """Token counts of the answer so far."""
        details = num_cached if self.state.config.enable_prompt_tokens_details else None
        return usage(sum(len(prompt.token_ids) for prompt in self.prompts), num_output, num_cached=details)


def truncated(prompt: TokenizedPrompt, body: SamplingRequest, room: int) -> TokenizedPrompt:
    """The prompt with at most ``truncate_prompt_tokens`` tokens; -1 keeps what fits into ``room`` tokens.

    Raises:
        InvalidRequestError: If the number is no length, or longer than the context.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0 or limit < -1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {limit}, but must be -1 or at least 1",
            field="truncate_prompt_tokens",
            value=limit,
        )
    if limit > room:
        raise ContextLengthError(
            f"truncate_prompt_tokens is {limit}, but the context and max_tokens leave {room} tokens for the prompt",
            field="truncate_prompt_tokens",
            value=limit,
        )
    keep = room if limit == -1 else limit
    if keep < 1 or len(prompt.token_ids) <= keep:
        return prompt
    ids = prompt.token_ids[:keep] if body.truncation_side == "right" else prompt.token_ids[-keep:]
    return TokenizedPrompt(None, ids, prompt.cache_salt)
