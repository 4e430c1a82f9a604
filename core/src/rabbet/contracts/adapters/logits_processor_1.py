"""Logits processors of contract 1: ``apply(logits_BV, slots, output_token_ids)`` instead of one batch object."""

from __future__ import annotations

import inspect
from types import new_class
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.logits_processor import LogitsBatch

__all__ = ["adapt"]


def adapt(old: type[Any]) -> type[Any]:
    """A subclass that takes the batch apart. Name, module and records stay those of ``old``.

    Raises:
        TypeError: If ``old.apply`` does not take the three arguments of contract 1.
    """
    inspect.signature(old.apply).bind(object(), object(), object(), object())

    def apply(self: Any, batch: LogitsBatch) -> torch.Tensor:
        return old.apply(self, batch.logits_BV, batch.slots, batch.output_token_ids)  # type: ignore[no-any-return]

    members = {
        "apply": apply,
        "__module__": old.__module__,
        "__qualname__": old.__qualname__,
        "__rabbet_registrations__": vars(old).get("__rabbet_registrations__", ()),
    }
    return new_class(old.__name__, (old,), {}, lambda body: body.update(members))
