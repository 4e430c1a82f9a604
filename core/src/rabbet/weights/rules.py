"""How checkpoint names map to parameters, as data that a model gives and the loader follows."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

__all__ = ["STANDARD_STACKS", "Stack", "WeightRules"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Checkpoint matrices that are rows of one parameter.

    Attributes:
        target: Module of the model, e.g. ``qkv_proj``.
        source: Module of the checkpoint, e.g. ``q_proj``.
        shard: ``shard_id`` that the layer's loader takes.
    """

    target: str
    source: str
    shard: Any


STANDARD_STACKS = (
    Stack(target="qkv_proj", source="q_proj", shard="q"),
    Stack(target="qkv_proj", source="k_proj", shard="k"),
    Stack(target="qkv_proj", source="v_proj", shard="v"),
    Stack(target="gate_up_proj", source="gate_proj", shard=0),
    Stack(target="gate_up_proj", source="up_proj", shard=1),
)
"""The merged layers of Llama and its relatives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """The map of one model.

    Attributes:
        stacks: Merged layers.
        renames: Pairs of checkpoint prefix and model prefix; the first that fits is used.
        ignored: Glob patterns of checkpoint names that the model does not need.
        optional: Glob patterns of parameters that a checkpoint may lack.
    """

    stacks: tuple[Stack, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    optional: tuple[str, ...] = ()

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor is not needed."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)

    def is_optional(self, name: str) -> bool:
        """Whether a parameter may be missing."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.optional)

    def target(self, name: str) -> tuple[str, Any]:
        """Parameter and shard of a checkpoint tensor."""
        for old, new in self.renames:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        parts = name.split(".")
        for stack in self.stacks:
            if stack.source in parts:
                position = parts.index(stack.source)
                return ".".join([*parts[:position], stack.target, *parts[position + 1 :]]), stack.shard
        return name, None

    def shards(self, parameter: str) -> frozenset[Any]:
        """The shards that a parameter consists of."""
        parts = parameter.split(".")
        return frozenset(stack.shard for stack in self.stacks if stack.target in parts) or frozenset([None])
