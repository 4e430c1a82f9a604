"""Contract of a checkpoint format: where the files are, what they say of the model, and its tensors one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["ModelFiles", "ResolveQuery", "TensorInfo", "WeightFormat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolveQuery:
    """What the user asked for.

    Attributes:
        model: The ``MODEL`` argument: a directory, a file, a hub name, or a short name that a format provides.
        revision: Hub revision, or None.
        download_dir: Where to keep downloads, or None for the usual cache.
        is_offline: No network call may be made.
    """

    model: str
    revision: str | None = None
    download_dir: str | None = None
    is_offline: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        name: Name under which it is served by default.
        config: Content of config.json, or its equivalent made from the file's own metadata. Has ``architectures``.
        weight_files: Files with tensors, absolute, in order.
        tokenizer_dir: Directory that transformers' ``AutoTokenizer.from_pretrained`` can read: the model's own, or one
            that the format wrote into the cache. None if there is no tokenizer.
        generation_config: Content of generation_config.json or its equivalent.
        chat_template: The Jinja template where the format carries it itself, else None (the tokenizer's is used).
    """

    name: str
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    tokenizer_dir: Path | None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor known from a header, without its data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


class WeightFormat(ABC):
    """A checkpoint format.

    ``matches``, ``peek`` and ``resolve`` run in the front process and import no torch; ``tensors`` runs in each worker. Short names
    of models that a format provides stand in its manifest, as the claim ``models``, so that a mistyped one is recognised.
    """

    @classmethod
    @abstractmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """Whether this format recognises the model, without network. The first match in priority order wins."""

    @classmethod
    def peek(cls, query: ResolveQuery) -> Mapping[str, Any] | None:
        """config.json alone, fetched if need be, so that plugins which it needs are missed before any weights are
        fetched or read; None where that is as dear as ``resolve``. Since 1.1.

        Raises:
            rabbet.errors.WeightsError: Naming what is corrupt or cannot be fetched.
        """
        return None

    @classmethod
    @abstractmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Find (and download) the files.

        Raises:
            rabbet.errors.WeightsError: Naming what is missing or corrupt and what to do.
        """

    @classmethod
    @abstractmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """Names, shapes and dtypes from the headers; every offset and size is checked against the file's length."""

    @classmethod
    @abstractmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, under its Hugging Face name, on the CPU (memory-mapped where possible). Never unpickles.

        Raises:
            rabbet.errors.WeightsError: Naming file and tensor.
        """
