"""Contract of a KV-cache dtype: what an element is, how large a page gets, which scales it has.

Shapes: T tokens, K key/value heads of a rank, D elements of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

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

    Scales come from three places. One number a layer, or one a head (``has_head_scales``): from the checkpoint, through
    ``AttentionLayerSpec``. Or in the page (``scale_bytes_per_token``): the attention backend finds them as it stores a
    token, and decides where they lie.

    Attributes:
        storage_dtype: torch dtype of the elements, e.g. ``float8_e4m3fn``, or ``uint8`` for packed codes.
        bytes_per_token: Keys and values of all heads of one token. In proportion to the heads.
        scale_bytes_per_token: Scales kept beside them; 0 otherwise. In proportion to the heads, too.
        has_head_scales: Each head has one scale for keys and one for values; otherwise a layer has.
    """

    storage_dtype: str
    bytes_per_token: int
    scale_bytes_per_token: int = 0
    has_head_scales: bool = False


class KVCacheDtype(ABC):
    """A way to store keys and values. Attention backends name the dtypes that they can read in ``supports``.

    ``page_format`` is asked for each attention layer, before memory is divided: a block's page takes ``block_size`` times
    both sums of bytes, and the layer's ``KVCacheSpec`` has the storage dtype and this dtype's name.
    """

    @classmethod
    @abstractmethod
    def supports(cls, query: KVDtypeQuery) -> tuple[Refusal, ...]:
        """Every reason why it cannot be used; empty: it can."""

    @classmethod
    @abstractmethod
    def page_format(cls, query: KVDtypeQuery) -> PageFormat:
        """How it stores a token, for a query that ``supports`` accepts."""

    @classmethod
    def round_trip(cls, x_TKD: torch.Tensor, scale_K: torch.Tensor) -> torch.Tensor:
        """What keys or values are once they are stored and read again: the format's definition, in plain torch.

        No engine calls it; attention backends that read the dtype are held to it by the conformance suites. A token and
        a head are stored alone: no other one's numbers count. What is out of range becomes the nearest that is in it.

        Args:
            x_TKD: True keys or values in a model's dtype; left as they are.
            scale_K: float32; the true numbers are divided by it before they are coded. All the same without
                ``has_head_scales``. Formats whose scales stand in the page may ignore it.

        Returns:
            float32 [T, K, D].
        """
        raise NotImplementedError(f"{cls.__name__} does not say what its numbers are")
