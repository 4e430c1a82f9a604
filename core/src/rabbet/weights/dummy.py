"""The checkpoint format ``dummy``: random weights of the shapes of config.json, to measure speed without files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rabbet.contracts import register_weight_format
from rabbet.contracts.weights import ModelFiles, ResolveQuery, TensorInfo, WeightFormat
from rabbet.weights.hub import model_directory, model_name, peek_config, read_model_files

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DummyFormat", "fill_with_noise"]

_SCALE = 0.02
_MAX_DRAWN = (1 << 20) - 3
"""Elements drawn for one matrix; larger ones repeat them. A prime, so that no two rows of a matrix become equal."""


@register_weight_format("dummy")
class DummyFormat(WeightFormat):
    """Chosen by name only; has no tensors, so the runner fills the model with ``fill_with_noise``."""

    @classmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """Never: noise is served on request only."""
        return False

    @classmethod
    def peek(cls, query: ResolveQuery) -> dict[str, Any] | None:
        """See ``WeightFormat``."""
        return peek_config(query)

    @classmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Only config.json is needed; a tokenizer is used if there is one."""
        return read_model_files(model_directory(query, with_weights=False), (), name=model_name(query.model))

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """Nothing is stored."""
        return ()

    @classmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing is stored."""
        return iter(())


def fill_with_noise(model: nn.Module) -> int:
    """Draw every matrix from a normal distribution of scale 0.02; vectors (norms, biases) keep their start values.

    The seed is made from the parameter's name, so that the same model is the same everywhere and no two matrices of
    it are equal. Large matrices repeat a million drawn values: the speed of kernels does not depend on it, the time
    of the start does.

    Returns:
        Bytes of all parameters.
    """
    import torch

    total = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            total += parameter.numel() * parameter.element_size()
            if parameter.dim() < 2 or not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randn(min(parameter.numel(), _MAX_DRAWN), generator=generator, device="cpu") * _SCALE
            drawn = drawn.to(device=parameter.device, dtype=parameter.dtype)
            flat = parameter.data.view(-1)
            for start in range(0, flat.numel(), drawn.numel()):
                part = flat[start : start + drawn.numel()]
                part.copy_(drawn[: part.numel()])
    return total
