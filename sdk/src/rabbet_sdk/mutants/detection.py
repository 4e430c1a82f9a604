"""Platforms whose detection has one fault each. This module imports no torch, as no platform should: each needs new processes."""
# ruff: noqa: ARG001 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from rabbet.contracts import register_platform
from rabbet_sdk.mutants.base import planter
from rabbet_sdk.strict.platform import StrictPlatform

__all__ = ["DETECTION"]


def _detects(before: Callable[[], Any], *, is_there: bool = True) -> Any:
    """``detect`` that does something first."""

    def detect(cls: Any) -> Any:
        before()
        return StrictPlatform.detect() if is_there else ()

    return classmethod(detect)


def _fail() -> None:
    raise OSError("libvendor.so: cannot open shared object file")


def _wait() -> None:
    threading.Thread(target=threading.Event().wait, name="vendor-watch", daemon=True).start()


_twin = planter(globals(), register_platform, StrictPlatform)
_TRACE = "detection_leaves_no_trace"
DETECTION = (
    _twin("detect_raises", _TRACE, "a machine without the driver cannot start with any other platform", detect=_detects(_fail)),
    _twin("detect_sets_environment", _TRACE, "the visible devices of every child process change",
          detect=_detects(lambda: os.environ.update(CUDA_VISIBLE_DEVICES="0"))),
    _twin("detect_leaves_a_thread", _TRACE, "a watcher of the driver, lost after a fork", detect=_detects(_wait)),
    _twin("absence_is_loud", "an_absent_device_is_no_news", "every start warns of hardware that nobody has",
          detect=_detects(lambda: print("no driver found"), is_there=False)),
    _twin("absence_is_accepted", "an_absent_device_is_no_news", "vllm#48277: chosen, and then it fails",
          detect=_detects(lambda: None, is_there=False)),
)  # fmt: skip
"""Part of the zoo of platforms."""
