"""Checkpoint formats with one fault each, on top of the strict twin."""

# ruff: noqa: ARG001, ARG005 - faults stand in for methods, whose arguments they do not all need

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rabbet.contracts import register_weight_format
from rabbet.errors import WeightsError
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.weights import StrictFormat

__all__ = ["MUTANTS"]

_Reader = Callable[..., Iterator[tuple[str, torch.Tensor]]]


def _plant(name: str, caught_by: str, story: str, **methods: Callable[..., Any]) -> Mutant:
    """Register a class with other class methods than the twin's, as an attribute of this module."""
    title = name.title().replace("_", "")
    parts = {key: classmethod(method) for key, method in methods.items()}
    cls = type(title, (StrictFormat,), {"__module__": __name__, "__doc__": story, **parts})
    globals()[title] = register_weight_format(name)(cls)
    return Mutant(name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story)


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> _Reader:
    """A ``tensors`` that changes each tensor."""
    return lambda cls, files: ((name, change(tensor)) for name, tensor in StrictFormat.tensors(files))


def _unchecked(cls: Any, query: Any) -> Any:
    """Pads a short file before its headers are checked."""
    raw = Path(query.model) / "tensors.raw"
    if raw.is_file():
        raw.write_bytes(raw.read_bytes().ljust(1 << 12, b"\0"))
    return StrictFormat.resolve(query)


def _unpickles(cls: Any, query: Any) -> Any:
    path = Path(query.model) / "pytorch_model.bin"
    if path.is_file():
        pickle.loads(path.read_bytes())
    return StrictFormat.resolve(query)


def _lazy_errors(cls: Any, files: Any) -> Any:
    try:
        return StrictFormat.infos(files)
    except WeightsError as error:
        raise KeyError(error.args) from error


_seen: dict[str, Any] = {}
_open: list[Any] = []


def _keep_open(cls: Any, files: Any) -> Any:
    _open.append(files.weight_files[0].open("rb"))
    return StrictFormat.tensors(files)


def _with_torch(cls: Any, query: Any) -> Any:
    return StrictFormat.resolve(query) if torch.float32.itemsize == 4 else None


MUTANTS = (
    _plant("halves_rounded", "tensors_come_back_bit_by_bit", "bfloat16 through float16",
           tensors=_each(lambda t: t.half().to(t.dtype) if t.dtype == torch.bfloat16 else t)),
    _plant("tensor_twice", "tensors_come_back_bit_by_bit", "the first tensor comes again at the end",
           tensors=lambda cls, files: (pair for _ in range(2) for pair in StrictFormat.tensors(files))),
    _plant("cut_is_filled_up", "cut_files_are_refused", "the end of a cut file is taken for zeros", resolve=_unchecked),
    _plant("wrong_error", "bent_headers_are_refused", "KeyError for a bad header", infos=_lazy_errors),
    _plant("matches_everything", "only_own_files_are_recognised", "the first format takes every directory",
           matches=lambda cls, query: True),
    _plant("runs_pickles", "pickles_are_never_loaded", "old weights are unpickled", resolve=_unpickles),
    _plant("imports_torch", "front_end_needs_no_torch", "llm#732: a front end that takes seconds to start",
           resolve=_with_torch),
    _plant("cached_by_path", "two_models_and_new_files_are_kept_apart", "a download that was repaired stays broken",
           tensors=lambda cls, files: iter(
               _seen.setdefault(str(files.weight_files[0]), list(StrictFormat.tensors(files))))),
    _plant("keeps_files_open", "nothing_stays_open", "one handle a load", tensors=_keep_open),
)  # fmt: skip
