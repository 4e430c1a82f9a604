"""Bodies of requests, as OpenAI defines them and with the field's extensions. null means absent; unknown fields are ignored.

Types are strict: ``"2"`` is no number. Ranges that are about sampling are checked by ``SamplingParams``.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "REQUEST_ID",
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
]


REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""What a client may call its request: nothing that could forge a line of a log."""


class _Body(BaseModel):
    """Drops nulls, keeps unknown fields apart so that they can be counted."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @property
    def unknown_fields(self) -> list[str]:
        """Names that this server does not know."""
        return sorted(self.model_extra or ())


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingRequest(_Body):
    """Fields that completions and chat share."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    repetition_detection: dict[str, int] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    user: Any = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @field_validator("request_id")
    @classmethod
    def _check_request_id(cls, value: str | None) -> str | None:
        if value is not None and not REQUEST_ID.fullmatch(value):
            raise ValueError("must be 1 to 128 of the characters A-Z a-z 0-9 . _ -")
        return value


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class ChatCompletionRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | dict[str, Any] | None = None


class TokenizeRequest(_Body):
    """``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]
