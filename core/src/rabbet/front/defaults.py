"""Sampling defaults of a server: the model's generation_config.json, a directory's, or none, plus overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rabbet._util.files import read_text
from rabbet.config.schema import ModelConfig
from rabbet.errors import ConfigError
from rabbet.types.sampling import SamplingParams

__all__ = ["default_sampling", "sampling_defaults"]

_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "skip_special_tokens": "skip_special_tokens",
}
_NONE = ("rabbet", "vllm", "none")


def sampling_defaults(config: ModelConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Field of ``SamplingParams`` to default. ``max_tokens`` is a default, never a ceiling.

    Raises:
        ConfigError: If a directory has no readable generation_config.json, or a value is out of range.
    """
    if config.generation_config == "auto":
        source = dict(generation_config)
    elif config.generation_config in _NONE:
        source = {}
    else:
        path = Path(config.generation_config) / "generation_config.json"
        try:
            source = dict(json.loads(read_text(path)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"--generation-config {config.generation_config}: {path} cannot be read as a JSON object ({error})",
                field="model.generation_config",
            ) from error
    source |= config.override_generation_config
    found = {target: source[key] for key, target in _KEYS.items() if source.get(key) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ConfigError(f"the sampling defaults are wrong: {error}", field="model.generation_config") from error
    return found


def default_sampling(defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters for requests that name none."""
    return SamplingParams(**defaults)
