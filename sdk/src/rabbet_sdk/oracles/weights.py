"""Checkpoints written byte by byte, and tensors of random bits: NaN payloads and denormals must survive, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["bits_of", "random_bits", "write_plain"]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor whose bytes are random; of bool, 0 and 1."""
    count = int(np.prod(shape))
    data = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    raw = torch.from_numpy(data & 1 if dtype == torch.bool else data)
    return (raw.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_plain(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    """Write the format of the template of ``rabbet-sdk new weights``; returns the ``MODEL`` argument."""
    directory.mkdir(parents=True, exist_ok=True)
    index, data = {}, b""
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": len(data)}
        data += bits_of(tensor)
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    (directory / "tensors.json").write_text(json.dumps(index), encoding="utf-8")
    (directory / "tensors.raw").write_bytes(data)
    return str(directory)
