"""The runner of one rank, made for executors in whatever process they have for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rabbet.config.resolved import resolved_from_bytes
from rabbet.contracts.executor import ModelRunner
from rabbet.registry.onefile import stage_file
from rabbet.runner.runner import DeviceRunner

__all__ = ["make_runner"]


def make_runner(config: Any, **where: Any) -> ModelRunner:
    """See ``Executor.make_runner``."""
    if isinstance(config, bytes):
        config = resolved_from_bytes(config)
        for file in config.config.plugins.files:
            stage_file(Path(file))
        config.composition.verify()
    return DeviceRunner(config, **where)
