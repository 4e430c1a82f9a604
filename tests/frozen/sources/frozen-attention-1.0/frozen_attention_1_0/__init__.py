"""Attention 1.0: plain torch, one request after the other."""

import torch

from rabbet.contracts import Refusal, register_attention_backend
from rabbet.contracts.attention import AttentionBackend, KVLayout


@register_attention_backend("frozen_attention")
class FrozenAttention(AttentionBackend):
    @classmethod
    def supports(cls, query):
        asked = {"WINDOW": query.window, "SOFT_CAP": query.has_soft_cap, "SINKS": query.has_sinks, "ALIBI": query.has_alibi}
        return tuple(Refusal(code=code, message="not here") for code, value in asked.items() if value)

    @classmethod
    def kv_layout(cls, spec):
        shape = (spec.block_size, spec.num_kv_heads, spec.head_dim + spec.head_dim_v)
        return KVLayout(name="frozen-1", axes=("slot", "head", "dim"), shape=shape, dtype=spec.dtype)

    def build_metadata(self, batch):
        return batch

    def forward(self, layer, q_THD, k_TKD, v_TKE, kv_cache, metadata, out_THE):
        batch = metadata
        flat = kv_cache.view(-1, *kv_cache.shape[2:])
        count, dim, size = batch.num_tokens, k_TKD.shape[-1], kv_cache.shape[1]
        flat[batch.slot_mapping[:count]] = torch.cat((k_TKD[:count], v_TKE[:count]), -1).to(flat.dtype)
        groups = q_THD.shape[1] // k_TKD.shape[1]
        for row in range(batch.num_requests):
            start, end = int(batch.query_start_cpu[row]), int(batch.query_start_cpu[row + 1])
            length = int(batch.seq_lens_cpu[row])
            at = torch.arange(length)
            slots = batch.block_table[row, at // size].long() * size + at % size
            both = flat[slots].repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", q_THD[start:end], both[..., :dim]) * layer.scale
            seen = at[None, :] <= torch.arange(length - (end - start), length)[:, None]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out_THE[start:end] = torch.einsum("hqk,khe->qhe", weights, both[..., dim:])
