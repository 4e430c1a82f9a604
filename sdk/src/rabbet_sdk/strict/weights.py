"""A checkpoint as plain bytes: ``tensors.raw`` holds the data, ``tensors.json`` says where each tensor lies.

    tensors.json  {"NAME": {"dtype": "float32", "shape": [2, 3], "offset": 0}, ...}

config.json and the tokenizer's files stand beside them, as in every Hugging Face directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbet.contracts import register_weight_format
from rabbet.contracts.weights import ModelFiles, ResolveQuery, TensorInfo, WeightFormat
from rabbet.errors import WeightsError, shorten
from rabbet.weights.hub import find_directory, model_name, read_json, read_model_files
from rabbet_sdk.strict import seal

if TYPE_CHECKING:
    import torch

__all__ = ["StrictFormat"]

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int8": 1, "uint8": 1, "bool": 1}


@register_weight_format("strict")
@seal
class StrictFormat(WeightFormat):
    """A directory with ``tensors.json``. The front end calls all but ``tensors``, so torch is imported there only."""

    @classmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """A directory with an index."""
        directory = find_directory(query.model)
        return directory is not None and (directory / "tensors.json").is_file()

    @classmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Every header is checked now, before a worker starts."""
        directory = find_directory(query.model)
        if directory is None:
            raise WeightsError(f"{shorten(query.model)} is no directory; check the path", file=query.model)
        files = read_model_files(directory, (directory / "tensors.raw",), name=model_name(query.model))
        cls.infos(files)
        return files

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """What the index says, checked against the file's length."""
        return tuple(info for info, _, _ in _entries(files))

    @classmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensor by tensor; one is in memory at a time."""
        import torch

        entries = _entries(files)
        with files.weight_files[0].open("rb") as handle:
            for info, offset, size in entries:
                handle.seek(offset)
                data = bytearray(handle.read(size))
                if len(data) != size:
                    raise WeightsError(f"{info.file} was cut while it was read", file=str(info.file), tensor=info.name)
                dtype = getattr(torch, info.dtype)
                # frombuffer takes no empty buffers.
                flat = torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)
                yield info.name, flat.reshape(info.shape)


def _entries(files: ModelFiles) -> list[tuple[TensorInfo, int, int]]:
    """Each tensor with its first byte and its bytes."""
    path = Path(files.weight_files[0])
    try:
        length = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    entries = []
    for name, entry in read_json(path.with_name("tensors.json")).items():
        try:
            dtype, shape, offset = entry["dtype"], entry["shape"], entry["offset"]
            is_sound = dtype in _ITEM_BYTES and isinstance(shape, list) and all(map(_is_count, [*shape, offset]))
        except (TypeError, KeyError):
            is_sound = False
        if not is_sound:
            message = f"tensor {shorten(name)} of {path.with_name('tensors.json')} has no sound dtype, shape and offset"
            raise WeightsError(message, file=str(path), tensor=name)
        size = math.prod(shape) * _ITEM_BYTES[dtype]
        if offset + size > length:
            message = f"tensor {shorten(name)} ends at byte {offset + size} of {path}, which has {length}: it is cut"
            raise WeightsError(message, file=str(path), tensor=name)
        entries.append((TensorInfo(name=name, shape=tuple(shape), dtype=dtype, file=path), offset, size))
    return entries


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
