"""Names and merged tensors of transformers' checkpoints: transformers' own table of conversions, applied by us.

Some models of transformers hold a tensor in another form than their checkpoints: experts stacked in one parameter,
old names. transformers keeps these rules as data, and they are read here; nothing else of its loader is used.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rabbet.errors import WeightsError
from rabbet.layers.shards import copy_checked
from rabbet.weights import WeightRules
from rabbet_model_transformers.build import build_causal

__all__ = ["CheckpointNames", "HubRules", "Merger", "checkpoint_names"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor that is converted before it fills a parameter; stands where others have a shard's id."""

    source: str
    pattern: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointNames:
    """What transformers knows of a model's names.

    Attributes:
        prefix: Name of the base model in the causal model, e.g. ``model``.
        state: Parameters and persistent buffers of the causal model; their tensors have no data.
        tied: Parameters that share another one, to its name.
        renamings: Name changes.
        converters: Merges and splits.
        ignored: Expressions for checkpoint tensors that the model does not need.
    """

    prefix: str
    state: dict[str, torch.Tensor]
    tied: dict[str, str]
    renamings: list[Any]
    converters: list[Any]
    ignored: list[re.Pattern[str]]

    def locate(self, name: str) -> tuple[str, str | None]:
        """The parameter of a checkpoint tensor, and the pattern of the converter that takes it."""
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.state)
        if found not in self.state and name in self.state:
            found, pattern = name, None
        return self.inner(self.tied.get(found, found)), pattern

    def converter(self, pattern: str) -> Any:
        """A fresh converter for one parameter."""
        return copy.deepcopy(next(item for item in self.converters if pattern in item.source_patterns))

    def is_converted(self, name: str) -> bool:
        """Whether a converter may fill the parameter."""
        return any(target in name for item in self.converters for target in item.target_patterns)

    def inner(self, name: str) -> str:
        """Name in ``TransformersForCausalLM``, which holds the base model beside the rest."""
        head, _, rest = name.partition(".")
        return f"base.{rest}" if head == self.prefix else f"causal.{name}"

    def outer(self, name: str) -> str:
        """The reverse of ``inner``."""
        head, _, rest = name.partition(".")
        return f"{self.prefix}.{rest}" if head == "base" else rest

    def made_by(self, target: str, pattern: str) -> list[str]:
        """The parameters that the converter of ``pattern`` makes, given the first of them."""
        patterns = next(item for item in self.converters if pattern in item.source_patterns).target_patterns
        return [target.replace(patterns[0], other, 1) for other in patterns]


def checkpoint_names(config: Any) -> CheckpointNames:
    """Build the model without memory, and read its tables."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    with torch.device("meta"):
        causal = build_causal(config, torch.float32)
    transforms = get_model_conversion_mapping(causal)
    patterns = getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ()
    return CheckpointNames(
        prefix=causal.base_model_prefix,
        state=dict(causal.state_dict(keep_vars=True)),
        tied=dict(causal.all_tied_weights_keys),
        renamings=[item for item in transforms if isinstance(item, WeightRenaming)],
        converters=[item for item in transforms if isinstance(item, WeightConverter)],
        ignored=[re.compile(pattern) for pattern in patterns],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HubRules(WeightRules):
    """``WeightRules`` that ask ``CheckpointNames``.

    Attributes:
        names: The tables.
        buffers: Parameters that are buffers in transformers: they have start values and may be missing.
        converted: Grows while loading: parameters that are made of pieces that have come.
    """

    names: CheckpointNames
    buffers: frozenset[str] = frozenset()
    converted: set[str] = field(default_factory=set)

    def is_ignored(self, name: str) -> bool:
        """What transformers ignores, and tables of angles that old checkpoints hold."""
        if name.endswith(("rotary_emb.inv_freq", ".masked_bias")):
            return True
        found, _ = self.names.locate(name)
        return self.names.outer(found) not in self.names.state and any(
            pattern.search(name) for pattern in self.names.ignored
        )

    def target(self, name: str) -> tuple[str, Any]:
        """See ``WeightRules``."""
        found, pattern = self.names.locate(name)
        if pattern is None:
            return found, None
        self.converted.update(self.names.made_by(found, pattern))
        return found, Piece(source=name, pattern=pattern)

    def is_optional(self, name: str) -> bool:
        """Buffers have start values; ``Merger`` fills what is converted."""
        return name in self.buffers or name in self.converted

    def shards(self, parameter: str) -> frozenset[Any]:
        """One."""
        return frozenset([None])


class Merger:
    """Keeps the pieces of converted parameters until all have come, then fills the parameters."""

    def __init__(self, names: CheckpointNames, config: Any) -> None:
        self.names = names
        self.config = config
        self.pieces: dict[str, dict[Piece, torch.Tensor]] = {}
        self.loaders: dict[str, Any] = {}

    def attach(self, model: nn.Module) -> None:
        """Give each parameter that a converter may fill a loader that keeps pieces."""
        for name, parameter in model.named_parameters():
            if self.names.is_converted(name):
                self.loaders[name] = getattr(parameter, "weight_loader", None)
                parameter.weight_loader = self._loader(name)  # type: ignore[attr-defined]

    def _loader(self, name: str) -> Any:
        def load(parameter: nn.Parameter, tensor: torch.Tensor, shard: Any = None) -> None:
            if isinstance(shard, Piece):
                self.pieces.setdefault(name, {})[shard] = tensor
            else:
                self._fill(parameter, tensor, name)

        return load

    def _fill(self, parameter: nn.Parameter, tensor: torch.Tensor, name: str) -> None:
        usual = self.loaders.get(name)
        if usual is not None:
            usual(parameter, tensor, None)
        else:
            copy_checked(parameter.data, tensor, name)

    def finish(self, model: nn.Module) -> None:
        """Convert what was kept.

        Raises:
            WeightsError: If pieces do not fit together, or not into the model.
        """
        if not self.pieces:
            return
        parameters = dict(model.named_parameters())
        kept, self.pieces = self.pieces, {}
        for target, pieces in kept.items():
            for name, tensor in self._convert(target, pieces).items():
                if name not in parameters:
                    source = next(iter(pieces)).source
                    raise WeightsError(f"the model has no place for {name}, made of {source}", tensor=source)
                self._fill(parameters[name], tensor, name)

    def _convert(self, target: str, pieces: dict[Piece, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters made from the pieces of one target."""
        ordered = sorted(pieces, key=lambda piece: _natural(piece.source))
        converter = self.names.converter(ordered[0].pattern)
        outer = self.names.outer(target)
        for piece in ordered:
            converter.add_tensor(outer, piece.source, piece.pattern, pieces[piece])
        try:
            made = converter.convert(outer, config=self.config)
        except (RuntimeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise WeightsError(
                f"{ordered[0].source} and its fellows do not make {target}: {error}", tensor=ordered[0].source
            ) from error
        return {self.names.inner(name): value[0] if isinstance(value, list) else value for name, value in made.items()}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
