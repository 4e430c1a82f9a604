"""The configuration after every "auto" was decided: one object, made in the front process, obeyed by all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rabbet.config.schema import EngineConfig
from rabbet.contracts.weights import ModelFiles
from rabbet.errors import ConfigError
from rabbet.registry import Composition

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ResolvedConfig", "load_hf_config", "resolved_from_bytes", "resolved_to_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """What the engine runs.

    Attributes:
        config: What the user asked for.
        files: The model on disk.
        architecture: Name under which the model plugin registered it, or ``*`` for the fallback.
        dtype: Type of activations and dense weights.
        kv_cache_dtype: Name of the KV-cache dtype, never ``auto``.
        block_size: Tokens a KV block.
        max_model_len: Longest context; an upper bound until the memory is known if ``is_max_model_len_auto``.
        is_max_model_len_auto: The engine may lower ``max_model_len`` to what fits into the KV cache.
        max_num_batched_tokens: Tokens a step.
        max_num_seqs: Requests a step.
        is_chunked_prefill: Prompts may be split over steps.
        is_async: Steps are planned one ahead.
        memory_fraction: Share of the device's memory for weights, activations and KV cache.
        kv_cache_memory_bytes: Size of the KV cache if the user fixed it.
        max_kv_cache_bytes: Ceiling of the KV cache that the platform sets otherwise.
        vocab_size: Rows of the embedding: ids that a request may name.
        eos_token_ids: Ids that end a text.
        world_size: Ranks.
        arch: Architecture of the device.
        device_type: Type of the device.
        num_experts: Routed experts; 0 for dense models.
        options: Options of each plugin, ``kind/name`` to mapping.
        notes: What was changed or chosen and why, for the start-up log.
        composition: The plugins.
    """

    config: EngineConfig
    files: ModelFiles
    architecture: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    is_max_model_len_auto: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    is_chunked_prefill: bool
    is_async: bool
    memory_fraction: float
    kv_cache_memory_bytes: int | None
    max_kv_cache_bytes: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    world_size: int
    arch: str
    device_type: str
    composition: Composition
    num_experts: int = 0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def resolved_to_bytes(resolved: ResolvedConfig) -> bytes:
    """msgpack form, for the engine process and the workers."""
    plain = {name: getattr(resolved, name) for name in ResolvedConfig.__slots__ if name not in ("config", "files")}
    plain["config"] = asdict(resolved.config)
    plain["files"] = {
        "name": resolved.files.name,
        "config": dict(resolved.files.config),
        "weight_files": [str(path) for path in resolved.files.weight_files],
        "tokenizer_dir": str(resolved.files.tokenizer_dir) if resolved.files.tokenizer_dir else None,
        "generation_config": dict(resolved.files.generation_config),
        "chat_template": resolved.files.chat_template,
    }
    return msgspec.msgpack.encode(plain)


def resolved_from_bytes(data: bytes) -> ResolvedConfig:
    """The object that ``resolved_to_bytes`` was given.

    Raises:
        msgspec.DecodeError: If the bytes are no such object.
    """
    plain = msgspec.msgpack.decode(data)
    files = plain.pop("files")
    files["weight_files"] = tuple(Path(path) for path in files["weight_files"])
    files["tokenizer_dir"] = Path(files["tokenizer_dir"]) if files["tokenizer_dir"] else None
    composition = msgspec.convert(plain.pop("composition"), Composition)
    plain["eos_token_ids"] = tuple(plain["eos_token_ids"])
    plain["notes"] = tuple(plain["notes"])
    return ResolvedConfig(
        config=EngineConfig(**plain.pop("config")), files=ModelFiles(**files), composition=composition, **plain
    )


def load_hf_config(files: ModelFiles, overrides: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """transformers' configuration object for a model on disk, with ``--hf-overrides`` laid over it."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    values = {**files.config, **(overrides or {})}
    try:
        if str(values.get("model_type")) in CONFIG_MAPPING:
            return CONFIG_MAPPING[values.pop("model_type")](**values)
        # A model type that transformers does not know: the plugin reads the plain values.
        return PretrainedConfig(**values)
    except Exception as error:  # the library checks types with exceptions of several kinds
        told = " ".join(str(error).split())
        raise ConfigError(f"config.json, with --hf-overrides over it, is wrong: {told}", field="model") from error
