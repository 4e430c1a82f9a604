"""The attention layer of a model: its constants, its cache spec, and the call into the chosen backend.

Shapes: T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rabbet.contracts.attention import AttentionLayerSpec
from rabbet.contracts.kv_cache_dtype import PageFormat
from rabbet.contracts.quantization import KVCacheMethod
from rabbet.errors import ConfigError
from rabbet.layers.context import BuildContext
from rabbet.layers.forward_context import get_forward_context
from rabbet.types.kv import CacheKind, KVCacheSpec

__all__ = ["Attention", "LocalHeads", "local_heads"]

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalHeads:
    """Heads of one rank.

    Each rank holds ``num_kv_heads`` key heads with the query heads that belong to them. Where the heads do not divide
    by the ranks, the last ranks are filled up with heads whose weights are zero: their output is zero, and so is what
    they add to the sum over ranks.

    Attributes:
        num_heads: Query heads of a rank, padding included.
        num_kv_heads: Key heads of a rank, padding included.
        first_head: This rank's first query head in the model.
        first_kv_head: This rank's first key head in the model.
        num_real_heads: How many of this rank's query heads the model has.
        num_real_kv_heads: How many of this rank's key heads the model has.
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int
    num_real_heads: int
    num_real_kv_heads: int


def local_heads(num_heads: int, num_kv_heads: int, *, rank: int, world_size: int) -> LocalHeads:
    """Divide heads over ranks.

    Raises:
        ConfigError: If there are more ranks than key heads and the query heads of one key head cannot be divided.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads do not divide over {num_kv_heads} key heads", field="model")
    group = num_heads // num_kv_heads
    if num_kv_heads >= world_size:
        per_rank = -(-num_kv_heads // world_size)
        first = min(rank * per_rank, num_kv_heads)
        real = min(per_rank, num_kv_heads - first)
        return LocalHeads(
            num_heads=per_rank * group,
            num_kv_heads=per_rank,
            first_head=first * group,
            first_kv_head=first,
            num_real_heads=real * group,
            num_real_kv_heads=real,
        )
    if world_size % num_kv_heads or num_heads % world_size:
        raise ConfigError(
            f"--tensor-parallel-size is {world_size}, which fits neither {num_kv_heads} key heads nor {num_heads} "
            f"query heads; use up to {num_kv_heads}, or a multiple of {num_kv_heads} that divides {num_heads}",
            field="parallel.tensor_parallel_size",
        )
    # More ranks than key heads: each key head stands on several ranks, its query heads are divided among them.
    per_rank, copies = num_heads // world_size, world_size // num_kv_heads
    return LocalHeads(
        num_heads=per_rank,
        num_kv_heads=1,
        first_head=rank * per_rank,
        first_kv_head=rank // copies,
        num_real_heads=per_rank,
        num_real_kv_heads=1,
    )


class Attention(nn.Module):
    """Paged attention over the layer's own KV cache, which the runner binds through the forward context."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        context: BuildContext,
        prefix: str,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Create the layer and enter it in ``context.attention_layers``.

        Args:
            num_heads: Query heads of this rank.
            num_kv_heads: Key heads of this rank.
            head_dim: Size of a head.
            scale: Factor of the logits.
            context: Build context.
            prefix: Name of the layer, unique in the model.
            window: Sliding window in tokens, or None.
            soft_cap: Cap of the logits, or None.
            sinks: [H] learned logits, or None.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = context.block_size
        self.kv_cache_dtype = context.kv_cache_dtype
        self.page_format = context.page_format(num_kv_heads, head_dim) if context.page_format is not None else None
        self.k_scale: float | torch.Tensor = 1.0
        self.v_scale: float | torch.Tensor = 1.0
        self.device = context.device
        self.spec = AttentionLayerSpec(name=prefix, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        self.quant_method: KVCacheMethod | None = context.quant_method(self, prefix, KVCacheMethod)
        if self.quant_method is not None:
            self.quant_method.create_weights(self)
        if prefix in context.attention_layers:
            raise ValueError(f"two attention layers are called {prefix}")
        context.attention_layers[prefix] = self

    def process_weights_after_loading(self) -> None:
        """Take scales from the checkpoint: one number, or one a head where the KV-cache dtype has as many.

        Raises:
            ConfigError: If the checkpoint has other scales than the KV-cache dtype.
        """
        if self.quant_method is not None:
            self.quant_method.process_weights_after_loading(self)
        has_head_scales = self.page_format is not None and self.page_format.has_head_scales
        found: dict[str, Any] = {}
        for name in ("k", "v"):
            scale = torch.as_tensor(getattr(self, f"{name}_scale"), dtype=torch.float32, device=self.device)
            if scale.numel() != 1 and not (has_head_scales and scale.shape == (self.num_kv_heads,)):
                wanted = f"one, or one for each of {self.num_kv_heads} heads" if has_head_scales else "one"
                raise ConfigError(
                    f"{self.spec.name}: the checkpoint gives {name}_scale as {list(scale.shape)}; "
                    f"--kv-cache-dtype {self.kv_cache_dtype} takes {wanted}",
                    field="cache.kv_cache_dtype",
                )
            if has_head_scales:
                found[f"{name}_head_scales"] = scale.reshape(-1).expand(self.num_kv_heads).contiguous()
            else:
                found[f"{name}_scale"] = scale.item()
        self.spec = replace(self.spec, **found)

    def kv_cache_spec(self) -> KVCacheSpec:
        """The cache that this layer needs."""
        form = self.page_format
        if form is None:
            item = _ITEM_BYTES[self.kv_cache_dtype]
            form = PageFormat(
                storage_dtype=self.kv_cache_dtype, bytes_per_token=2 * self.num_kv_heads * self.head_dim * item
            )
        return KVCacheSpec(
            kind=CacheKind.FULL_ATTENTION if self.spec.window is None else CacheKind.SLIDING_WINDOW,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=form.storage_dtype,
            page_size_bytes=self.block_size * (form.bytes_per_token + form.scale_bytes_per_token),
            window=self.spec.window,
            kv_cache_dtype=self.kv_cache_dtype if self.page_format is not None else "",
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            q: [T, H * D] or [T, H, D].
            k: [T, K * D] or [T, K, D], rotated.
            v: Likewise.

        Returns:
            [T, H * D], contiguous.
        """
        num_tokens = q.shape[0]
        out = torch.empty((num_tokens, self.num_heads, self.head_dim), dtype=q.dtype, device=q.device)
        context = get_forward_context()
        name = self.spec.name
        cache = context.kv_caches.get(name)
        if cache is None:
            # Memory is being profiled: the size of the output is all that matters.
            return out.zero_().view(num_tokens, self.num_heads * self.head_dim)
        if context.connector is not None:
            context.connector.wait_for_layer(name)
        context.backends[name].forward(
            self.spec,
            q.view(num_tokens, self.num_heads, self.head_dim),
            k.view(num_tokens, self.num_kv_heads, self.head_dim),
            v.view(num_tokens, self.num_kv_heads, self.head_dim),
            cache,
            context.metadata[name],
            out,
        )
        if context.connector is not None:
            context.connector.save_layer(name)
        return out.view(num_tokens, self.num_heads * self.head_dim)
