"""Reads a GGUF header once, checks every size in it against the file, and hands it on as plain data.

Source: the GGUF specification in ggml's repository, docs/gguf.md (version 3).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from rabbet.errors import WeightsError

__all__ = ["BLOCK_TYPES", "GGUFHeader", "GGUFTensor", "read_header"]

BLOCK_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Tensor types that this plugin unpacks."""

_PREFIX = struct.Struct("<4sIQQ")
_MAX_ENTRIES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One tensor of the file.

    Attributes:
        name: GGUF's name, e.g. ``blk.0.attn_q.weight``.
        shape: Sizes in torch's order (rows first).
        block_type: One of ``BLOCK_TYPES``.
        offset: First byte in the file.
        size_bytes: Bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    block_type: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFHeader:
    """Metadata and table of tensors. Token lists are left out of ``fields``: only their length is kept."""

    fields: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]
    num_tokens: int


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of ``path``.

    Raises:
        WeightsError: If the file is no GGUF file, is truncated, or names a tensor type that is not supported.
    """
    _check_prefix(path)
    try:
        reader = gguf.GGUFReader(str(path))
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError, TypeError) as error:
        # The reader trusts sizes in the header; whatever a bad one leads to means the same thing here.
        raise WeightsError(
            f"{path.name} has a corrupt or truncated GGUF header ({type(error).__name__}: {error}); "
            "copy or download the file again",
            file=str(path),
        ) from error
    fields = {name: _value(field) for name, field in reader.fields.items() if not _is_token_list(name)}
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    size = path.stat().st_size
    return GGUFHeader(
        fields=fields,
        tensors=tuple(_checked(tensor, path, size) for tensor in reader.tensors),
        num_tokens=len(tokens.data) if tokens is not None else 0,
    )


def _check_prefix(path: Path) -> None:
    """Magic, version and counts, before the library makes objects of whatever the counts promise."""
    try:
        with path.open("rb") as handle:
            prefix = handle.read(_PREFIX.size)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    if len(prefix) < _PREFIX.size:
        raise WeightsError(f"{path.name} is too short for a GGUF file ({len(prefix)} bytes)", file=str(path))
    magic, version, num_tensors, num_fields = _PREFIX.unpack(prefix)
    if magic != b"GGUF":
        raise WeightsError(f"{path.name} is not a GGUF file: it starts with {magic!r}", file=str(path))
    if version not in (2, 3):
        raise WeightsError(
            f"{path.name} is GGUF version {version}, big-endian or corrupt; little-endian versions 2 and 3 are read",
            file=str(path),
        )
    if num_tensors > _MAX_ENTRIES or num_fields > _MAX_ENTRIES:
        raise WeightsError(
            f"{path.name} claims {num_tensors} tensors and {num_fields} fields; the limit is {_MAX_ENTRIES}",
            file=str(path),
        )


def _is_token_list(name: str) -> bool:
    return name.startswith("tokenizer.ggml.") and name.rsplit(".", 1)[1] in ("tokens", "token_type", "merges", "scores")


def _value(field: Any) -> Any:
    value = field.contents()
    return value.item() if hasattr(value, "item") else value


def _checked(tensor: Any, path: Path, file_size: int) -> GGUFTensor:
    name = str(tensor.name)
    block_type = tensor.tensor_type.name
    if block_type not in BLOCK_TYPES:
        raise WeightsError(
            f"tensor {name} in {path.name} is of type {block_type}; supported: {', '.join(BLOCK_TYPES)}",
            file=str(path),
            tensor=name,
        )
    offset, size_bytes = int(tensor.data_offset), int(tensor.n_bytes)
    if offset < 0 or offset + size_bytes > file_size:
        raise WeightsError(
            f"tensor {name} in {path.name} ends at byte {offset + size_bytes}, but the file has {file_size}: "
            "it is truncated; copy or download it again",
            file=str(path),
            tensor=name,
        )
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GGUFTensor(name=name, shape=shape, block_type=block_type, offset=offset, size_bytes=size_bytes)
