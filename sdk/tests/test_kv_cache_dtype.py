"""The suite of KV-cache dtypes on the twin and on one whose scales stand in the page; attention over both."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rabbet_sdk.conformance import AttentionConformance, KVCacheDtypeConformance
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
_ATTENTION = '''
from dataclasses import replace

import torch
from rabbet.contracts import register_attention_backend
from rabbet.contracts.attention import KVLayout
from rabbet_sdk.mutants.attention import CodedAttention
from rabbet_sdk.strict.attention import StrictAttention


@register_attention_backend("int4_reader")
class Int4Reader(CodedAttention):
    """A page is [slot, head, byte]: codes of the key and of the value, then their two scales."""

    @classmethod
    def supports(cls, query):
        other = {"int4_paged": "strict"}.get(query.kv_cache_dtype, "none")
        return CodedAttention.supports(replace(query, kv_cache_dtype=other))

    @classmethod
    def kv_layout(cls, spec):
        assert (spec.kv_cache_dtype, spec.dtype) == ("int4_paged", "uint8")
        size = (spec.head_dim + spec.head_dim_v) // 2 + 8
        assert spec.page_size_bytes == spec.block_size * spec.num_kv_heads * size
        shape = (spec.block_size, spec.num_kv_heads, size)
        return KVLayout(name="int4-1", axes=("slot", "head", "byte"), shape=shape, dtype="uint8")

    def forward(self, layer, q, k, v, kv_cache, metadata, out):
        slots = metadata.slot_mapping[: metadata.num_tokens]
        kept = slots >= 0
        at = slots[kept]
        codes, steps = zip(*(self.code(x[: metadata.num_tokens][kept].float()) for x in (k, v)))
        size = kv_cache.shape[1]
        kv_cache[at // size, at % size] = torch.cat((*codes, *steps), dim=-1)
        pages = kv_cache.clone()
        words = pages[..., 64:].contiguous().view(torch.float32)
        pairs = torch.stack((pages[..., :64] % 16, pages[..., :64] // 16), dim=-1).flatten(-2).float() - 7
        numbers = torch.cat((pairs[..., :64] * words[..., :1], pairs[..., 64:] * words[..., 1:]), dim=-1)
        silent = replace(metadata, slot_mapping=torch.full_like(metadata.slot_mapping, -1))
        plain = replace(layer, k_scale=1.0, v_scale=1.0)
        StrictAttention.forward(self, plain, q, k, v, numbers, silent, out)

    def code(self, x):
        """Two codes a byte, and the bytes of the step."""
        step = (x.abs().amax(-1, keepdim=True) / 7).clamp_min(torch.finfo(torch.float32).tiny)
        code = ((x / step).round().clamp(-7, 7) + 7).to(torch.uint8)
        return code[..., ::2] + 16 * code[..., 1::2], step.contiguous().view(torch.uint8)
'''
_MANIFEST = """schema = 1

[[provides]]
kind = "attention"
name = "coded"
contract = ">=1.1,<2"
roles = ["engine", "worker"]
[provides.claims]
device = ["cpu"]
dtype = ["float32"]
kv_cache_dtype = ["strict"]
head_dim = [64]
block_size = [16, 32]
features = ["mixed_batch"]

[[provides]]
kind = "attention"
name = "int4_reader"
contract = ">=1.1,<2"
roles = ["engine", "worker"]
[provides.claims]
device = ["cpu"]
dtype = ["float32"]
kv_cache_dtype = ["int4_paged"]
head_dim = [64]
block_size = [16, 32]
features = ["mixed_batch"]

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
    provides={
        "kv_cache_dtype/int4_paged": "int4_cache.plugin:Int4",
        "attention/coded": "rabbet_sdk.mutants.attention:CodedAttention",
        "attention/int4_reader": "int4_cache.attention:Int4Reader",
    },
    manifest=_MANIFEST,
    modules={"plugin.py": _INT4, "attention.py": _ATTENTION},
)
sys.path.append(_site.name)


class TestStrict(KVCacheDtypeConformance):
    plugin = "kv_cache_dtype/strict"


class TestScalesInThePage(KVCacheDtypeConformance):
    plugin = "kv_cache_dtype/int4_paged"


@pytest.mark.slow
class TestAttentionWithScalesOfHeads(AttentionConformance):
    plugin = "attention/coded"


class TestAttentionWithScalesInThePage(AttentionConformance):
    plugin = "attention/int4_reader"


_HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("reader", "name", "bytes_per_token"), [("coded", "strict", 2 * 64), ("int4_reader", "int4_paged", 64 + 8)]
)
def test_an_engine_divides_memory_by_the_pages_of_the_dtype(
    tiny_engine: Callable[..., Any], reader: str, name: str, bytes_per_token: int
) -> None:
    options = {"hf_overrides": _HEADS, "block_size": 16, "kv_cache_memory_bytes": 1 << 20, "plugins_auto": "any"}
    plain = tiny_engine(**options)
    coded = tiny_engine(attention_backend=reader, kv_cache_dtype=name, **options)
    pages = [engine.core.info.num_blocks for engine in (plain, coded)]
    # Two layers of two heads in blocks of 16 tokens; plain ones take 4 bytes for each of 2 * 64 elements.
    assert pages == [(1 << 20) // (2 * 2 * 16 * size) for size in (4 * 2 * 64, bytes_per_token)]
    prompts = [[5, 6, 7, 8] * 9, [9, 10]]
    assert [len(tokens) for tokens in coded.generate(prompts)] == [len(tokens) for tokens in plain.generate(prompts)]
