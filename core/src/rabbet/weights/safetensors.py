"""The checkpoint format ``safetensors``: one file or several with an index; headers are checked before data is read.

Source: the safetensors format, README of its repository: 8 bytes little-endian header size, JSON header, data; the
tensors fill the data without holes.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbet.contracts import register_weight_format
from rabbet.contracts.weights import ModelFiles, ResolveQuery, TensorInfo, WeightFormat
from rabbet.errors import WeightsError, shorten
from rabbet.weights.hub import (
    find_directory,
    is_hub_name,
    model_directory,
    model_name,
    peek_config,
    read_json,
    read_model_files,
)

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsFormat", "read_infos"]

_MAX_HEADER_BYTES = 100_000_000
_MAX_AXES = 16
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "U16": ("uint16", 2), "U32": ("uint32", 4),
    "U64": ("uint64", 8), "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_infos(path: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one file; every size and offset is checked against the file.

    Raises:
        WeightsError: Naming file and tensor.
    """
    header, data_size = _header(path)
    infos = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, name, entry, data_size)
        spans.append((begin, end, name))
        infos.append(TensorInfo(name=name, shape=shape, dtype=dtype, file=path))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise([(0, 0, "the header"), *spans]):
        if begin != end:
            problem = f"overlaps with {shorten(name)}" if begin < end else f"leaves a hole after {shorten(name)}"
            raise WeightsError(f"tensor {shorten(other)} of {path} {problem}", file=str(path), tensor=other)
    if data_size != (spans[-1][1] if spans else 0):
        raise WeightsError(f"{path} has bytes that belong to no tensor: it is corrupt", file=str(path))
    return tuple(infos)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header, and the bytes of data behind it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise WeightsError(
                    f"{path} has {size} bytes and claims a header of {length} (at most {_MAX_HEADER_BYTES}): it is "
                    "truncated or no safetensors file; copy or download it again",
                    file=str(path),
                )
            header = json.loads(handle.read(length).decode("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"the header of {path} is no valid JSON: it is corrupt", file=str(path)) from error
    if not isinstance(header, dict):
        raise WeightsError(f"the header of {path} is no JSON object", file=str(path))
    return header, size - 8 - length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys, which two readers could take differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _entry(path: Path, name: str, entry: Any, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one tensor, checked."""

    def fail(problem: str) -> WeightsError:
        return WeightsError(f"tensor {shorten(name)} of {path} {problem}", file=str(path), tensor=name)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise fail("has no dtype, shape or data_offsets")
    known = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if known is None:
        raise fail(f"has the unknown dtype {shorten(entry['dtype'])}; known: {', '.join(_DTYPES)}")
    dtype, item_size = known
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise fail("has a shape or offsets that are no lists of non-negative integers")
    begin, end = offsets
    if end < begin or end > data_size:
        raise fail(f"lies at bytes {begin} to {end}, but there are {data_size}: the file is truncated or corrupt")
    needed = math.prod(shape) * item_size
    if needed != end - begin:
        raise fail(f"of shape {shape} and type {dtype} needs {needed} bytes, but has {end - begin}")
    return dtype, tuple(shape), begin, end


def _are_counts(values: Any) -> bool:
    """Whether it is a short list of integers that fit into 63 bits."""
    return (
        isinstance(values, list)
        and len(values) <= _MAX_AXES
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


@register_weight_format("safetensors")
class SafetensorsFormat(WeightFormat):
    """A Hugging Face directory (or hub name) with safetensors files. Pickled weights are refused."""

    @classmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """A directory with a config.json, or the form of a hub name."""
        directory = find_directory(query.model)
        return is_hub_name(query.model) if directory is None else (directory / "config.json").is_file()

    @classmethod
    def peek(cls, query: ResolveQuery) -> dict[str, Any] | None:
        """See ``WeightFormat``."""
        return peek_config(query)

    @classmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Find the files and check all headers; no file outside the model's directory is ever named."""
        directory = model_directory(query)
        index = _read_index(directory)
        files = _weight_files(directory, index)
        if not files:
            raise _nothing_found(directory)
        found = read_model_files(directory, files, name=model_name(query.model))
        _check_index(directory, index, cls.infos(found))
        return found

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """See ``WeightFormat``; a tensor that stands in two files is refused."""
        infos: dict[str, TensorInfo] = {}
        for path in files.weight_files:
            for info in read_infos(Path(path)):
                if info.name in infos:
                    raise WeightsError(
                        f"tensor {shorten(info.name)} stands in {infos[info.name].file.name} and again in {path}",
                        file=str(path),
                        tensor=info.name,
                    )
                infos[info.name] = info
        return tuple(infos.values())

    @classmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``WeightFormat``; the files are memory-mapped. Headers are checked anew: files may have changed."""
        from safetensors import SafetensorError, safe_open

        for path, infos in itertools.groupby(cls.infos(files), key=lambda info: info.file):
            name = None
            try:
                with safe_open(str(path), framework="pt", device="cpu") as handle:
                    for info in infos:
                        name = info.name
                        tensor = handle.get_tensor(name)
                        yield name, tensor
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{path}{'' if name is None else f', tensor {shorten(name)}'}: cannot be read: {error}",
                    file=str(path),
                    tensor=name,
                ) from error


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor to file name, of a checkpoint in several files; empty for others."""
    path = directory / _INDEX
    if not path.is_file():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map", file=str(path))
    for tensor, name in weight_map.items():
        is_plain = isinstance(name, str) and name == Path(name).name and "\\" not in name and "\0" not in name
        if not is_plain or not name.endswith(".safetensors"):
            raise WeightsError(
                f"{path} says that tensor {shorten(tensor)} is in {shorten(name)}, which is no safetensors file of "
                "this directory",
                file=str(path),
                tensor=tensor,
            )
    return weight_map


def _weight_files(directory: Path, index: dict[str, str]) -> tuple[Path, ...]:
    if not index:
        single = directory / "model.safetensors"
        return (single,) if single.is_file() else tuple(sorted(directory.glob("*.safetensors")))
    paths = tuple(directory / name for name in sorted(set(index.values())))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise WeightsError(
            f"{_INDEX} names {missing[0]} ({len(missing)} of {len(paths)} files are missing): finish the download",
            file=str(directory / missing[0]),
        )
    return paths


def _check_index(directory: Path, index: dict[str, str], infos: tuple[TensorInfo, ...]) -> None:
    """Each tensor of the index must be in the file that it names."""
    found = {info.name: info.file.name for info in infos}
    for tensor, name in index.items():
        if found.get(tensor) != name:
            raise WeightsError(
                f"{_INDEX} says that tensor {shorten(tensor)} is in {name}, but it is not",
                file=str(directory / name),
                tensor=tensor,
            )


def _nothing_found(directory: Path) -> WeightsError:
    pickled = sorted(item.name for pattern in _PICKLED for item in directory.glob(pattern))
    if pickled:
        return WeightsError(
            f"{directory} holds only pickled weights ({pickled[0]}), which can run code and are never loaded; "
            "convert them to safetensors",
            file=str(directory / pickled[0]),
        )
    return WeightsError(
        f"{directory} holds no *.safetensors file; --load-format dummy would draw random weights", file=str(directory)
    )
