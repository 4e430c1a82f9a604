"""A random Llama of two layers with a token a byte: a checkpoint that is written in milliseconds and loads as fast."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 64, 128, 2, 4
VOCAB = 257
END = 256
MAX_LEN = 32768
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def write_tiny_model(directory: Path) -> Path:
    """Write config.json, weights, tokenizer and chat template into ``directory``; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config())
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": TEMPLATE},
    )
    return directory


def config() -> dict[str, object]:
    """Content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "hidden_act": "silu",
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2, "vocab_size": VOCAB, "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
        "bos_token_id": END, "eos_token_id": END,
    }  # fmt: skip


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 0.15).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for projection, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("o", HIDDEN)):
            weights[f"{name}.self_attn.{projection}_proj.weight"] = matrix(rows, HIDDEN)
        for projection in ("gate", "up"):
            weights[f"{name}.mlp.{projection}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
