"""Qwen2 and Qwen3, dense: grouped attention with biases (Qwen2) or normalised heads (Qwen3), gated feed-forward.

Source: Qwen2 arXiv 2407.10671, Qwen3 arXiv 2505.09388.

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

__all__ = ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def layer_window(config: Any, index: int) -> int | None:
    """The sliding window of a layer, or None where it sees everything."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return config.sliding_window if kinds[index] == "sliding_attention" else None
    if not getattr(config, "use_sliding_window", False) or index < getattr(config, "max_window_layers", 0):
        return None
    return config.sliding_window  # type: ignore[no-any-return]


class QwenAttention(nn.Module):
    """Projections, norms of heads where the model has them, rotation, attention, output projection."""

    def __init__(
        self,
        config: Any,
        rope: RotaryEmbedding,
        *,
        window: int | None,
        has_head_norms: bool,
        context: BuildContext,
        prefix: str,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            num_heads,
            num_kv_heads,
            context=context,
            prefix=f"{prefix}.qkv_proj",
            bias=getattr(config, "attention_bias", False) if has_head_norms else True,
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            config.hidden_size,
            context=context,
            prefix=f"{prefix}.o_proj",
            bias=has_head_norms and getattr(config, "attention_bias", False),
            input_part=self.qkv_proj.output_part,
        )
        heads = self.qkv_proj.heads
        self.num_heads, self.num_kv_heads = heads.num_heads, heads.num_kv_heads
        self.rope = rope
        self.has_head_norms = has_head_norms
        if has_head_norms:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, context=context)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, context=context)
        self.attn = Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=window,
            context=context,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N] to [T, N]."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = self.qkv_proj(x_TN).view(x_TN.shape[0], num_heads + 2 * num_kv_heads, self.head_dim)
        q_THD, k_TKD, v_TKD = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        norms = (self.q_norm, self.k_norm) if self.has_head_norms else None
        q_THD, k_TKD = self.rope(positions, q_THD, k_TKD, norms)
        return self.o_proj(self.attn(q_THD, k_TKD, v_TKD))  # type: ignore[no-any-return]


class QwenMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Any, *, context: BuildContext, prefix: str) -> None:
        super().__init__()
        sizes = (config.intermediate_size, config.intermediate_size)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, sizes, context=context, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, context=context, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x_TN: torch.Tensor) -> torch.Tensor:
        """[T, N] to [T, N]."""
        return self.down_proj(self.gate_up_proj.forward_gated_silu(x_TN))  # type: ignore[no-any-return]


class QwenLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(
        self,
        config: Any,
        rope: RotaryEmbedding,
        index: int,
        *,
        has_head_norms: bool,
        context: BuildContext,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = QwenAttention(
            config,
            rope,
            window=layer_window(config, index),
            has_head_norms=has_head_norms,
            context=context,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = QwenMLP(config, context=context, prefix=f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, context=context)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, context=context)

    def forward(
        self, positions: torch.Tensor, x_TN: torch.Tensor, residual_TN: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the layer adds, and the residual that it is to be added to."""
        if residual_TN is None:
            residual_TN, x_TN = x_TN, self.input_layernorm(x_TN)
        else:
            x_TN, residual_TN = self.input_layernorm.add(x_TN, residual_TN)
        x_TN = self.self_attn(positions, x_TN)
        x_TN, residual_TN = self.post_attention_layernorm.add(x_TN, residual_TN)
        return self.mlp(x_TN), residual_TN


class QwenModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any, *, has_head_norms: bool, context: BuildContext, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            context=context,
            prefix=f"{prefix}.embed_tokens",
            is_head=config.tie_word_embeddings,
        )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = get_rope(config, head_dim, context=context)
        self.layers = nn.ModuleList(
            QwenLayer(
                config, rope, index, has_head_norms=has_head_norms, context=context, prefix=f"{prefix}.layers.{index}"
            )
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, context=context)

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, N] after the final norm."""
        # Norms work in place, so the caller's tensor is copied.
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        residual = None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]


@register_model("Qwen2ForCausalLM")
class Qwen2ForCausalLM(nn.Module, Model):
    """Qwen2 and Qwen2.5."""

    has_head_norms = False

    @classmethod
    def supports(cls, query: ModelQuery) -> tuple[Refusal, ...]:
        """See ``decoder_refusals``."""
        return decoder_refusals(query)

    def __init__(self, *, config: Any, context: BuildContext) -> None:
        """See ``Model``."""
        super().__init__()
        self.config = config
        self.model = QwenModel(config, has_head_norms=self.has_head_norms, context=context, prefix="model")
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else ParallelLMHead(config.vocab_size, config.hidden_size, context=context, prefix="lm_head")
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Model``."""
        return self.model(input_ids, positions, inputs_embeds)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_TN: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden_TN)

    @classmethod
    def weight_rules(cls, config: Any) -> WeightRules:
        """See ``Model``; a tied checkpoint may hold the head a second time."""
        ignored = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_word_embeddings else ()))
        return WeightRules(stacks=STANDARD_STACKS, ignored=ignored)


@register_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3, dense."""

    has_head_norms = True
