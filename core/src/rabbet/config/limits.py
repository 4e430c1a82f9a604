"""Budgets of a step and the longest context: from the user, the model and the hardware, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbet.config.schema import EngineConfig
from rabbet.contracts.platform import BatchDefaults
from rabbet.errors import ConfigError

__all__ = ["Budgets", "derived_max_model_len", "resolve_budgets"]

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_UNKNOWN_LENGTH = 2048


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


def derived_max_model_len(hf: Mapping[str, Any]) -> int:
    """The context that the model was made for.

    ``max_position_embeddings`` already holds the extended length for dynamic, yarn and llama3 scaling; with linear
    scaling and an ``original_max_position_embeddings`` for yarn it is the smaller one, times the factor.
    """
    lengths = [int(hf[key]) for key in _LENGTH_KEYS if hf.get(key)]
    if not lengths:
        return _UNKNOWN_LENGTH
    length = min(lengths)
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings")
    factor = float(rope.get("factor") or 1.0)
    if kind == "yarn" and original:
        return max(length, int(int(original) * factor))
    if kind == "linear":
        return int(length * factor)
    return length


def resolve_budgets(config: EngineConfig, hf: Mapping[str, Any], defaults: BatchDefaults) -> Budgets:
    """All limits.

    Raises:
        ConfigError: Naming the option, its value and what would be possible.
    """
    notes: list[str] = []
    length, is_auto = _max_model_len(config, derived_max_model_len(hf))
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


def _max_model_len(config: EngineConfig, derived: int) -> tuple[int, bool]:
    asked = config.model.max_model_len
    if asked in (None, "auto", -1):
        return derived, True
    length = int(asked)
    if length > derived:
        raise ConfigError(
            f"--max-model-len is {length}, but the model was made for {derived} tokens; lower it, or extend the model "
            "with --hf-overrides (rope_parameters)",
            field="model.max_model_len",
        )
    return length, False
