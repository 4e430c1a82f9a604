"""KV-cache dtypes with one fault each, on top of the strict twin."""
# ruff: noqa: ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rabbet.contracts import register_kv_cache_dtype
from rabbet_sdk.mutants.base import planter
from rabbet_sdk.strict.kv_cache_dtype import StrictKVCacheDtype

__all__ = ["MUTANTS"]

_page, _trip = StrictKVCacheDtype.page_format, StrictKVCacheDtype.round_trip
_plant = planter(globals(), register_kv_cache_dtype, StrictKVCacheDtype)


def _pages(change: Callable[..., Any]) -> Any:
    return classmethod(lambda cls, query: change(_page(query), query))


def _trips(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    return classmethod(lambda cls, x, scale: change(x, scale))


def _overflows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As a conversion that does not saturate."""
    return _trip(x, scale).masked_fill((x.float() / scale.view(-1, 1)).abs() > 464, float("nan"))


def _cut(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Drops the bits that do not fit."""
    words = (x.float() / scale.view(-1, 1)).contiguous().view(torch.int32) >> 20 << 20
    return words.view(torch.float32) * scale.view(-1, 1)


def _of_the_batch(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One scale for whatever is stored together."""
    largest = x.float().abs().max().clamp_min(1e-6) / 448 if x.numel() else scale
    return _trip(x, largest.expand(x.shape[1]) if x.numel() else scale)


def _in_place(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = _trip(x, scale)
    x.copy_(out)
    return out


_PAGES = "page_format_is_whole"

MUTANTS = (
    _plant("no_type_of_torch", _PAGES, "a name of its own for the storage",
           page_format=_pages(lambda form, query: replace(form, storage_dtype="fp8_e4m3"))),
    _plant("padded_tokens", _PAGES, "more bytes than plain numbers",
           page_format=_pages(lambda form, query: replace(form, bytes_per_token=4096))),
    _plant("aligned_tokens", "a_rank_takes_its_share", "rounded up to 512 bytes for all heads together, not for each",
           page_format=_pages(lambda form, query: replace(form, bytes_per_token=-(-form.bytes_per_token // 512) * 512))),
    _plant("keys_alone", "codes_fit_the_declared_bytes", "values have no room",
           page_format=_pages(lambda form, query: replace(form, bytes_per_token=form.bytes_per_token // 2))),
    _plant("bits_cut_off", "values_come_back_near", "cut off instead of rounded: all sizes shrink",
           round_trip=_trips(_cut)),
    _plant("two_bits_less", "values_come_back_near", "claims the error of another format",
           round_trip=_trips(lambda x, scale: _trip(x, scale).to(torch.float8_e5m2).float())),
    _plant("scale_of_the_batch", "tokens_and_heads_are_stored_alone", "what stands beside a token changes it: a shared "
           "prefix reads otherwise", round_trip=_trips(_of_the_batch)),
    _plant("first_scale_for_all", "tokens_and_heads_are_stored_alone", "head 0's scale on every head",
           round_trip=_trips(lambda x, scale: _trip(x, scale[:1].expand(len(scale))))),
    _plant("scale_forgotten", "scales_divide_and_multiply", "right as long as the checkpoint's scales are 1",
           round_trip=_trips(lambda x, scale: _trip(x, torch.ones_like(scale)))),
    _plant("scale_upside_down", "scales_divide_and_multiply", "multiplied on the way in",
           round_trip=_trips(lambda x, scale: _trip(x, 1 / scale))),
    _plant("overflow_to_nan", "extremes_stay_numbers", "the conversion makes NaN of what is too large",
           round_trip=_trips(_overflows)),
    _plant("keys_overwritten", "arguments_are_left_alone", "rounds the caller's keys", round_trip=_trips(_in_place)),
    _plant("any_device", "supports_is_honest", "accepted, and never tested",
           supports=classmethod(lambda cls, query: StrictKVCacheDtype.supports(replace(query, device_type="cpu")))),
    _plant("claims_half", "supports_is_honest", "a promise that nobody ran",
           claims='device = ["cpu"]\nfeatures = ["uneven_head_dim_v"]'),
)  # fmt: skip
