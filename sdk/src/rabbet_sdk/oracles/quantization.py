"""How a quantised format stores a matrix, as an author tells the suite, and the default: int8 by output channel.

The dequantiser must not be the plugin's own code: it is written from the format's description, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["INT8_PER_CHANNEL", "GoldenMatrix", "QuantizedCheckpoint", "dense_experts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenMatrix:
    """Bytes of one matrix, and the values that they stand for; made by the format's own tools or by hand.

    Attributes:
        tensors: Suffix to dtype, shape and the bytes in hexadecimal, little-endian.
        values: The matrix [O, I].
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]
    values: tuple[tuple[float, ...], ...]

    def decode(self) -> dict[str, torch.Tensor]:
        """The tensors as a checkpoint would give them."""
        return {
            suffix: torch.frombuffer(bytearray.fromhex(text), dtype=getattr(torch, dtype)).reshape(shape)
            for suffix, (dtype, shape, text) in self.tensors.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedCheckpoint:
    """A format.

    Attributes:
        settings: ``(method, skipped modules)`` to the checkpoint's ``quantization_config``.
        pack: A dense float32 matrix [O, I] to the tensors that stand for it, by suffix of the module's name.
        unpack: These tensors to float64 [O, I].
        golden: Known bytes and their values.
        bad_settings: Changes of ``settings`` that have to be refused, each with the key that the error must name.
        input_multiple: Inputs of a rank are a multiple of it (a group, packed values).
        output_multiple: Likewise for outputs.
        expert_parameters: Suffix to the parameters of gate with up, and of down, of a ``FusedMoE`` layer.
        plain: ``(x, dense weight, bias)`` computed plainly in the type of ``x``; another one where activations are
            quantised, too.
    """

    settings: Callable[[str, Sequence[str]], dict[str, Any]]
    pack: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    unpack: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    golden: tuple[GoldenMatrix, ...]
    bad_settings: tuple[tuple[Mapping[str, Any], str], ...] = ()
    input_multiple: int = 1
    output_multiple: int = 1
    expert_parameters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = F.linear


def _pack_int8(dense_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    scale_O = dense_OI.abs().amax(dim=1) / 127
    codes_OI = (dense_OI / scale_O.clamp_min(1e-30).unsqueeze(-1)).round().to(torch.int8)
    return {"weight": codes_OI, "weight_scale": scale_O.float()}


def _unpack_int8(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Two's complement from unsigned bytes; scales from IEEE 754 words."""
    unsigned = tensors["weight"].contiguous().numpy().view(np.uint8).astype(np.float64)
    words = tensors["weight_scale"].contiguous().numpy().view(np.uint32)
    exponent, fraction = (words >> 23 & 0xFF).astype(np.int64), (words & 0x7FFFFF).astype(np.float64)
    size = np.where(exponent == 0, np.ldexp(fraction, -149), np.ldexp(fraction + 0x800000, exponent - 150))
    size = np.where(exponent == 0xFF, np.where(fraction == 0, np.inf, np.nan), size)
    scale = np.where(words >> 31 == 1, -size, size)
    return torch.from_numpy((unsigned - 256.0 * (unsigned > 127)) * scale[:, None])


INT8_PER_CHANNEL = QuantizedCheckpoint(
    settings=lambda method, skip: {"quant_method": method, "skip": list(skip)},
    pack=_pack_int8,
    unpack=_unpack_int8,
    golden=(
        GoldenMatrix(
            tensors={"weight": ("int8", (2, 3), "7f80ff00012a"), "weight_scale": ("float32", (2,), "0000003f0000c0bf")},
            values=((63.5, -64.0, -0.5), (0.0, -1.5, -63.0)),
        ),
    ),
    bad_settings=(({"skip": 7}, "skip"), ({"skip": [3]}, "skip"), ({"bits_typo": 4}, "bits_typo")),
    expert_parameters={"weight": ("gate_up", "down"), "weight_scale": ("gate_up_scale", "down_scale")},
)
"""What the template of ``rabbet-sdk new quantization`` reads."""


def dense_experts(
    x_TN: torch.Tensor,
    gate_up: Sequence[tuple[torch.Tensor, torch.Tensor]],
    down: Sequence[torch.Tensor],
    weights_TA: torch.Tensor,
    ids_TA: torch.Tensor,
) -> torch.Tensor:
    """Experts token by token, in the type of ``x_TN``: the slow way that cannot be wrong.

    Args:
        x_TN: Inputs.
        gate_up: Gate [I, N] and up [I, N] of each expert.
        down: [N, I] of each expert.
        weights_TA: Weights of the chosen experts.
        ids_TA: The chosen experts.
    """
    rows = []
    for x, weights, ids in zip(x_TN, weights_TA, ids_TA, strict=True):
        total = torch.zeros_like(x)
        for weight, expert in zip(weights, ids.tolist(), strict=True):
            gate, up = gate_up[expert][0] @ x, gate_up[expert][1] @ x
            total = total + (down[expert] @ (gate * torch.sigmoid(gate) * up)) * weight.to(x.dtype)
        rows.append(total)
    return torch.stack(rows)
