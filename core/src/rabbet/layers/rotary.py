"""Rotary position embedding: tables of cosines and sines for the scalings that checkpoints ask for.

Source: RoPE arXiv 2104.09864; linear interpolation arXiv 2306.15595; dynamic NTK as in transformers'
``_compute_dynamic_ntk_parameters``, but stretched once, to the longest context served, since keys in the cache cannot
be turned again; YaRN arXiv 2309.00071; llama3 as in Llama 3.1's reference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rabbet.errors import ConfigError
from rabbet.layers.context import BuildContext
from rabbet.layers.norm import RMSNorm

__all__ = ["ROPE_TYPES", "RotaryEmbedding", "get_rope", "inverse_frequencies", "rope_parameters"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "mrope")
"""Types of scaling that are computed here; ``mrope`` on text alone is the default."""


def rope_parameters(config: Any) -> dict[str, Any]:
    """``rope_parameters`` of a transformers configuration, or the older ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    parameters |= {k: v for k, v in (getattr(config, "rope_scaling", None) or {}).items() if k not in parameters}
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def inverse_frequencies(
    parameters: Mapping[str, Any], dim: int, *, max_position: int, model_position: int
) -> tuple[torch.Tensor, float]:
    """Angles a position, float32 [dim / 2], and the factor of cosines and sines.

    Args:
        parameters: ``rope_type`` and its numbers.
        dim: Rotated elements of a head.
        max_position: Longest context served (dynamic NTK stretches to it).
        model_position: ``max_position_embeddings``.

    Raises:
        ConfigError: If the type is not known.
    """
    base = float(parameters["rope_theta"])
    kind = parameters["rope_type"]
    factor = float(parameters.get("factor") or 1.0)
    if kind == "dynamic":
        length = max(max_position, model_position)
        base *= ((factor * length / model_position) - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / base**exponents
    if kind in ("default", "dynamic", "mrope"):
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "llama3":
        return _llama3(frequencies, parameters), 1.0
    if kind == "yarn":
        return _yarn(frequencies, parameters, dim, base, model_position)
    raise ConfigError(f"rope_type is {kind!r}; known: {', '.join(ROPE_TYPES)}", field="rope_parameters.rope_type")


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    old_length = float(parameters["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = (old_length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > old_length / low, frequencies / factor, frequencies)
    is_medium = (wavelengths >= old_length / high) & (wavelengths <= old_length / low)
    return torch.where(is_medium, blended, scaled)


def _yarn(
    frequencies: torch.Tensor, parameters: Mapping[str, Any], dim: int, base: float, model_position: int
) -> tuple[torch.Tensor, float]:
    original = parameters.get("original_max_position_embeddings") or model_position
    factor = float(parameters.get("factor") or model_position / original)
    fast, slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)

    def magnitude(scale: float, times: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * times * math.log(scale) + 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        all_dim, some = parameters.get("mscale_all_dim"), parameters.get("mscale")
        attention = magnitude(factor, some) / magnitude(factor, all_dim) if some and all_dim else magnitude(factor)
    return blended, float(attention)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys in place, by one table that all layers of a model share."""

    def __init__(self, cos_sin: torch.Tensor, *, is_neox: bool, context: BuildContext) -> None:
        """Keep the table.

        Args:
            cos_sin: float32 [P, R]: R / 2 cosines, then R / 2 sines of each position.
            is_neox: See ``LayerOps.rotary``.
            context: Build context.
        """
        super().__init__()
        self.ops = context.ops
        self.is_neox = is_neox
        self.cos_sin: torch.Tensor
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(
        self,
        positions: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, after the norms of their heads where there are any (of one ``eps``)."""
        if norms is not None:
            q, k = norms
            return self.ops.norm_rotary(
                q_THD, k_TKD, q.weight, k.weight, q.eps, positions, self.cos_sin, is_neox=self.is_neox
            )
        return self.ops.rotary(q_THD, k_TKD, positions, self.cos_sin, is_neox=self.is_neox)


def get_rope(
    config: Any,
    head_dim: int,
    *,
    context: BuildContext,
    is_neox: bool = True,
    parameters: Mapping[str, Any] | None = None,
) -> RotaryEmbedding:
    """The embedding that a configuration asks for.

    Args:
        config: transformers' configuration.
        head_dim: Elements of a head.
        context: Build context; the table reaches to its ``max_model_len``.
        is_neox: See ``LayerOps.rotary``.
        parameters: In place of the configuration's own, where a model has several.

    Raises:
        ConfigError: If the type of scaling is not known.
    """
    parameters = rope_parameters(config) if parameters is None else parameters
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    dim = int(head_dim * float(partial))
    model_position = int(getattr(config, "max_position_embeddings", context.max_model_len))
    length = max(context.max_model_len, 1)
    frequencies, factor = inverse_frequencies(parameters, dim, max_position=length, model_position=model_position)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None]
    table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
    return RotaryEmbedding(table.to(context.device), is_neox=is_neox, context=context)
