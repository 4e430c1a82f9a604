"""A small decoder of the Llama form: attention with rotary positions, a gated feed-forward layer, RMSNorm before each.

Shapes: T tokens, N hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rabbet.contracts import Refusal, register_model
from rabbet.contracts.model import Model, ModelQuery
from rabbet.layers import (
    Attention,
    BuildContext,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    decoder_refusals,
    get_rope,
)
from rabbet.weights import STANDARD_STACKS, WeightRules
from rabbet_sdk.strict import seal

__all__ = ["StrictForCausalLM"]


class _Attention(nn.Module):
    def __init__(self, config: Any, rope: RotaryEmbedding, *, context: BuildContext, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head_dim, *heads, context=context, prefix=f"{prefix}.qkv_proj"
        )
        # Inputs are divided by heads, as the outputs of qkv_proj are.
        self.o_proj = RowParallelLinear(
            heads[0] * self.head_dim, config.hidden_size, context=context, prefix=f"{prefix}.o_proj",
            input_part=self.qkv_proj.output_part,
        )  # fmt: skip
        self.rope, local = rope, self.qkv_proj.heads
        self.sizes = (local.num_heads, local.num_kv_heads, local.num_kv_heads)
        self.attn = Attention(
            num_heads=local.num_heads, num_kv_heads=local.num_kv_heads, head_dim=self.head_dim,
            scale=self.head_dim**-0.5, context=context, prefix=f"{prefix}.attn",
        )  # fmt: skip

    def forward(self, positions: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(x_TN).view(x_TN.shape[0], sum(self.sizes), self.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(heads, list(self.sizes), dim=1)
        q_THD, k_TKD = self.rope(positions, q_THD, k_TKD)
        out: torch.Tensor = self.o_proj(self.attn(q_THD, k_TKD, v_TKD))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Any, rope: RotaryEmbedding, *, context: BuildContext, prefix: str) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.self_attn = _Attention(config, rope, context=context, prefix=f"{prefix}.self_attn")
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(
            size, (inner, inner), context=context, prefix=f"{prefix}.mlp.gate_up_proj"
        )
        self.mlp.down_proj = RowParallelLinear(inner, size, context=context, prefix=f"{prefix}.mlp.down_proj")
        self.input_layernorm = RMSNorm(size, eps=eps, context=context)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, context=context)

    def forward(self, positions: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        x_TN = x_TN + self.self_attn(positions, self.input_layernorm(x_TN))
        gate_up: Any = self.mlp.gate_up_proj
        down: Any = self.mlp.down_proj
        out: torch.Tensor = x_TN + down(gate_up.forward_gated_silu(self.post_attention_layernorm(x_TN)))
        return out


@register_model("StrictForCausalLM")
@seal
class StrictForCausalLM(nn.Module, Model):
    """Parameters are named as in the checkpoint, but for the merged layers, which ``weight_rules`` tells."""

    @classmethod
    def supports(cls, query: ModelQuery) -> tuple[Refusal, ...]:
        """Refuses rotary types, activations and numbers of heads that the layers do not have."""
        return decoder_refusals(query)

    def __init__(self, *, config: Any, context: BuildContext) -> None:
        super().__init__()
        size, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        rope = get_rope(config, head_dim, context=context)
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, size, context=context, prefix="model.embed_tokens"
        )
        self.model.layers = nn.ModuleList(
            _Layer(config, rope, context=context, prefix=f"model.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.model.norm = RMSNorm(size, eps=config.rms_norm_eps, context=context)
        self.lm_head = ParallelLMHead(config.vocab_size, size, context=context, prefix="lm_head")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Model``."""
        body: Any = self.model
        x_TN = body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in body.layers:
            x_TN = layer(positions, x_TN)
        out: torch.Tensor = body.norm(x_TN)
        return out

    def compute_logits(self, hidden_TN: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        return self.lm_head.logits(hidden_TN)

    @classmethod
    def weight_rules(cls, config: Any) -> WeightRules:
        """See ``Model``."""
        return WeightRules(stacks=STANDARD_STACKS)
