"""Attention over plain tensors, for models that are tested without a backend."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PlainAttention"]


class PlainAttention:
    """Causal attention in float64; its metadata are pairs of a sequence and its rows in the step."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: torch.Tensor) -> None:
        """See ``AttentionBackend``; keys and values are kept here, not in ``cache``."""
        for sequence, rows in metadata:
            keys, values = self._memory.get((layer.name, sequence), (k[:0].double(), v[:0].double()))
            keys, values = torch.cat((keys, k[rows].double())), torch.cat((values, v[rows].double()))
            self._memory[layer.name, sequence] = (keys, values)
            group = q.shape[1] // keys.shape[1]
            scores = torch.einsum("thd,shd->hts", q[rows].double(), keys.repeat_interleave(group, 1)) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            total = len(keys)
            distance = torch.arange(total - scores.shape[1], total)[:, None] - torch.arange(total)[None]
            hidden = (distance < 0) | (distance >= (layer.window or total + 1))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hts,shd->thd", weights, values.repeat_interleave(group, 1)).to(out.dtype)
