"""Finds a Hugging Face model: a directory, or a hub name that is downloaded (or found in the cache)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rabbet.contracts.weights import ModelFiles, ResolveQuery
from rabbet.errors import WeightsError

__all__ = ["is_hub_name", "model_directory", "read_model_files"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_MAX_JSON_BYTES = 64 << 20


def is_hub_name(model: str) -> bool:
    """Whether the text has the form of a hub name and is no path that exists."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


def model_directory(query: ResolveQuery, *, with_weights: bool = True) -> Path:
    """The directory of a model, downloaded if need be.

    Raises:
        WeightsError: Saying what is not there and what to do.
    """
    path = Path(query.model).expanduser()
    if path.is_dir():
        return path.resolve()
    if not is_hub_name(query.model):
        raise WeightsError(f"the directory {query.model} does not exist", file=query.model)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise WeightsError("hub names need the package huggingface_hub") from error
    patterns = _PATTERNS if with_weights else [item for item in _PATTERNS if "safetensors" not in item]
    try:
        return Path(
            snapshot_download(
                query.model,
                revision=query.revision,
                cache_dir=query.download_dir,
                local_files_only=query.is_offline,
                allow_patterns=patterns,
            )
        )
    except GatedRepoError as error:
        raise WeightsError(
            f"the model {query.model} is gated: accept its licence on its hub page and set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        why = "offline mode is on" if query.is_offline else "the hub cannot be reached"
        raise WeightsError(
            f"the model {query.model} is neither a directory nor in the local hub cache, and {why}; "
            "check the name, or download it first"
        ) from error
    except (RepositoryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise WeightsError(
            f"the model {query.model!r} is no directory and cannot be downloaded ({type(error).__name__}); check the name"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's directory.

    Raises:
        WeightsError: If it is too large, no JSON, or no object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise WeightsError(f"{path.name} is larger than {_MAX_JSON_BYTES >> 20} MiB", file=str(path))
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WeightsError(f"{path} is no readable JSON file: {error}", file=str(path)) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object", file=str(path))
    return value


def read_model_files(directory: Path, weight_files: tuple[Path, ...], *, name: str) -> ModelFiles:
    """Configuration, tokenizer and template of a directory.

    Raises:
        WeightsError: If config.json is absent or not readable.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise WeightsError(f"{directory} has no config.json: it is no Hugging Face model directory", file=str(config_path))
    generation = directory / "generation_config.json"
    template = directory / "chat_template.jinja"
    has_tokenizer = any((directory / item).is_file() for item in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return ModelFiles(
        name=name,
        config=read_json(config_path),
        weight_files=weight_files,
        tokenizer_dir=directory if has_tokenizer else None,
        generation_config=read_json(generation) if generation.is_file() else {},
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )
