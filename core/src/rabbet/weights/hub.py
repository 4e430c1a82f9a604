"""Finds a Hugging Face model: a directory, or a hub name that is downloaded (or found in the cache)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rabbet._util.files import disk_problem, read_text
from rabbet.contracts.weights import ModelFiles, ResolveQuery
from rabbet.errors import WeightsError, shorten

__all__ = [
    "find_directory",
    "is_hub_name",
    "model_directory",
    "model_name",
    "peek_config",
    "read_json",
    "read_model_files",
]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")
_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_PATTERNS = ("*.safetensors",)
# Folders hold other formats' copies of the weights, and so do consolidated files.
_IGNORED_PATTERNS = ("*/*", "consolidated*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def find_directory(model: str) -> Path | None:
    """The directory that the text names, or None: also where it can be no path (NUL, too long, an unknown user)."""
    try:
        path = Path(model).expanduser()
        return path.resolve() if path.is_dir() else None
    except (OSError, ValueError, RuntimeError):
        return None


def is_hub_name(model: str) -> bool:
    """Whether the text has the form of a hub name and is no path that exists."""
    return _HUB_NAME.fullmatch(model) is not None and ".." not in model and not Path(model).exists()


def model_name(model: str) -> str:
    """The name under which a model is served: a hub name as it is, a directory by its last part."""
    directory = find_directory(model)
    return model if directory is None else directory.name or model


def peek_config(query: ResolveQuery) -> dict[str, Any] | None:
    """config.json alone, of a directory or fetched for a hub name; None where there is none.

    Raises:
        WeightsError: If it is not readable, or the hub has no answer.
    """
    directory = find_directory(query.model)
    if directory is None and is_hub_name(query.model):
        directory = _asked(query, ["config.json"])
    path = directory / "config.json" if directory is not None else None
    return read_json(path) if path is not None and path.is_file() else None


def model_directory(query: ResolveQuery, *, with_weights: bool = True) -> Path:
    """The directory of a model, downloaded if need be.

    Raises:
        WeightsError: Saying what is not there and what to do.
    """
    directory = find_directory(query.model)
    if directory is not None:
        return directory
    if not is_hub_name(query.model):
        raise WeightsError(
            f"{shorten(query.model)} is neither a directory nor a hub name (organisation/model); check the path",
            file=query.model,
        )
    return _asked(query, [*_PATTERNS, *(_WEIGHT_PATTERNS if with_weights else ())])


def _asked(query: ResolveQuery, patterns: list[str]) -> Path:
    try:
        return _download(query, patterns)
    except ImportError as error:
        raise WeightsError(
            f"{query.model} is no directory, and hub names need a package: pip install huggingface_hub"
        ) from error


def _download(query: ResolveQuery, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import constants, errors, snapshot_download

    name = query.model if query.revision is None else f"{query.model} (revision {shorten(query.revision)})"
    try:
        return Path(
            snapshot_download(
                query.model,
                revision=query.revision,
                cache_dir=query.download_dir,
                local_files_only=query.is_offline,
                allow_patterns=patterns,
                ignore_patterns=list(_IGNORED_PATTERNS),
            )
        )
    except errors.GatedRepoError as error:
        raise WeightsError(f"the model {name} is gated: accept its licence on its hub page and set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        why = "offline mode is on" if query.is_offline else "the hub cannot be reached"
        raise WeightsError(
            f"the model {name} is neither a directory nor in the local hub cache, and {why}; "
            "check the name, or download it first"
        ) from error
    except (errors.RevisionNotFoundError, errors.RepositoryNotFoundError) as error:
        raise WeightsError(
            f"the model {name} is neither a directory nor on the hub; check the name, or set HF_TOKEN if it is private"
        ) from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        if (problem := disk_problem(error, query.download_dir or constants.HF_HUB_CACHE)) is not None:
            raise WeightsError(f"the model {name} {problem}") from error
        raise WeightsError(
            f"the model {name} is no directory here and cannot be downloaded ({type(error).__name__}); try again later"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's directory.

    Raises:
        WeightsError: If it is too large, no JSON, or no object.
    """
    try:
        value = json.loads(read_text(path))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is no readable JSON file: {shorten(str(error))}", file=str(path)) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object", file=str(path))
    return value


def _read_template(path: Path) -> str:
    try:
        return read_text(path, limit=1 << 20)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error


def read_model_files(directory: Path, weight_files: tuple[Path, ...], *, name: str) -> ModelFiles:
    """Configuration, tokenizer and template of a directory. Nothing in it is run, whatever its config.json asks for.

    Raises:
        WeightsError: If config.json is absent or not readable.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise WeightsError(
            f"{directory} has no config.json: it is no Hugging Face model directory", file=str(config_path)
        )
    generation = directory / "generation_config.json"
    template = directory / "chat_template.jinja"
    has_tokenizer = any((directory / item).is_file() for item in _TOKENIZER_FILES)
    return ModelFiles(
        name=name,
        config=read_json(config_path),
        weight_files=weight_files,
        tokenizer_dir=directory if has_tokenizer else None,
        generation_config=read_json(generation) if generation.is_file() else {},
        chat_template=_read_template(template) if template.is_file() else None,
    )
