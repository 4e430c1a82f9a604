"""What a caller may ask of the sampler, with its defaults and ranges."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rabbet.errors import InvalidRequestError, shorten

__all__ = [
    "GREEDY_EPSILON",
    "MAX_LOGPROB_TOKEN_IDS",
    "OutputKind",
    "RepetitionDetection",
    "SamplingParams",
    "StructuredOutputsParams",
]

GREEDY_EPSILON = 1e-5
"""Temperatures below this one mean greedy decoding."""

_MIN_TEMPERATURE = 0.01
_NO_LISTS = {"n", "seed", "max_tokens", "prompt_logprobs", "top_k", "stream_interval", "skip_reading_prefix_cache"}
"""Fields that no check of a list looks at."""
MAX_LOGPROB_TOKEN_IDS = 128
_MAX_N = 16384


class OutputKind(str, Enum):
    """What each output object of a stream holds: everything so far, only what is new, or the end alone."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, kw_only=True, slots=True)
class RepetitionDetection:
    """Ends a request whose tail repeats a pattern.

    Attributes:
        max_pattern_size: Longest pattern looked for, in tokens.
        min_pattern_size: Shortest one.
        min_count: How often the pattern must stand in a row; at least 2.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        _check_int("repetition_detection.min_pattern_size", self.min_pattern_size, low=1)
        _check_int("repetition_detection.max_pattern_size", self.max_pattern_size, low=self.min_pattern_size)
        _check_int("repetition_detection.min_count", self.min_count, low=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """The shape that the output must have. Exactly one of the first six fields is set."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(kinds)}; got {', '.join(given) or 'none'}",
                field="structured_outputs",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Everything is checked on construction; what depends on the model (vocabulary, context) is checked by
    ``check_against_model``.

    Attributes:
        n: Number of outputs.
        presence_penalty: -2..2, subtracted once from the logit of each token already generated.
        frequency_penalty: -2..2, subtracted for each time that the token was generated.
        repetition_penalty: > 0; logits of tokens of prompt and output are divided (positive) or multiplied.
        temperature: 0..2; below 1e-5 greedy; values between that and 0.01 are raised to 0.01.
        top_p: (0, 1]; 1 is off.
        top_k: Keep that many tokens; 0 and -1 are off.
        min_p: [0, 1]; drop tokens less likely than this share of the likeliest; 0 is off.
        seed: Same seed, same tokens, whatever else is in the batch; None or -1 draws a random one.
        stop: Strings that end the output; they are cut off unless ``include_stop_str_in_output``.
        stop_token_ids: Ids that end the output.
        ignore_eos: Go on after the model's end token.
        max_tokens: Limit on new tokens; None means up to the end of the context.
        min_tokens: No end token, stop id or stop string before that many tokens.
        logprobs: Alternatives to report at each output position; -1 is the whole vocabulary.
        prompt_logprobs: The same for each prompt position but the first.
        logprob_token_ids: Report exactly these ids instead of the likeliest.
        detokenize: Produce text at all.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between them.
        include_stop_str_in_output: Keep the stop string in the text.
        bad_words: Strings that must not be generated.
        logit_bias: Id to bias, clamped to -100..100.
        allowed_token_ids: Only these ids may be generated.
        structured_outputs: Grammar that the output must follow.
        repetition_detection: End the request when its tail repeats.
        thinking_token_budget: Limit on reasoning tokens; -1 is off.
        skip_reading_prefix_cache: Compute the whole prompt anew; True by itself with ``prompt_logprobs``.
        extra_args: For logits processors and connectors of plugins.
        output_kind: What each object of a stream holds.
        stream_interval: Emit a stream object only every that many tokens.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: list[str] = field(default_factory=list)
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_limits()
        self._check_lists()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def needs_penalties(self) -> bool:
        """Whether the sampler must count the tokens of this request."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_against_model(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Refuse ids outside the vocabulary and more logprobs than the server allows.

        Raises:
            InvalidRequestError: Naming the field, the value and the limit.
        """
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is None or max_logprobs == -1:
                continue
            if count == -1 or count > max_logprobs:
                raise InvalidRequestError(
                    f"{name} is {count}, but this server allows at most {max_logprobs} (--max-logprobs)",
                    field=name,
                    value=count,
                )
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            _check_ids(name, getattr(self, name) or (), vocab_size)
        _check_ids("logit_bias", self.logit_bias or (), vocab_size)

    def _normalise(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, [])
        if self.seed == -1 and not isinstance(self.seed, bool):
            object.__setattr__(self, "seed", None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                object.__setattr__(self, name, 1)
            elif getattr(self, name) is False:
                object.__setattr__(self, name, None)
        if self.skip_reading_prefix_cache is None:
            object.__setattr__(self, "skip_reading_prefix_cache", self.prompt_logprobs is not None)

    def _check_numbers(self) -> None:
        _check_float("presence_penalty", self.presence_penalty, low=-2, high=2)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        _check_float("repetition_penalty", self.repetition_penalty, low=0, low_open=True)
        _check_float("temperature", self.temperature, low=0, high=2)
        _check_float("top_p", self.top_p, low=0, high=1, low_open=True)
        _check_float("min_p", self.min_p, low=0, high=1)
        _check_int("top_k", self.top_k, low=-1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**63 - 1)
        if self.is_greedy:
            for name, value in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                object.__setattr__(self, name, value)
        elif self.temperature < _MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", _MIN_TEMPERATURE)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def _check_limits(self) -> None:
        _check_int("n", self.n, low=1, high=_MAX_N)
        if self.n > 1 and self.is_greedy:
            raise InvalidRequestError(
                f"n is {self.n}, but greedy decoding gives one output only; raise temperature or set n to 1",
                field="n",
                value=self.n,
            )
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, but max_tokens allows only {self.max_tokens}",
                field="min_tokens",
                value=self.min_tokens,
            )
        for name in ("logprobs", "prompt_logprobs", "thinking_token_budget"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=-1)
        if self.stream_interval is not None:
            _check_int("stream_interval", self.stream_interval, low=1)

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            _check_strings(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize, which is off", field="stop", value=self.stop)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) is not None:
                _check_int_list(name, getattr(self, name))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so no token could be chosen", field="allowed_token_ids"
            )
        ids = self.logprob_token_ids
        if ids is not None and len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequestError(
                f"logprob_token_ids holds {len(ids)} ids, the limit is {MAX_LOGPROB_TOKEN_IDS}",
                field="logprob_token_ids",
            )
        if ids is not None and self.logprobs is not None and self.logprobs != len(ids):
            raise InvalidRequestError(
                f"logprobs is {self.logprobs}, but logprob_token_ids holds {len(ids)} ids; leave logprobs unset",
                field="logprob_token_ids",
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again; lists are shared, and not looked at if none is concerned."""
        if not changes.keys() <= _NO_LISTS:
            return replace(self, **changes)
        made = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(made, name, value)
        made._normalise()
        made._check_numbers()
        made._check_limits()
        return made


def _fail(name: str, value: object, rule: str) -> None:
    raise InvalidRequestError(f"{name} is {shorten(value)}, but must be {rule}", field=name, value=value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _check_float(name: str, value: object, *, low: float, high: float = math.inf, low_open: bool = False) -> None:
    bracket = "(" if low_open else "["
    rule = f"a finite number > {low:g}" if high == math.inf and low_open else f"a number in {bracket}{low:g}, {high:g}]"
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not _is_finite(value)
        or value > high
        or value < low
        or (low_open and value == low)
    ):
        _fail(name, value, rule)


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    rule = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        _fail(name, value, rule)


def _check_strings(name: str, values: object) -> None:
    if not isinstance(values, list | tuple):
        _fail(name, values, "a string or a list of strings")
    else:
        for value in values:
            if not isinstance(value, str) or not value:
                _fail(name, value, "a list of non-empty strings")


def _check_int_list(name: str, values: object) -> None:
    if not isinstance(values, list | tuple):
        _fail(name, values, "a list of token ids")
    else:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                _fail(name, value, "a list of token ids")


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} holds the id {shorten(token_id)}; the vocabulary goes from 0 to {vocab_size - 1}",
                field=name,
                value=token_id,
            )


def _checked_bias(bias: dict[Any, Any]) -> dict[int, float]:
    checked: dict[int, float] = {}
    if not isinstance(bias, dict):
        _fail("logit_bias", bias, "a map from token id to a number")
    for key, value in bias.items():
        try:
            token_id = int(key) if not isinstance(key, float | bool) else None
        except (TypeError, ValueError):
            token_id = None
        if token_id is None:
            _fail("logit_bias", key, "a map whose keys are token ids")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            _fail("logit_bias", value, "a map whose values are numbers from -100 to 100")
        checked[token_id] = max(-100.0, min(100.0, float(value)))
    return checked
