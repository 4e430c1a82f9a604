"""The checkpoint format ``safetensors``: one file or several with an index. Headers are checked before anything is read.

Source: the safetensors format, README of its repository: 8 bytes little-endian header size, JSON header, data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbet.contracts import register_weight_format
from rabbet.contracts.weights import ModelFiles, ResolveQuery, TensorInfo, WeightFormat
from rabbet.errors import WeightsError
from rabbet.weights.hub import is_hub_name, model_directory, read_json, read_model_files

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsFormat", "read_infos"]

_MAX_HEADER_BYTES = 100 << 20
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "U16": ("uint16", 2), "U32": ("uint32", 4),
}  # fmt: skip
_INDEX = "model.safetensors.index.json"


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
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise WeightsError(f"tensors {name} and {other} of {path.name} overlap", file=str(path), tensor=other)
    return tuple(infos)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            prefix = handle.read(8)
            if len(prefix) < 8:
                raise WeightsError(f"{path.name} is too short for a safetensors file ({size} bytes)", file=str(path))
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise WeightsError(
                    f"{path.name} claims a header of {length} bytes, but has {size} and the limit is {_MAX_HEADER_BYTES}: "
                    "it is truncated or corrupt; copy or download it again",
                    file=str(path),
                )
            header = json.loads(handle.read(length).decode("utf-8"))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WeightsError(f"the header of {path.name} is no JSON: it is corrupt", file=str(path)) from error
    if not isinstance(header, dict):
        raise WeightsError(f"the header of {path.name} is no JSON object", file=str(path))
    return header, size - 8 - length


def _entry(path: Path, name: str, entry: Any, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one tensor, checked."""

    def fail(problem: str) -> WeightsError:
        return WeightsError(f"tensor {name} of {path.name} {problem}", file=str(path), tensor=name)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise fail("has no dtype, shape or data_offsets")
    if entry["dtype"] not in _DTYPES:
        raise fail(f"has the unknown dtype {entry['dtype']!r}")
    dtype, item_size = _DTYPES[entry["dtype"]]
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise fail("has a shape or offsets that are no non-negative integers")
    begin, end = offsets
    if end < begin or end > data_size:
        raise fail(f"lies at bytes {begin} to {end}, but the file has {data_size} bytes of data: it is truncated or corrupt")
    if math.prod(shape) * item_size != end - begin:
        raise fail(f"of shape {shape} and type {dtype} needs {math.prod(shape) * item_size} bytes, but has {end - begin}")
    return dtype, tuple(shape), begin, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


@register_weight_format("safetensors")
class SafetensorsFormat(WeightFormat):
    """A Hugging Face directory (or hub name) with safetensors files. Pickled weights are refused."""

    @classmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """A directory with a config.json and no other format's files, or the form of a hub name."""
        path = Path(query.model).expanduser()
        if path.is_dir():
            return (path / "config.json").is_file()
        return is_hub_name(query.model)

    @classmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Find files; nothing outside the model's directory is ever named."""
        directory = model_directory(query)
        files = _weight_files(directory)
        if not files:
            pickled = sorted(item.name for pattern in ("*.bin", "*.pt", "*.pth") for item in directory.glob(pattern))
            if pickled:
                raise WeightsError(
                    f"{directory} holds only pickled weights ({pickled[0]}), which can run code and are never loaded; "
                    "convert them to safetensors",
                    file=str(directory / pickled[0]),
                )
            raise WeightsError(
                f"{directory} holds no *.safetensors file (--load-format dummy draws random weights)", file=str(directory)
            )
        name = query.model if is_hub_name(query.model) else Path(query.model).name or str(directory)
        return read_model_files(directory, files, name=name)

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """See ``WeightFormat``."""
        return tuple(info for path in files.weight_files for info in read_infos(Path(path)))

    @classmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``WeightFormat``; the files are memory-mapped."""
        from safetensors import SafetensorError, safe_open

        for path in files.weight_files:
            names = [info.name for info in read_infos(Path(path))]
            try:
                with safe_open(str(path), framework="pt", device="cpu") as handle:
                    for name in names:
                        yield name, handle.get_tensor(name)
            except SafetensorError as error:
                raise WeightsError(f"{path} cannot be read: {error}", file=str(path)) from error


def _weight_files(directory: Path) -> tuple[Path, ...]:
    index = directory / _INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        return (single,) if single.is_file() else tuple(sorted(directory.glob("*.safetensors")))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{_INDEX} has no weight_map", file=str(index))
    paths = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{_INDEX} names {name!r}, which is no safetensors file of this directory", file=str(index))
        path = directory / name
        if not path.is_file():
            raise WeightsError(f"{_INDEX} names {name}, which is not there: the download is incomplete", file=str(path))
        paths.append(path)
    return tuple(paths)
