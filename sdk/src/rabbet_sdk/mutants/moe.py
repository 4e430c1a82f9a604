"""Expert backends with one fault each, on top of the strict twin."""
# ruff: noqa: ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

from typing import Any

import torch

from rabbet.contracts import register_moe_backend
from rabbet_sdk.mutants.base import planter
from rabbet_sdk.strict.moe import StrictExperts

__all__ = ["MUTANTS"]

_apply, _pack = StrictExperts.apply, StrictExperts.pack
_plant = planter(globals(), register_moe_backend, StrictExperts)


def _weighted_inputs(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    """Multiplies inputs instead of outputs: the same for linear experts only."""
    parts = [_apply(self, (x * weights[:, a, None]).to(x.dtype), packed, torch.ones_like(weights[:, a : a + 1]),
                    ids[:, a : a + 1], local) for a in range(ids.shape[1])]  # fmt: skip
    return torch.stack(parts).sum(0)


def _each_once(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    """Sets rows where it should add to them, if an expert is named twice."""
    seen = torch.stack([(ids[:, :a] == ids[:, a : a + 1]).any(-1) for a in range(ids.shape[1])], dim=1)
    return _apply(self, x, packed, weights.masked_fill(seen, 0.0), ids, local)


def _unwritten(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    """Memory as it comes where a token has no expert."""
    out = torch.empty_like(x)
    here = torch.ones(len(x), dtype=torch.bool) if local is None else (local[ids.long()] >= 0).any(-1)
    out[here] = _apply(self, x, packed, weights, ids, local)[here]
    return out


def _last_for_absent(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    return _apply(self, x, packed, weights, ids, None if local is None else local % len(packed[1]))


def _ignores_strides(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    return _apply(self, torch.as_strided(x, x.shape, (x.stride(0), 1)), packed, weights, ids, local)


def _whole_tiles(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    """Reads on to the next multiple of 16 inputs, and multiplies that by zero."""
    lacking = -x.shape[1] % 16
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.stride(0) * (len(x) - 1)
    out = _apply(self, x, packed, weights, ids, local)
    if lacking and room >= x.shape[1] + lacking:
        out += 0 * torch.as_strided(x, (len(x), lacking), x.stride(), x.storage_offset() + x.shape[1]).sum(-1, True)
    return out


def _every_expert(self: Any, x: Any, packed: Any, weights: Any, ids: Any, local: Any) -> Any:
    """Computes all experts for all tokens, and multiplies the unchosen ones by zero."""
    count = len(packed[1])
    every = torch.arange(count, dtype=torch.int32).expand(len(x), count)
    names = torch.arange(count) if local is None else local.new_tensor([(local == e).nonzero() for e in range(count)])
    share = ((ids[:, :, None] == names) * weights[:, :, None]).sum(1)
    return _apply(self, x, packed, share, every, None)


def _one_buffer(self: Any, x: Any, *rest: Any) -> Any:
    out = _apply(self, x, *rest)
    return self.__dict__.setdefault("buffers", {}).setdefault((tuple(out.shape), out.dtype), out).copy_(out)


def _by_address(self: Any, gate_up: Any, down: Any) -> Any:
    return self.__dict__.setdefault("packed", {}).setdefault(gate_up.data_ptr(), _pack(self, gate_up, down))


def _dense_beside(self: Any, gate_up: Any, down: Any) -> Any:
    packed: Any = _pack(self, gate_up, down)
    packed[0].dense = (gate_up, down)
    return packed


def _latest(self: Any, gate_up: Any, down: Any) -> Any:
    type(self).held[tuple(down.shape)] = packed = _pack(self, gate_up, down)
    return packed


def _of_the_class(self: Any, x: Any, packed: Any, *rest: Any) -> Any:
    return _apply(self, x, type(self).held[tuple(packed[1].mT.shape)], *rest)


def _accepts(code: str) -> Any:
    return classmethod(lambda cls, query: tuple(r for r in StrictExperts.supports(query) if r.code != code))


_VALUES = "sums_are_those_of_the_definition"
_RANKS = "experts_of_other_ranks_add_nothing"

MUTANTS = (
    _plant("weights_forgotten", _VALUES, "a mean of experts",
           apply=lambda self, x, p, w, ids, m: _apply(self, x, p, torch.full_like(w, 1 / w.shape[1]), ids, m)),
    _plant("up_before_gate", _VALUES, "checkpoints that merge the two the other way round",
           pack=lambda self, both, down: _pack(self, both.roll(both.shape[1] // 2, 1), down)),
    _plant("weights_on_inputs", _VALUES, "router weights applied before the activation", apply=_weighted_inputs),
    _plant("twice_counts_once", "any_routing_is_followed", "a store where an addition was meant", apply=_each_once),
    _plant("map_ignored", _RANKS, "global ids taken for local ones: shard 0 on every rank",
           apply=lambda self, x, p, w, ids, m: _apply(self, x, p, w, ids, None)),
    _plant("absent_wraps", _RANKS, "index -1 is the last expert", apply=_last_for_absent),
    _plant("rows_unwritten", _RANKS, "tokens without local experts keep what stood in memory", apply=_unwritten),
    _plant("strides_ignored", "any_view_is_taken_for_what_it_shows", "a stride of rows alone", apply=_ignores_strides),
    _plant("whole_tiles", "unused_memory_never_reaches_outputs", "0 * NaN of what stands behind a row",
           apply=_whole_tiles),
    _plant("every_expert", "nan_stays_with_its_token_and_its_expert", "0 * NaN of an expert that nobody chose",
           apply=_every_expert),
    _plant("tokens_round_by_batch", "tokens_do_not_depend_on_one_another", "claims batch invariance",
           claims='device = ["cpu"]\ndtype = ["float32", "bfloat16"]\nfeatures = ["expert_parallel", "batch_invariant"]',
           apply=lambda self, x, *rest: _apply(self, x, *rest) * (1 + (len(x) > 40) * torch.finfo(x.dtype).eps)),
    _plant("one_output_buffer", "what_is_handed_over_is_left_alone", "the next call overwrites the last output",
           apply=_one_buffer),
    _plant("packed_by_address", "packing_again_takes_the_new_weights", "experts that are updated in place stay old",
           pack=_by_address),
    _plant("dense_kept", "packing_keeps_no_second_copy", "twice the memory", pack=_dense_beside),
    _plant("experts_in_the_class", "two_instances_share_no_state", "the latest experts of a size for all",
           held={}, pack=_latest, apply=_of_the_class),
    _plant("any_activation", "supports_is_honest", "accepts gelu and computes silu", supports=_accepts("ACTIVATION")),
    _plant("claims_half", "supports_is_honest", "a promise that nobody ran",
           claims='device = ["cpu"]\ndtype = ["float32", "float16"]\nfeatures = ["expert_parallel"]'),
)  # fmt: skip
