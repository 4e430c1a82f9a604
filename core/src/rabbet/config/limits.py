"""Budgets of a step and the longest context: from the user, the model and the hardware, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbet.config.schema import EngineConfig
from rabbet.contracts.platform import BatchDefaults
from rabbet.errors import ConfigError, shorten

__all__ = ["Budgets", "count", "derived_max_model_len", "resolve_budgets"]

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_UNKNOWN_LENGTH = 2048
_MAX_LENGTH = 1 << 40
_MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Resolved limits; the meaning of each is that of ``ResolvedConfig``."""

    max_model_len: int
    is_max_model_len_auto: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    is_chunked_prefill: bool
    is_async: bool
    notes: tuple[str, ...]


def derived_max_model_len(hf: Mapping[str, Any]) -> tuple[int, int]:
    """The context that the model was made for, and the longest that its rotary scaling reaches.

    ``max_position_embeddings`` already holds the extended length for yarn and llama3 scaling; with linear scaling it is
    the original one, and with an ``original_max_position_embeddings`` for yarn it may be. Dynamic scaling changes the
    angles for short prompts too, once a longer context is served: so that is for the user to ask for.

    Raises:
        ConfigError: If config.json holds something else than a length.
    """
    lengths = [_number(hf, key) for key in _LENGTH_KEYS if hf.get(key) is not None]
    length = int(min(lengths)) if lengths else _UNKNOWN_LENGTH
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_parameters is {shorten(rope)}, but must be an object", field="model")
    kind = rope.get("rope_type") or rope.get("type")
    factor = _number(rope, "factor") if rope.get("factor") else 1.0
    if kind == "yarn" and rope.get("original_max_position_embeddings"):
        length = max(length, int(_number(rope, "original_max_position_embeddings") * factor))
    elif kind == "linear":
        length = int(length * factor)
    return length, int(length * max(factor, 1.0)) if kind == "dynamic" else length


def _number(values: Mapping[str, Any], key: str) -> float:
    """A positive number of config.json, which anybody may have written."""
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_LENGTH:
        raise ConfigError(f"config.json: {key} is {shorten(value)}, but must be a positive number", field="model")
    return value


def count(
    values: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 1, most: int = _MAX_COUNT
) -> int:
    """The integer under the first of ``keys`` that config.json has; ``default`` if it has none of them.

    Raises:
        ConfigError: If it is something else, lies outside ``least`` to ``most``, or is missing and has no default.
    """
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int) or (value != default and not least <= value <= most):
        told = f"config.json: {key} is {shorten(value)}, but must be an integer from {least} to {most}"
        raise ConfigError(f"{told}; --hf-overrides lays another value over it", field="model")
    return value


def resolve_budgets(config: EngineConfig, hf: Mapping[str, Any], defaults: BatchDefaults) -> Budgets:
    """All limits.

    Raises:
        ConfigError: Naming the option, its value and what would be possible.
    """
    notes: list[str] = []
    length, is_auto = _max_model_len(config, *derived_max_model_len(hf))
    scheduler = config.scheduler
    is_chunked = scheduler.enable_chunked_prefill is not False
    factor = 2 if config.performance_mode == "throughput" else 1
    num_seqs = scheduler.max_num_seqs or defaults.max_num_seqs * factor
    num_tokens = scheduler.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = max(min(defaults.max_num_batched_tokens * factor, num_seqs * length), num_seqs)
        if not is_chunked and num_tokens < length:
            notes.append(f"max_num_batched_tokens raised from {num_tokens} to {length}: chunked prefill is off")
            num_tokens = length
    elif num_tokens > (most := num_seqs * length):
        told = f"from {num_tokens} to {most}, all that max_num_seqs and max_model_len allow"
        notes.append(f"max_num_batched_tokens lowered {told}")
        num_tokens = most
    if num_tokens < num_seqs:
        if scheduler.max_num_seqs is not None:
            raise ConfigError(
                f"--max-num-batched-tokens is {num_tokens}, less than --max-num-seqs {num_seqs}: each running request "
                "needs a token a step; raise the first or lower the second",
                field="scheduler.max_num_batched_tokens",
            )
        notes.append(f"max_num_seqs lowered from {num_seqs} to {num_tokens}, the tokens of a step")
        num_seqs = num_tokens
    if not is_chunked and num_tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens is {num_tokens}, less than the context of {length}, and chunked prefill is off; "
            f"raise it to {length}, lower --max-model-len, or drop --no-enable-chunked-prefill",
            field="scheduler.max_num_batched_tokens",
        )
    if scheduler.long_prefill_token_threshold > length:
        raise ConfigError(
            f"--long-prefill-token-threshold is {scheduler.long_prefill_token_threshold}, more than the context of {length}",
            field="scheduler.long_prefill_token_threshold",
        )
    return Budgets(
        max_model_len=length,
        is_max_model_len_auto=is_auto,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        is_chunked_prefill=is_chunked,
        is_async=scheduler.async_scheduling is not False,
        notes=tuple(notes),
    )


def _max_model_len(config: EngineConfig, derived: int, longest: int) -> tuple[int, bool]:
    asked = config.model.max_model_len
    if asked in (None, "auto", -1):
        return derived, True
    length = int(asked)
    if length > longest:
        raise ConfigError(
            f"--max-model-len is {length}, but the model was made for {longest} tokens; lower it, or extend the model "
            "with --hf-overrides (rope_parameters)",
            field="model.max_model_len",
        )
    return length, False
