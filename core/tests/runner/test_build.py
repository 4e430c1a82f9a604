"""What the runner asks of plugins while it builds a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rabbet.contracts import Refusal
from rabbet.contracts.kv_cache_dtype import KVCacheDtype, KVDtypeQuery, PageFormat
from rabbet.errors import PluginRefusedError
from rabbet.runner.build import _page_format


class Nibbles(KVCacheDtype):
    """Refuses heads whose codes do not fill bytes."""

    @classmethod
    def supports(cls, query: KVDtypeQuery) -> tuple[Refusal, ...]:
        return (Refusal(code="HEAD_DIM", message=f"{query.head_dim} is odd"),) if query.head_dim % 2 else ()

    @classmethod
    def page_format(cls, query: KVDtypeQuery) -> PageFormat:
        assert (query.device_type, query.arch, query.dtype) == ("cpu", "avx2", "float32")
        return PageFormat(storage_dtype="uint8", bytes_per_token=query.num_kv_heads * query.head_dim)


RESOLVED: Any = SimpleNamespace(
    composition=SimpleNamespace(load=lambda _kind: Nibbles),
    device_type="cpu",
    arch="avx2",
    dtype="float32",
    kv_cache_dtype="nibbles",
)


def test_each_layer_gets_the_format_of_its_own_heads() -> None:
    assert [_page_format(RESOLVED, heads, size).bytes_per_token for heads, size in ((1, 64), (4, 32))] == [64, 128]


def test_a_layer_that_the_kv_cache_dtype_cannot_store_is_refused_by_its_heads() -> None:
    with pytest.raises(
        PluginRefusedError, match="--kv-cache-dtype nibbles cannot store layers of 2 heads of 33: HEAD_DIM: 33 is odd"
    ):
        _page_format(RESOLVED, 2, 33)
