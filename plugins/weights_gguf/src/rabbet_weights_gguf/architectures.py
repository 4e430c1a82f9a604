"""What a GGUF file says of its model, in Hugging Face's words: configuration and tensor names.

Source: gguf-py's constants (key and tensor names) and the configuration classes of transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rabbet.errors import WeightsError
from rabbet_weights_gguf.header import GGUFHeader

__all__ = ["SUPPORTED", "generation_config", "hf_config", "hf_name", "needs_unpermute"]

SUPPORTED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""GGUF architecture to the name in config.json."""

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_DERIVED = ("rope_freqs.weight",)
"""Tensors that hold what the configuration already says."""


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a tensor; None for tensors that are derived from the configuration.

    Raises:
        KeyError: If the name is not known.
    """
    if name in _DERIVED:
        return None
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        raise KeyError(name)
    block, part, leaf = match.groups()
    return f"model.layers.{block}.{_IN_BLOCK[part]}.{leaf}"


def needs_unpermute(architecture: str, name: str) -> bool:
    """Whether rows of the tensor stand in ggml's rotary order: pairs (2i, 2i + 1), not halves (i, i + D / 2)."""
    return architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name) is not None


def hf_config(header: GGUFHeader, path: Path) -> dict[str, Any]:
    """Content of config.json.

    Raises:
        WeightsError: Naming the key that is missing, or the architecture that is not supported.
    """
    fields = header.fields
    architecture = fields.get("general.architecture")
    if architecture not in SUPPORTED:
        raise WeightsError(
            f"{path.name} holds the architecture {architecture!r}; this plugin reads {', '.join(sorted(SUPPORTED))}",
            file=str(path),
        )

    def need(key: str) -> Any:
        full = f"{architecture}.{key}"
        if full not in fields:
            raise WeightsError(f"{path.name} lacks the metadata key {full}", file=str(path))
        return fields[full]

    names = {tensor.name for tensor in header.tensors}
    num_heads = int(need("attention.head_count"))
    hidden_size = int(need("embedding_length"))
    head_dim = fields.get(f"{architecture}.attention.key_length") or fields.get(f"{architecture}.rope.dimension_count")
    config: dict[str, Any] = {
        "architectures": [SUPPORTED[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields.get(f"{architecture}.attention.head_count_kv", num_heads)),
        "head_dim": int(head_dim or hidden_size // num_heads),
        "max_position_embeddings": int(need("context_length")),
        # The file stores float32(1e-5), which prints as 9.999999747378752e-06; the model was trained with 1e-5.
        "rms_norm_eps": float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "vocab_size": _vocab_size(header, path),
        "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": _rope(header, architecture, path),
        "dtype": "bfloat16",
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    for key in ("bos", "eos", "padding"):
        if (token_id := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{'pad' if key == 'padding' else key}_token_id"] = int(token_id)
    return config


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Content of generation_config.json: the ids that start and end a text."""
    fields = header.fields
    ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    ids = list(dict.fromkeys(int(token_id) for token_id in ends if token_id is not None))
    config: dict[str, Any] = {}
    if (start := fields.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = int(start)
    if ids:
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return config


def _vocab_size(header: GGUFHeader, path: Path) -> int:
    for tensor in header.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise WeightsError(f"{path.name} lacks the tensor token_embd.weight", file=str(path), tensor="token_embd.weight")


def _rope(header: GGUFHeader, architecture: str, path: Path) -> dict[str, Any]:
    """Rotary parameters. Llama 3.1 files carry factors as a tensor; its constants are the only ones ever used."""
    fields = header.fields
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(fields.get(f"{architecture}.rope.freq_base", 10000.0)),
    }
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    factor = float(fields.get(f"{architecture}.rope.scaling.factor", 1.0))
    if any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        return parameters | {
            "rope_type": "llama3",
            "factor": 32.0 if "3.2" in str(fields.get("general.name", "")) else 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if scaling in ("none", "") or factor == 1.0:
        return parameters
    if scaling not in ("linear", "yarn"):
        raise WeightsError(
            f"{path.name} has the rope scaling {scaling!r}; none, linear and yarn are read", file=str(path)
        )
    parameters |= {"rope_type": scaling, "factor": factor}
    original = fields.get(f"{architecture}.rope.scaling.original_context_length")
    if scaling == "yarn" and original is not None:
        parameters["original_max_position_embeddings"] = int(original)
    return parameters
