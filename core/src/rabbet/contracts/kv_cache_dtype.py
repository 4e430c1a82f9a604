"""Contract of a KV-cache dtype: what an element is, how large a page gets, which scales it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rabbet.contracts.support import Refusal

__all__ = ["KVCacheDtype", "KVDtypeQuery", "PageFormat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVDtypeQuery:
    """A setup: device, model dtype, heads."""

    device_type: str
    arch: str
    dtype: str
    num_kv_heads: int
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFormat:
    """Storage of one token of one layer.

    Attributes:
        storage_dtype: torch dtype of the cache tensor, e.g. ``uint8``.
        bytes_per_token: Keys and values of all heads of one token.
        scale_bytes_per_token: Scales kept beside them, a token (per-token-head codes); 0 otherwise.
        has_head_scales: Each head has one scale for keys and one for values, from the checkpoint or calibration.
    """

    storage_dtype: str
    bytes_per_token: int
    scale_bytes_per_token: int = 0
    has_head_scales: bool = False


class KVCacheDtype(ABC):
    """A way to store keys and values. Attention backends name the dtypes that they can read in ``supports``."""

    @classmethod
    @abstractmethod
    def supports(cls, query: KVDtypeQuery) -> tuple[Refusal, ...]:
        """Every reason why it cannot be used; empty: it can."""

    @classmethod
    @abstractmethod
    def page_format(cls, query: KVDtypeQuery) -> PageFormat:
        """How it stores a token."""
