"""Streams a checkpoint into a model and accounts for every tensor and every parameter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rabbet.errors import WeightsError
from rabbet.layers.shards import copy_checked
from rabbet.weights.rules import WeightRules

__all__ = ["LoadReport", "finish_loading", "load_weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What was loaded.

    Attributes:
        num_tensors: Checkpoint tensors read.
        size_bytes: Their bytes in the checkpoint.
        num_parameters: Parameters filled.
        parameters_bytes: Bytes of the model's parameters on this rank, in their own types, before packing.
        seconds: Time from the first tensor to the last packed weight.
    """

    num_tensors: int
    size_bytes: int
    num_parameters: int
    parameters_bytes: int
    seconds: float


def load_weights(
    model: nn.Module,
    rules: WeightRules,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    progress: Callable[[str, int], None] | None = None,
) -> LoadReport:
    """Fill a model's parameters, then let every layer repack what it got.

    Args:
        model: Its parameters carry ``weight_loader`` where they are sharded.
        rules: The map of names.
        tensors: Names and tensors of the checkpoint.
        progress: Called with name and bytes of each tensor, before it is copied.

    Loading again replaces all weights; what layers packed is packed anew.

    Raises:
        WeightsError: Naming tensors that are unexpected, missing, or of another shape.
    """
    started = time.monotonic()
    parameters = dict(model.named_parameters())
    loaded: dict[str, set[object]] = {}
    unexpected: list[str] = []
    num_tensors = size_bytes = 0
    with torch.no_grad():
        for name, tensor in tensors:
            num_tensors += 1
            size = tensor.numel() * tensor.element_size()
            size_bytes += size
            if progress is not None:
                progress(name, size)
            if rules.is_ignored(name):
                continue
            target, shard = rules.target(name)
            parameter = parameters.get(target)
            if parameter is None:
                unexpected.append(name)
                continue
            _fill(parameter, tensor, name, shard)
            loaded.setdefault(target, set()).add(shard)
        _check_complete(parameters, rules, loaded, unexpected)
        parameters_bytes = sum(item.numel() * item.element_size() for item in parameters.values())
        finish_loading(model)
    return LoadReport(
        num_tensors=num_tensors,
        size_bytes=size_bytes,
        num_parameters=len(loaded),
        parameters_bytes=parameters_bytes,
        seconds=time.monotonic() - started,
    )


def finish_loading(model: nn.Module) -> None:
    """Let every layer repack, quantise or check what it got."""
    for module in model.modules():
        # Asked of the class: a module that has no such method is not probed for one.
        if callable(getattr(type(module), "process_weights_after_loading", None)):
            module.process_weights_after_loading()  # type: ignore[operator]


def _fill(parameter: nn.Parameter, tensor: torch.Tensor, name: str, shard: object) -> None:
    loader = getattr(parameter, "weight_loader", None)
    try:
        if loader is not None:
            loader(parameter, tensor, shard)
        else:
            copy_checked(parameter.data, tensor, name)
    except (WeightsError, RuntimeError, IndexError, ValueError) as error:
        raise WeightsError(f"tensor {name} does not fit the model: {error}", tensor=name) from error


def _check_complete(
    parameters: dict[str, nn.Parameter], rules: WeightRules, loaded: dict[str, set[object]], unexpected: list[str]
) -> None:
    missing = [
        name if shards == {None} else f"{name} ({_some(sorted(map(str, lacking)))})"
        for name in parameters
        if not rules.is_optional(name)
        for shards in (rules.shards(name),)
        for lacking in (shards - loaded.get(name, set()),)
        if lacking
    ]
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {_some(missing)}")
    if unexpected:
        problems.append(f"the model has no place for {_some(unexpected)}")
    if problems:
        raise WeightsError("; ".join(problems), tensor=(missing or unexpected)[0])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
