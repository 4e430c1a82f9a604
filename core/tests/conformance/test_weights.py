"""Core's own checkpoint formats pass the suite that plugins are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rabbet_sdk.conformance import WeightsConformance
from safetensors.torch import save_file


def write_safetensors(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), directory / "model.safetensors")
    return str(directory)


def write_config(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    return str(directory)


class TestSafetensors(WeightsConformance):
    plugin = "weights/safetensors"
    write = staticmethod(write_safetensors)


class TestDummy(WeightsConformance):
    plugin = "weights/dummy"
    write = staticmethod(write_config)
