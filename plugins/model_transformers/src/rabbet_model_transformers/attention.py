"""The attention function that is registered with transformers: it hands each call to the layer of the engine.

Shapes: T tokens, H query heads, K key/value heads, D size of query and key heads, E of value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rabbet.errors import ConfigError
from rabbet.layers import Attention

__all__ = ["IMPLEMENTATION", "SeenAttention", "attend", "record", "register"]

IMPLEMENTATION = "rabbet_paged"
"""Name under which transformers knows the function."""

CHILD = "rabbet_attention"
"""Name of the engine's layer inside an attention module of transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenAttention:
    """What one attention module asked for in a trial run."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: int | None
    soft_cap: float | None


_recorder: ContextVar[list[SeenAttention] | None] = ContextVar("rabbet_attention_recorder", default=None)


def register() -> None:
    """Make the function known to transformers. No mask function goes with it, so transformers builds no masks."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)


@contextmanager
def record() -> Iterator[list[SeenAttention]]:
    """Collect the calls of a trial run, in order."""
    seen: list[SeenAttention] = []
    token = _recorder.set(seen)
    try:
        yield seen
    finally:
        _recorder.reset(token)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the paged cache.

    Args:
        module: The attention module; the engine's layer is its child.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, E].
        attention_mask: None: which tokens see which is the engine's matter.
        scaling: Factor of the logits.
        options: ``sliding_window``, ``softcap`` and others.

    Returns:
        [1, T, H, E] and no weights.
    """
    layer = module._modules.get(CHILD)
    if layer is None:
        seen = _recorder.get()
        if seen is None:
            raise RuntimeError("an attention module that the trial run did not see")
        seen.append(_observe(module, query, key, value, attention_mask, scaling, options))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
    num_tokens, num_heads = query.shape[2], query.shape[1]
    head_dim, head_dim_v = query.shape[3], value.shape[3]
    if head_dim_v < head_dim:
        value = F.pad(value, (0, head_dim - head_dim_v))
    q_THD, k_TKD, v_TKD = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    out = layer(q_THD, k_TKD, v_TKD).view(1, num_tokens, num_heads, head_dim)
    return out[..., :head_dim_v], None


def _observe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> SeenAttention:
    """Check that the engine can do what the module asks for."""
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    problems = {
        "a mask of its own (ALiBi or the like)": attention_mask is not None,
        "attention sinks": options.get("s_aux") is not None,
        "a position bias": options.get("position_bias") is not None,
        "attention to later tokens": not is_causal,
        "cross attention": key.shape[2] != query.shape[2],
        "value heads larger than its key heads": head_dim_v > head_dim,
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise ConfigError(
            f"{type(module).__name__} of transformers uses {' and '.join(found)}, which needs a plugin of its own",
            field="model",
        )
    return SeenAttention(
        module=module,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=float(head_dim**-0.5 if scaling is None else scaling),
        window=options.get("sliding_window"),
        soft_cap=options.get("softcap"),
    )


def build_layer(seen: SeenAttention, *, window: int | None, context: Any, prefix: str) -> None:
    """Put the engine's layer into the module."""
    layer = Attention(
        num_heads=seen.num_heads,
        num_kv_heads=seen.num_kv_heads,
        head_dim=seen.head_dim,
        scale=seen.scale,
        window=window,
        soft_cap=seen.soft_cap,
        context=context,
        prefix=prefix,
    )
    seen.module.add_module(CHILD, layer)
