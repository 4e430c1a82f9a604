"""The suite of KV-cache dtypes on the twin and on one whose scales stand in the page."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rabbet_sdk.conformance import KVCacheDtypeConformance
from rabbet_sdk.fakes.dist import write_distribution

_INT4 = '''
import torch
from rabbet.contracts import register_kv_cache_dtype
from rabbet.contracts.kv_cache_dtype import KVCacheDtype, PageFormat


@register_kv_cache_dtype("int4_paged")
class Int4(KVCacheDtype):
    """Two codes a byte; a float32 scale for the keys and one for the values of each token and head."""

    @classmethod
    def supports(cls, query):
        return ()

    @classmethod
    def page_format(cls, query):
        heads = query.num_kv_heads
        codes = heads * (query.head_dim + query.head_dim_v) // 2
        return PageFormat(storage_dtype="uint8", bytes_per_token=codes, scale_bytes_per_token=heads * 8)

    @classmethod
    def round_trip(cls, x, scale):
        largest = x.float().abs().amax(-1, keepdim=True).nan_to_num(nan=float("inf"))
        step = (largest / 7).clamp_min(torch.finfo(torch.float32).tiny)
        return (x.float() / step).round().clamp(-7, 7) * step
'''
_MANIFEST = """schema = 1

[[provides]]
kind = "kv_cache_dtype"
name = "int4_paged"
contract = ">=1.1,<2"
roles = ["engine", "worker"]
[provides.claims]
dtype = ["float32", "bfloat16", "float16", "float64", "int8"]
features = ["uneven_head_dim_v"]
"""
# Before collection: claims are read while tests are collected.
_site = tempfile.TemporaryDirectory()
write_distribution(
    Path(_site.name),
    "int4-cache",
    provides={"kv_cache_dtype/int4_paged": "int4_cache.plugin:Int4"},
    manifest=_MANIFEST,
    modules={"plugin.py": _INT4},
)
sys.path.append(_site.name)


class TestStrict(KVCacheDtypeConformance):
    plugin = "kv_cache_dtype/strict"


class TestScalesInThePage(KVCacheDtypeConformance):
    plugin = "kv_cache_dtype/int4_paged"
