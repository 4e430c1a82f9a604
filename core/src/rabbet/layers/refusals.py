"""The reasons for which a decoder built from these layers cannot serve a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rabbet.contracts.model import ModelQuery
from rabbet.contracts.support import Refusal
from rabbet.errors import ConfigError
from rabbet.layers.attention import local_heads
from rabbet.layers.rotary import ROPE_TYPES

__all__ = ["decoder_refusals", "rope_type_of"]


def rope_type_of(config: Mapping[str, Any]) -> str:
    """The type of rotary scaling in config.json, which had several spellings over time."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")):
            return str(rope.get("rope_type") or rope.get("type"))
    return "default"


def decoder_refusals(query: ModelQuery, *, activations: tuple[str, ...] = ("silu", "swish")) -> tuple[Refusal, ...]:
    """Refusals of rotary types, activations, heads that cannot be divided over the ranks, and pipeline stages.

    Args:
        query: What is asked.
        activations: Values of ``hidden_act`` that the model computes.
    """
    config = query.config
    refusals = []
    rope = rope_type_of(config)
    if rope not in ROPE_TYPES:
        refusals.append(Refusal(code="ROPE", message=f"rope_type is {rope!r}; known: {', '.join(ROPE_TYPES)}"))
    activation = config.get("hidden_act") or activations[0]
    if activation not in activations:
        message = f"hidden_act is {activation!r}; known: {', '.join(activations)}"
        refusals.append(Refusal(code="ACTIVATION", message=message))
    num_heads = int(config.get("num_attention_heads") or 0)
    if num_heads:
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        try:
            local_heads(num_heads, num_kv_heads, rank=0, world_size=query.tensor_parallel_size)
        except ConfigError as error:
            refusals.append(Refusal(code="HEADS", message=str(error)))
    if query.pipeline_parallel_size > 1:
        refusals.append(
            Refusal(code="PIPELINE", message="the model has no pipeline stages", fix="--pipeline-parallel-size 1")
        )
    return tuple(refusals)
