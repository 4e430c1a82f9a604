"""Keys and values as 8-bit floats (e4m3) with one scale a head, in plain torch.

Shapes: T tokens, K key/value heads of a rank, D elements of a head.
"""

from __future__ import annotations

import torch

from rabbet.contracts import Refusal, register_kv_cache_dtype
from rabbet.contracts.kv_cache_dtype import KVCacheDtype, KVDtypeQuery, PageFormat
from rabbet_sdk.strict import seal

__all__ = ["StrictKVCacheDtype"]


@register_kv_cache_dtype("strict")
@seal
class StrictKVCacheDtype(KVCacheDtype):
    """A byte an element. Each head has a scale of its own: the largest keys of heads often differ by a factor of ten."""

    @classmethod
    def supports(cls, query: KVDtypeQuery) -> tuple[Refusal, ...]:
        """Anything that torch can convert; which attention backends read it is theirs to say."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cpu, not on {query.device_type}"))
        if query.dtype not in ("float32", "bfloat16"):
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; float32 and bfloat16 are supported"))
        return tuple(refusals)

    @classmethod
    def page_format(cls, query: KVDtypeQuery) -> PageFormat:
        """Nothing but codes stands in a page: the scales come with the layer."""
        return PageFormat(
            storage_dtype="float8_e4m3fn",
            bytes_per_token=query.num_kv_heads * (query.head_dim + query.head_dim_v),
            has_head_scales=True,
        )

    @classmethod
    def round_trip(cls, x_TKD: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
        """Divide, round, multiply. Conversions differ in what they make of too large a number, so the range is kept here."""
        largest = torch.finfo(torch.float8_e4m3fn).max
        codes_TKD = (x_TKD.float() / scale_K.view(-1, 1)).clamp(-largest, largest).to(torch.float8_e4m3fn)
        return codes_TKD.float() * scale_K.view(-1, 1)
