"""Linear backends with one fault each, on top of the strict twin."""
# ruff: noqa: ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

from typing import Any

import torch

from rabbet.contracts import register_linear_backend
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.linear import StrictLinear

__all__ = ["MUTANTS"]

_apply, _pack, _gated = StrictLinear.apply, StrictLinear.pack, StrictLinear.apply_gated_silu


def _plant(name: str, caught_by: str, story: str, claims: str | None = None, **methods: Any) -> Mutant:
    """Register a class with other methods than the twin's, as an attribute of this module."""
    title = name.title().replace("_", "")
    cls = type(title, (StrictLinear,), {"__module__": __name__, "__doc__": story, **methods})
    globals()[title] = register_linear_backend(name)(cls)
    return Mutant(
        name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims
    )  # fmt: skip


def _half_sums(self: Any, x: Any, packed: Any, bias: Any = None) -> Any:
    """Sums of 64 inputs each, added up in the activations' type."""
    total = torch.zeros((), dtype=x.dtype)
    for start in range(0, x.shape[-1], 64):
        total = total + _apply(self, x[..., start : start + 64], packed[start : start + 64])
    return total if bias is None else total + bias


def _rows_only(self: Any, x: Any, packed: Any, bias: Any = None) -> Any:
    return _apply(self, x.reshape(-1, x.shape[-1]), packed, bias)


def _ignores_strides(self: Any, x: Any, packed: Any, bias: Any = None) -> Any:
    row = x.stride(-2) if x.dim() > 1 else 0
    return _apply(self, torch.as_strided(x, x.shape, (row, 1)) if x.dim() == 2 else x, packed, bias)


def _whole_tiles(self: Any, x: Any, packed: Any, bias: Any = None) -> Any:
    """Reads on to the next multiple of 16 inputs, and multiplies that by zero."""
    lacking = -x.shape[-1] % 16
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.stride(0) * (x.shape[0] - 1)
    if x.dim() == 2 and room >= x.shape[1] + lacking:
        beyond = torch.as_strided(x, (x.shape[0], lacking), x.stride(), x.storage_offset() + x.shape[1])
        return _apply(self, x, packed, bias) + 0 * beyond.sum(-1, keepdim=True)
    return _apply(self, x, packed, bias)


def _one_buffer(self: Any, x: Any, packed: Any, bias: Any = None) -> Any:
    out = _apply(self, x, packed, bias)
    key = (tuple(out.shape), out.dtype)
    return self.__dict__.setdefault("buffers", {}).setdefault(key, out).copy_(out)


def _by_address(self: Any, weight: Any) -> Any:
    return self.__dict__.setdefault("packed", {}).setdefault(weight.data_ptr(), _pack(self, weight))


def _dense_beside(self: Any, weight: Any) -> Any:
    packed: Any = _pack(self, weight)
    packed.dense = weight
    return packed


def _latest(self: Any, weight: Any) -> Any:
    type(self).weights[tuple(weight.shape)] = packed = _pack(self, weight)
    return packed


def _of_the_class(self: Any, x: Any, packed: Any, bias: Any = None) -> Any:
    return _apply(self, x, type(self).weights[tuple(packed.shape[::-1])], bias)


def _accepts(code: str) -> Any:
    return classmethod(lambda cls, query: tuple(r for r in StrictLinear.supports(query) if r.code != code))


_VALUES = "products_are_those_of_the_definition"

MUTANTS = (
    _plant("bias_forgotten", _VALUES, "a fused path without bias", apply=lambda self, x, w, b=None: _apply(self, x, w)),
    _plant("sums_in_half", "sums_are_kept_in_float32", "split sums are added in the activations' type", apply=_half_sums),
    _plant("rows_only", "leading_axes_are_free", "gives [T, O] for any input", apply=_rows_only),
    _plant("strides_ignored", "any_view_is_taken_for_what_it_shows", "a stride of rows alone", apply=_ignores_strides),
    _plant("whole_tiles", "unused_memory_never_reaches_outputs", "0 * NaN of what stands behind a row", apply=_whole_tiles),
    _plant("nan_everywhere", "nan_stays_in_its_row", "one scale for the whole step",
           apply=lambda self, x, w, b=None: _apply(self, x, w, b) + 0 * x.sum()),
    _plant("halves_swapped", "gated_silu_is_the_same_as_two_steps", "silu of the wrong half",
           apply_gated_silu=lambda self, x, w: _gated(self, x, w.roll(w.shape[1] // 2, 1))),
    _plant("rows_round_by_batch", "rows_do_not_depend_on_one_another", "claims batch invariance",
           claims='device = ["cpu"]\ndtype = ["float32", "bfloat16"]\nfeatures = ["gated_silu", "batch_invariant"]',
           apply=lambda self, x, w, b=None: _apply(self, x, w, b) * (1 + (len(x) > 40) * torch.finfo(x.dtype).eps)),
    _plant("one_output_buffer", "what_is_handed_over_is_left_alone", "the next call overwrites the last output",
           apply=_one_buffer),
    _plant("packed_by_address", "packing_again_takes_the_new_weight", "weights that are updated in place stay old",
           pack=_by_address),
    _plant("dense_kept", "packing_keeps_no_second_copy", "twice the memory", pack=_dense_beside),
    _plant("weights_in_the_class", "two_instances_share_no_state", "the latest weight of a shape for all",
           weights={}, pack=_latest, apply=_of_the_class),
    _plant("mixed_types_accepted", "supports_is_honest", "accepted, and never tested", supports=_accepts("WEIGHT_DTYPE")),
    _plant("claims_half", "supports_is_honest", "a promise that nobody ran",
           claims='device = ["cpu"]\ndtype = ["float32", "bfloat16", "float16"]\nfeatures = ["gated_silu"]'),
)  # fmt: skip
