"""The standard suite on this format, over files that gguf's own writer makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from rabbet_sdk.conformance import WeightsConformance

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 16, 4, 2, 12, 24
KV = HIDDEN * KV_HEADS // HEADS
BLOCK = "model.layers.0"
NAMES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("token_embd.weight", (VOCAB, HIDDEN)),
    "model.norm.weight": ("output_norm.weight", (HIDDEN,)),
    "lm_head.weight": ("output.weight", (VOCAB, HIDDEN)),
    f"{BLOCK}.input_layernorm.weight": ("blk.0.attn_norm.weight", (HIDDEN,)),
    f"{BLOCK}.post_attention_layernorm.weight": ("blk.0.ffn_norm.weight", (HIDDEN,)),
    f"{BLOCK}.self_attn.q_proj.weight": ("blk.0.attn_q.weight", (HIDDEN, HIDDEN)),
    f"{BLOCK}.self_attn.k_proj.weight": ("blk.0.attn_k.weight", (KV, HIDDEN)),
    f"{BLOCK}.self_attn.v_proj.weight": ("blk.0.attn_v.weight", (KV, HIDDEN)),
    f"{BLOCK}.self_attn.o_proj.weight": ("blk.0.attn_output.weight", (HIDDEN, HIDDEN)),
    f"{BLOCK}.mlp.gate_proj.weight": ("blk.0.ffn_gate.weight", (FFN, HIDDEN)),
    f"{BLOCK}.mlp.up_proj.weight": ("blk.0.ffn_up.weight", (FFN, HIDDEN)),
    f"{BLOCK}.mlp.down_proj.weight": ("blk.0.ffn_down.weight", (HIDDEN, FFN)),
}
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves to pairs, as converters write them for ggml's rotary kernels."""
    rows = tensor.shape[0] // num_heads
    order = [
        head * rows + half * rows // 2 + i for head in range(num_heads) for i in range(rows // 2) for half in (0, 1)
    ]
    return tensor[order]


def write_gguf(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    """A Llama of one layer; its bytes go past the plugin into the file."""
    directory.mkdir(parents=True, exist_ok=True)
    assert config["architectures"] == ["LlamaForCausalLM"]
    writer = gguf.GGUFWriter(str(directory / "model.gguf"), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, tensor in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = pairs(tensor, heads) if heads else tensor
        data: np.ndarray = stored.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(NAMES[name][0], data, raw_dtype=gguf.GGMLQuantizationType[TYPES[tensor.dtype]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(directory / "model.gguf")


class TestGGUF(WeightsConformance):
    plugin = "weights/gguf"
    names = {name: shape for name, (_, shape) in NAMES.items()}
    config = {"architectures": ["LlamaForCausalLM"]}
    write = staticmethod(write_gguf)
