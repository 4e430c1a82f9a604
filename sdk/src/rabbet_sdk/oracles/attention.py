"""Attention by its definition: one request, all scores, a mask written out."""

from __future__ import annotations

import torch

from rabbet.contracts.attention import AttentionLayerSpec

__all__ = ["attention"]


def attention(
    layer: AttentionLayerSpec,
    q_QHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKE: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    is_causal: bool = True,
) -> torch.Tensor:
    """Outputs [Q, H, E] of the last Q of L tokens, computed in ``dtype`` throughout.

    Args:
        layer: Constants; its scales of the cache cancel out and are not looked at.
        q_QHD: Queries.
        k_LKD: True keys of the whole request, rounded as the cache rounds them.
        v_LKE: Values, likewise.
        dtype: float64 for the oracle, the model's own for the plain computation.
        is_causal: Each token sees itself and what is before it; otherwise all. A window reaches both ways then.
    """
    group = q_QHD.shape[1] // k_LKD.shape[1]
    keys = k_LKD.to(dtype).repeat_interleave(group, dim=1)
    values = v_LKE.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->hql", q_QHD.to(dtype), keys) * layer.scale
    at = torch.arange(len(k_LKD), device=scores.device)
    own = at[len(k_LKD) - len(q_QHD) :].unsqueeze(1)
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    if layer.alibi_slopes is not None:
        scores = scores - layer.alibi_slopes.to(dtype).view(-1, 1, 1) * (own - at).to(dtype)
    seen = torch.ones(len(own), len(at), dtype=torch.bool, device=scores.device)
    if is_causal:
        seen &= at <= own
    if layer.window is not None:
        seen &= (own - at).abs() < layer.window
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True)) * seen
    total = powers.sum(dim=-1, keepdim=True)
    if layer.sinks is not None:
        total = total + torch.exp(layer.sinks.to(dtype).view(-1, 1, 1) - scores.amax(dim=-1, keepdim=True))
    return torch.einsum("hql,lhe->qhe", powers / total, values)
