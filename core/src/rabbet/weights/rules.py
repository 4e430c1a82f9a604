"""How checkpoint names map to parameters, as data that a model gives and the loader follows."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

__all__ = ["STANDARD_STACKS", "Experts", "Stack", "WeightRules"]


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
class Experts:
    """Checkpoint matrices ``MODULE.N.gate.weight`` of experts, which are rows of the parameters of one ``FusedMoE``.

    The layer stands at ``MODULE``. What the checkpoint calls ``weight`` fills its parameters ``gate_up`` and ``down``,
    ``weight_scale`` fills ``gate_up_scale`` and ``down_scale``, any other ``X`` ``gate_up_X`` and ``down_X``.

    Attributes:
        num_experts: Experts of a layer.
        module: Last part of the layer's name.
        gate: Name of the gate's matrix: ``gate_proj``, Mixtral's ``w1``.
        up: Mixtral's ``w3``.
        down: Mixtral's ``w2``.
    """

    num_experts: int
    module: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def target(self, parts: list[str]) -> tuple[str, Any] | None:
        """Parameter and shard ``(expert, "gate" | "up" | "down")``; None for what is not an expert's."""
        matrices = {self.gate: "gate", self.up: "up", self.down: "down"}
        for place, part in enumerate(parts[:-3]):
            number, matrix, suffix = parts[place + 1], matrices.get(parts[place + 2]), "_".join(parts[place + 3 :])
            if part == self.module and matrix and number.isdecimal() and int(number) < self.num_experts:
                name = "down" if matrix == "down" else "gate_up"
                name += "" if suffix == "weight" else f"_{suffix.removeprefix('weight_')}"
                return ".".join([*parts[: place + 1], name]), (int(number), matrix)
        return None

    def shards(self, parts: list[str]) -> frozenset[Any]:
        """The shards of a parameter; none of one that is not the experts'."""
        if len(parts) < 2 or parts[-2] != self.module or not parts[-1].startswith(("gate_up", "down")):
            return frozenset()
        matrices = ("down",) if parts[-1].startswith("down") else ("gate", "up")
        return frozenset((expert, matrix) for expert in range(self.num_experts) for matrix in matrices)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRules:
    """The map of one model.

    Attributes:
        stacks: Merged layers.
        experts: Merged experts; they come before ``stacks``, which may have the same names.
        renames: Pairs of checkpoint prefix and model prefix; the first that fits is used.
        ignored: Glob patterns of checkpoint names that the model does not need.
        optional: Glob patterns of parameters that a checkpoint may lack.
    """

    stacks: tuple[Stack, ...] = ()
    experts: Experts | None = None
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
        if self.experts is not None and (found := self.experts.target(parts)) is not None:
            return found
        for stack in self.stacks:
            if stack.source in parts:
                position = parts.index(stack.source)
                return ".".join([*parts[:position], stack.target, *parts[position + 1 :]]), stack.shard
        return name, None

    def shards(self, parameter: str) -> frozenset[Any]:
        """The shards that a parameter consists of."""
        parts = parameter.split(".")
        if self.experts is not None and (found := self.experts.shards(parts)):
            return found
        return frozenset(stack.shard for stack in self.stacks if stack.target in parts) or frozenset([None])

    @property
    def packed_modules(self) -> dict[str, tuple[str, ...]]:
        """Merged module to the checkpoint's modules: ``qkv_proj`` to ``(q_proj, k_proj, v_proj)``."""
        found: dict[str, tuple[str, ...]] = {}
        for stack in self.stacks:
            found[stack.target] = (*found.get(stack.target, ()), stack.source)
        if (merged := self.experts) is not None:
            each = [
                (number, name) for number in range(merged.num_experts) for name in (merged.gate, merged.up, merged.down)
            ]
            found[merged.module] = tuple(f"{merged.module}.{number}.{name}" for number, name in each)
        return found
