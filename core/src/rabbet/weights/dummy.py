"""The checkpoint format ``dummy``: random weights for the shapes of config.json, to measure speed without a download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rabbet.contracts import register_weight_format
from rabbet.contracts.weights import ModelFiles, ResolveQuery, TensorInfo, WeightFormat
from rabbet.weights.hub import is_hub_name, model_directory, read_model_files

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DummyFormat", "fill_with_noise"]

_SEED = 0
_SCALE = 0.02


@register_weight_format("dummy")
class DummyFormat(WeightFormat):
    """Chosen by name only; has no tensors, so the runner fills the model with ``fill_with_noise``."""

    @classmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """Never: noise is served on request only."""
        return False

    @classmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Only config.json is needed; a tokenizer is used if there is one."""
        directory = model_directory(query, with_weights=False)
        name = query.model if is_hub_name(query.model) else Path(query.model).name or str(directory)
        return read_model_files(directory, (), name=name)

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """Nothing is stored."""
        return ()

    @classmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing is stored."""
        return iter(())


def fill_with_noise(model: nn.Module) -> int:
    """Draw every matrix from a normal distribution of scale 0.02 with a fixed seed; vectors keep their start values.

    Returns:
        Bytes of all parameters.
    """
    import torch

    total = 0
    with torch.no_grad():
        for parameter in model.parameters():
            total += parameter.numel() * parameter.element_size()
            if parameter.dim() < 2 or not parameter.is_floating_point():
                continue
            generator = torch.Generator(device=parameter.device).manual_seed(_SEED)
            # One draw a million elements is repeated: kernels' speed does not depend on it, start-up time does.
            block = torch.randn(min(parameter.numel(), 1 << 20), generator=generator, device=parameter.device) * _SCALE
            flat = parameter.data.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])
    return total
