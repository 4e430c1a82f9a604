"""From a request's body to sampling parameters: request field over server default over OpenAI's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rabbet.errors import InvalidRequestError, shorten
from rabbet.server.protocol import ChatCompletionRequest, CompletionRequest, SamplingRequest
from rabbet.server.state import ServerState
from rabbet.types.sampling import OutputKind, RepetitionDetection, SamplingParams, StructuredOutputsParams

__all__ = ["chat_sampling", "check_entries", "completion_sampling"]

_COPIED = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
    "logprob_token_ids", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
)  # fmt: skip
_LISTS = ("logit_bias", "stop_token_ids", "bad_words", "logprob_token_ids", "allowed_token_ids")
_MAX_STOP_CHARS = 1024
_MAX_BAD_WORD_CHARS = 16_384
"""Each is tokenised twice before the request is taken."""
_MAX_LIST = 4096
_MAX_ENTRIES = 1 << 21
"""Of all lists of a request times its outputs, each of which carries them: about 40 bytes an entry in the engine."""
_MAX_XARGS_BYTES = 16_384
_COMPLETIONS_MAX_TOKENS = 16


def completion_sampling(
    body: CompletionRequest, defaults: Mapping[str, Any], state: ServerState, *, is_echo_only: bool
) -> SamplingParams:
    """Parameters of a completions request. OpenAI's default of 16 tokens stands before the model's."""
    values = _common(body, defaults, state)
    values["max_tokens"] = _COMPLETIONS_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if is_echo_only:
        values["max_tokens"] = 1
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    return _build(values, body)


def chat_sampling(body: ChatCompletionRequest, defaults: Mapping[str, Any], state: ServerState) -> SamplingParams:
    """Parameters of a chat request. Without a limit the answer may fill the context."""
    values = _common(body, defaults, state)
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


def _common(body: SamplingRequest, defaults: Mapping[str, Any], state: ServerState) -> dict[str, Any]:
    limits = state.config
    values = {key: value for key, value in defaults.items() if key != "max_tokens"}
    given = body.model_fields_set
    values |= {key: getattr(body, key) for key in _COPIED if key in given and getattr(body, key) is not None}
    if not 1 <= body.n <= limits.max_n:
        rule = "the limit is" if body.n > 0 else "but must be an integer from 1 to"
        raise InvalidRequestError(f"n is {body.n}, {rule} {limits.max_n} (--max-n)", field="n", value=body.n)
    if "prompt_embeds" in body.unknown_fields:
        text = "prompt_embeds are not taken by this server; send a prompt as text or token ids"
        raise InvalidRequestError(text, field="prompt_embeds")
    values["stop"] = _stops(body.stop, limits.max_stop)
    most_allowed = max(_MAX_LIST, state.engine().model_info.vocab_size)
    for name in _LISTS:
        size, limit = len(getattr(body, name) or ()), most_allowed if name == "allowed_token_ids" else _MAX_LIST
        if size > limit:
            raise InvalidRequestError(f"{name} has {size} entries, the limit is {limit}", field=name, value=size)
    num_chars = sum(map(len, body.bad_words or ()))
    if num_chars > _MAX_BAD_WORD_CHARS:
        raise InvalidRequestError(
            f"bad_words hold {num_chars} characters in all, the limit is {_MAX_BAD_WORD_CHARS}", field="bad_words"
        )
    for name in ("priority", "repetition_detection", "response_format", "structured_outputs", "vllm_xargs"):
        _check_integers(name, getattr(body, name))
    if body.logit_bias is not None:
        values["logit_bias"] = body.logit_bias
    if body.repetition_detection is not None:
        values["repetition_detection"] = _repetition(body.repetition_detection)
    values["structured_outputs"] = _structure(body, state.has_grammar)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", field="stream_options")
    values["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    if body.vllm_xargs:
        size = len(msgspec.json.encode(body.vllm_xargs))
        if size > _MAX_XARGS_BYTES:
            text = f"vllm_xargs has {size} bytes as JSON, the limit is {_MAX_XARGS_BYTES}"
            raise InvalidRequestError(text, field="vllm_xargs", value=size)
        values["extra_args"] = body.vllm_xargs
    return values


def check_entries(sampling: SamplingParams, num_outputs: int) -> None:
    """Refuse lists that are short enough for one output and too long for ``num_outputs`` of them.

    Raises:
        InvalidRequestError: With entries, outputs and limit; it names the longest list.
    """
    sizes = {name: len(getattr(sampling, name) or ()) for name in _LISTS}
    sizes["bad_words"] = sum(map(len, sampling.bad_words))
    total = sum(sizes.values())
    if total * num_outputs > _MAX_ENTRIES:
        raise InvalidRequestError(
            f"{', '.join(name for name in _LISTS if sizes[name])} have {total} entries for each of {num_outputs} outputs, "
            f"the limit is {_MAX_ENTRIES} in all (bad_words count by characters); send fewer outputs at once",
            field=max(sizes, key=lambda name: sizes[name]),
            value=total,
        )


def _structure(body: SamplingRequest, has_grammar: bool) -> StructuredOutputsParams | None:
    """The shape that the answer must have.

    Raises:
        InvalidRequestError: If the shape is none, or asked for twice, or no grammar plugin is in use.
    """
    form, direct = body.response_format, body.structured_outputs
    if form is not None and form.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(
            f"response_format.type is {shorten(form.get('type'))}, but must be text, json_object or json_schema",
            field="response_format",
        )
    names = [
        name for name, given in (("response_format", _is_shape(form)), ("structured_outputs", bool(direct))) if given
    ]
    if not names:
        return None
    if len(names) == 2:
        raise InvalidRequestError("response_format and structured_outputs exclude each other", field="response_format")
    if not has_grammar:
        raise InvalidRequestError(
            f"{names[0]} needs a grammar plugin, and none is in use; see: rabbet plugins list --kind grammar",
            field=names[0],
        )
    if form is None or not _is_shape(form):
        return _structured_outputs(direct or {})
    if form["type"] == "json_object":
        return StructuredOutputsParams(json_object=True)
    wrapper = form.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError("response_format.json_schema.schema is missing", field="response_format")
    return StructuredOutputsParams(json=schema)


def _is_shape(form: Mapping[str, Any] | None) -> bool:
    return form is not None and form.get("type") != "text"


def _structured_outputs(given: Mapping[str, Any]) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(**{key: value for key, value in given.items() if value is not None})
    except TypeError as error:
        known = ", ".join(StructuredOutputsParams.__dataclass_fields__)
        raise InvalidRequestError(
            f"structured_outputs holds an unknown key; known are {known}", field="structured_outputs"
        ) from error


def _check_integers(field: str, value: Any) -> None:
    """What the messages to the engine can hold, at any depth; a body is not nested deeply."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_integers(field, item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidRequestError(f"{field} holds {shorten(value)}, but integers of 64 bits are the limit", field=field)


def _stops(stop: str | list[str] | None, max_stop: int) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > max_stop:
        raise InvalidRequestError(
            f"stop has {len(stops)} entries, the limit is {max_stop} (--max-stop)",
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


def _build(values: dict[str, Any], body: SamplingRequest, rename: Mapping[str, str] | None = None) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        field = (rename or {}).get(error.field or "", error.field)
        if field == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
            field = "max_completion_tokens"
        text = str(error).replace(error.field or " ", field or " ", 1)
        raise InvalidRequestError(text, field=field, value=error.value) from None
