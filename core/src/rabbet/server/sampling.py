"""From a request's body to sampling parameters: request field over server default over OpenAI's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rabbet.config.schema import ServerConfig
from rabbet.errors import InvalidRequestError, shorten
from rabbet.server.protocol import ChatCompletionRequest, CompletionRequest, _Sampling
from rabbet.types.sampling import OutputKind, RepetitionDetection, SamplingParams

__all__ = ["chat_sampling", "completion_sampling"]

_COPIED = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
    "logprob_token_ids", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
)  # fmt: skip
_MAX_STOP_CHARS = 1024
_MAX_LIST = 4096
_COMPLETIONS_MAX_TOKENS = 16


def completion_sampling(
    body: CompletionRequest, defaults: Mapping[str, Any], limits: ServerConfig, *, is_echo_only: bool
) -> SamplingParams:
    """Parameters of a completions request. OpenAI's default of 16 tokens stands before the model's."""
    values = _common(body, defaults, limits)
    values["max_tokens"] = _COMPLETIONS_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if is_echo_only:
        values["max_tokens"] = 1
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    return _build(values, body)


def chat_sampling(body: ChatCompletionRequest, defaults: Mapping[str, Any], limits: ServerConfig) -> SamplingParams:
    """Parameters of a chat request. Without a limit the answer may fill the context."""
    values = _common(body, defaults, limits)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    values["max_tokens"] = asked if asked is not None else defaults.get("max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs", value=body.top_logprobs)
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise InvalidRequestError(
            f"top_logprobs is {body.top_logprobs}, but must not be negative",
            field="top_logprobs",
            value=body.top_logprobs,
        )
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return _build(values, body, rename={"logprobs": "top_logprobs"})


def _common(body: _Sampling, defaults: Mapping[str, Any], limits: ServerConfig) -> dict[str, Any]:
    values = {key: value for key, value in defaults.items() if key != "max_tokens"}
    given = body.model_fields_set
    values |= {key: getattr(body, key) for key in _COPIED if key in given and getattr(body, key) is not None}
    if body.n > limits.max_n:
        raise InvalidRequestError(f"n is {body.n}, the limit is {limits.max_n} (--max-n)", field="n", value=body.n)
    values["stop"] = _stops(body.stop, limits)
    for name in ("logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids"):
        size = len(getattr(body, name) or ())
        if size > _MAX_LIST and name != "allowed_token_ids":
            raise InvalidRequestError(f"{name} has {size} entries, the limit is {_MAX_LIST}", field=name)
    if body.logit_bias is not None:
        values["logit_bias"] = body.logit_bias
    if body.repetition_detection is not None:
        values["repetition_detection"] = _repetition(body.repetition_detection)
    for name in ("response_format", "structured_outputs"):
        value = getattr(body, name)
        if value and not (name == "response_format" and value.get("type") == "text"):
            raise InvalidRequestError(
                f"{name} needs a grammar plugin, and none is installed; see: rabbet plugins list --kind grammar",
                field=name,
            )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", field="stream_options")
    values["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    if body.vllm_xargs:
        values["extra_args"] = body.vllm_xargs
    return values


def _stops(stop: str | list[str] | None, limits: ServerConfig) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > limits.max_stop:
        raise InvalidRequestError(
            f"stop has {len(stops)} entries, the limit is {limits.max_stop} (--max-stop)",
            field="stop",
            value=len(stops),
        )
    for item in stops:
        if len(item) > _MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop holds {shorten(item)} with {len(item)} characters, the limit is {_MAX_STOP_CHARS}", field="stop"
            )
    return stops


def _repetition(value: Mapping[str, int]) -> RepetitionDetection:
    try:
        return RepetitionDetection(**value)
    except TypeError as error:
        raise InvalidRequestError(
            "repetition_detection takes max_pattern_size, min_pattern_size and min_count", field="repetition_detection"
        ) from error


def _build(values: dict[str, Any], body: _Sampling, rename: Mapping[str, str] | None = None) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        field = (rename or {}).get(error.field or "", error.field)
        if field == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
            field = "max_completion_tokens"
        raise InvalidRequestError(str(error), field=field, value=error.value) from None
