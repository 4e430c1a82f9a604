"""Attention in plain torch, one query token at a time: slow, readable, and the same in every batch.

Shapes: T tokens, L visible keys, H query heads, K key/value heads, G query heads a key head, D and E head sizes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rabbet.contracts import Refusal, register_attention_backend
from rabbet.contracts.attention import AttentionBackend, AttentionLayerSpec, AttentionQuery, KVLayout
from rabbet.contracts.batch import AttentionBatch
from rabbet.types.kv import KVCacheSpec
from rabbet_sdk.strict import seal

__all__ = ["StrictAttention"]

_FEATURES = {"gqa", "sliding_window", "soft_cap", "sinks", "alibi", "mixed_batch", "non_causal", "batch_invariant"}


@register_attention_backend("strict")
@seal
class StrictAttention(AttentionBackend):
    """A block's page is [slot, head, dim]: the key's elements, then the value's."""

    @classmethod
    def supports(cls, query: AttentionQuery) -> tuple[Refusal, ...]:
        """Refuse whatever would be computed wrongly; everything else is what ``forward`` below does."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cpu, not on {query.device_type}"))
        if query.dtype not in ("float32", "bfloat16"):
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; float32 and bfloat16 are supported"))
        if query.kv_cache_dtype != query.dtype:
            refusals.append(
                Refusal(code="KV_DTYPE", message=f"{query.kv_cache_dtype}; only {query.dtype} is supported")
            )
        for feature in sorted(query.features - _FEATURES - {"uneven_head_dim_v"}):
            refusals.append(Refusal(code="FEATURE", message=f"{feature} is not implemented"))
        return tuple(refusals)

    @classmethod
    def kv_layout(cls, spec: KVCacheSpec) -> KVLayout:
        """Keys and values of a token stand together, so that one index finds both."""
        shape = (spec.block_size, spec.num_kv_heads, spec.head_dim + spec.head_dim_v)
        return KVLayout(name="strict-1", axes=("slot", "head", "dim"), shape=shape, dtype=spec.dtype)

    @classmethod
    def block_sizes(cls) -> tuple[int, ...]:
        """Any size works."""
        return (16, 1)

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        """The batch itself; a copy of the object, as the caller may reuse its own."""
        return replace(batch)

    def forward(
        self,
        layer: AttentionLayerSpec,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        out_THE: torch.Tensor,
    ) -> None:
        """Store first, attend afterwards: a token sees itself through the cache, rounded as later tokens see it."""
        size = self.context.spec.block_size
        slots = metadata.slot_mapping[: metadata.num_tokens]
        kept = (slots >= 0).nonzero().squeeze(1)
        new = torch.cat((k_TKD[kept] / layer.k_scale, v_TKE[kept] / layer.v_scale), dim=-1)
        kv_cache[slots[kept] // size, slots[kept] % size] = new.to(kv_cache.dtype)
        starts, lengths = metadata.query_start_cpu.tolist(), metadata.seq_lens_cpu.tolist()
        for row in range(metadata.num_requests):
            for token in range(starts[row], starts[row + 1]):
                position = lengths[row] - (starts[row + 1] - token)
                reach = lengths[row] if layer.window is None else layer.window - 1
                first = max(0, position - reach)
                last = position if metadata.is_causal else min(lengths[row] - 1, position + reach)
                places = torch.arange(first, last + 1)
                # Only visible keys are read: what else stands in a block may be NaN, and 0 * NaN is NaN.
                stored = kv_cache[metadata.block_table[row, places // size].long(), places % size].float()
                out_THE[token] = self.attend(layer, q_THD[token].float(), stored, places - position)

    def attend(
        self, layer: AttentionLayerSpec, q_HD: torch.Tensor, stored_LKC: torch.Tensor, distance_L: torch.Tensor
    ) -> torch.Tensor:
        """One token's output [H, E] in float32; ``distance_L`` is each key's position less the token's."""
        head_dim, num_kv_heads = q_HD.shape[1], stored_LKC.shape[1]
        k_LKD, v_LKE = stored_LKC[..., :head_dim] * layer.k_scale, stored_LKC[..., head_dim:] * layer.v_scale
        scores_KGL = torch.einsum("kgd,lkd->kgl", q_HD.view(num_kv_heads, -1, head_dim), k_LKD) * layer.scale
        if layer.soft_cap is not None:
            scores_KGL = layer.soft_cap * torch.tanh(scores_KGL / layer.soft_cap)
        if layer.alibi_slopes is not None:
            scores_KGL = scores_KGL + layer.alibi_slopes.view(num_kv_heads, -1, 1) * distance_L
        if layer.sinks is not None:
            scores_KGL = torch.cat((scores_KGL, layer.sinks.float().view(num_kv_heads, -1, 1)), dim=-1)
        # A sink takes part in the sum and has no value.
        weights_KGL = torch.softmax(scores_KGL, dim=-1)[..., : len(v_LKE)]
        return torch.einsum("kgl,lke->kge", weights_KGL, v_LKE).flatten(0, 1)
