"""Building blocks of model plugins: they carry tensor parallelism, the quantisation hook and the chosen kernels."""

from rabbet.layers.activation import GeluAndMul, SiluAndMul
from rabbet.layers.attention import Attention, LocalHeads, local_heads
from rabbet.layers.context import BuildContext
from rabbet.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rabbet.layers.forward_context import ForwardContext, get_forward_context, set_forward_context
from rabbet.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from rabbet.layers.moe import FusedMoE
from rabbet.layers.norm import LayerNorm, RMSNorm
from rabbet.layers.refusals import decoder_refusals
from rabbet.layers.rotary import RotaryEmbedding, get_rope
from rabbet.layers.shards import Part

__all__ = [
    "Attention",
    "BuildContext",
    "ColumnParallelLinear",
    "ForwardContext",
    "FusedMoE",
    "GeluAndMul",
    "LayerNorm",
    "LinearBase",
    "LocalHeads",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "Part",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "decoder_refusals",
    "get_forward_context",
    "get_rope",
    "local_heads",
    "set_forward_context",
]
