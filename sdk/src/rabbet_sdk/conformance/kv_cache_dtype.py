"""The suite of KV-cache dtypes.

Claims of a manifest that it reads (a key that is left out restricts nothing):

* ``device``, ``arch``, ``dtype``: as in ``KVDtypeQuery``; ``dtype`` is the model's.
* ``head_dim``: sizes of key heads that work; ``features``: ``uneven_head_dim_v``, named, for values of another size.
* ``max_error``: one number: the largest error of a stored value, as a part of the largest of its token and head. Left out,
  it is 0.125.

Attention backends that read the dtype are held to its ``round_trip`` by their own suite.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from rabbet.contracts.kv_cache_dtype import KVCacheDtype, KVDtypeQuery, PageFormat
from rabbet.layers import Attention
from rabbet_sdk.conformance._kernels import DTYPES, claimed_dtype, is_same
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.ranks import build_context

__all__ = ["KVCacheDtypeConformance"]

_HEAD_DIMS = (32, 64, 72, 80, 96, 128, 192, 256)
_HUGE = {"float32": 1e30, "bfloat16": 1e30, "float16": 6e4}


class KVCacheDtypeConformance(SupportsConformance):
    """Subclass, name the plugin, done. See the module for claims.

    Attributes:
        scale: A scale that suits normal numbers; what a calibration would find.
    """

    kind = "kv_cache_dtype"
    scale: ClassVar[float] = 1.0
    knobs = SupportsConformance.knobs | {"scale"}

    @classmethod
    def _base(cls, claims: Claims) -> KVDtypeQuery:
        size = next((size for size in (64, 128, *_HEAD_DIMS) if claims.allows("head_dim", size)), 64)
        return KVDtypeQuery(
            device_type=cls.device.partition(":")[0], arch=str(next(iter(claims.values("arch")), "")),
            dtype=claimed_dtype(claims), num_kv_heads=2, head_dim=size, head_dim_v=size,
        )  # fmt: skip

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Devices, types, heads of all numbers and sizes."""
        base = cls._base(claims)
        changes: dict[str, dict[str, Any]] = {
            f"device_{name}": {"device_type": name} for name in ("cpu", "cuda", "npu")
        }
        changes |= {f"dtype_{name}": {"dtype": name} for name in (*DTYPES, "float64", "int8")}
        changes |= {f"heads_{count}": {"num_kv_heads": count} for count in (1, 3, 8)}
        changes |= {f"head_dim_{size}": {"head_dim": size, "head_dim_v": size} for size in _HEAD_DIMS}
        changes["uneven"] = {"head_dim_v": base.head_dim // 2}
        found = []
        for name, change in changes.items():
            query = replace(base, **change)
            facts = {"device": query.device_type, "dtype": query.dtype, "head_dim": query.head_dim}
            features = ("uneven_head_dim_v",) if query.head_dim != query.head_dim_v else ()
            found.append(Case(id=name, value=query, unclaimed=claims.missing(facts, features)))
        return found

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """The model's types that are claimed."""
        return [case for case in cls.query_cases(claims) if case.id.removeprefix("dtype_") in DTYPES]

    @pytest.fixture
    def stored(self, subject: Subject) -> type[KVCacheDtype]:
        """The class."""
        return subject.plugin_class

    def _numbers(self, generator: torch.Generator, query: KVDtypeQuery, tokens: int, device: Any) -> torch.Tensor:
        shape = (tokens, query.num_kv_heads, query.head_dim)
        return torch.randn(shape, generator=generator).to(getattr(torch, query.dtype)).to(device)

    def _scales(self, query: KVDtypeQuery, device: Any, factor: float = 1.0) -> torch.Tensor:
        return torch.full((query.num_kv_heads,), self.scale * factor, dtype=torch.float32, device=device)

    # ---- pages

    @cases("query_cases")
    def test_page_format_is_whole(self, stored: type[KVCacheDtype], case: Case) -> None:
        """The same each time, bytes that are whole elements of a type of torch's, no more of them than plain numbers."""
        query = case.value
        form = stored.page_format(query)
        assert isinstance(form, PageFormat), f"page_format gave {type(form).__name__}"
        assert form == stored.page_format(query), "page_format answers differently the second time"
        dtype = getattr(torch, form.storage_dtype, None)
        assert isinstance(dtype, torch.dtype), f"storage_dtype {form.storage_dtype!r} is no type of torch's"
        assert form.bytes_per_token > 0, f"a token takes {form.bytes_per_token} bytes"
        assert form.scale_bytes_per_token >= 0, f"scales take {form.scale_bytes_per_token} bytes"
        assert form.bytes_per_token % dtype.itemsize == 0, f"{form.bytes_per_token} bytes are no whole {dtype}"
        plain = query.num_kv_heads * (query.head_dim + query.head_dim_v) * getattr(torch, query.dtype).itemsize
        total = form.bytes_per_token + form.scale_bytes_per_token
        assert total <= plain, f"a token takes {total} bytes; as {query.dtype} it takes {plain}"

    @cases("query_cases")
    def test_a_rank_takes_its_share(self, stored: type[KVCacheDtype], case: Case) -> None:
        """Bytes are in proportion to the heads, so that ranks with a part of the heads have a part of the page."""
        one, many = (stored.page_format(replace(case.value, num_kv_heads=count)) for count in (1, 6))
        for name in ("bytes_per_token", "scale_bytes_per_token"):
            less, more = getattr(one, name), getattr(many, name)
            assert more == 6 * less, f"{name} of 1 head is {less}, of 6 heads {more}"
        assert (one.storage_dtype, one.has_head_scales) == (many.storage_dtype, many.has_head_scales)

    @cases("dtype_cases")
    def test_layers_get_the_pages_of_the_format(self, stored: type[KVCacheDtype], subject: Subject, case: Case) -> None:
        """A layer of core's asks for blocks of codes and scales, under the name of the dtype."""
        query, name = case.value, subject.entry.name
        form = stored.page_format(query)
        context = build_context(
            dtype=getattr(torch, query.dtype), kv_cache_dtype=name, block_size=32,
            page_format=lambda heads, size: stored.page_format(
                replace(query, num_kv_heads=heads, head_dim=size, head_dim_v=size)
            ),
        )  # fmt: skip
        layer = Attention(
            num_heads=2 * query.num_kv_heads, num_kv_heads=query.num_kv_heads, head_dim=query.head_dim, scale=1.0,
            context=context, prefix="layers.0.attn",
        )  # fmt: skip
        spec = layer.kv_cache_spec()
        assert (spec.dtype, spec.kv_cache_dtype) == (form.storage_dtype, name)
        assert spec.page_size_bytes == 32 * (form.bytes_per_token + form.scale_bytes_per_token)
        layer.process_weights_after_loading()
        assert (layer.spec.k_head_scales is not None) == form.has_head_scales, "scales a head, if the format has them"

    # ---- numbers

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_values_come_back_near(
        self, stored: type[KVCacheDtype], subject: Subject, generator: Any, torch_device: Any, case: Case,
        record_property: Any,
    ) -> None:  # fmt: skip
        """Within the claimed error, at any size that a scale brings into range, and not all too large or too small."""
        limit = float(next(iter(subject.claims.values("max_error")), 0.125))
        query = case.value
        for factor in (1.0, 1 / 16, 8.0):
            x = self._numbers(generator, query, 200, torch_device) * factor
            got = stored.round_trip(x, self._scales(query, torch_device, factor))
            assert (got.shape, got.dtype) == (x.shape, torch.float32), (got.shape, got.dtype)
            error = (got.double() - x.double()).abs()
            share = float((error / x.double().abs().amax(-1, keepdim=True)).max())
            record_property("rabbet_error", (query.dtype, share / limit))
            assert share <= limit, f"an error of {share:.3g} of the head's largest; {limit} is claimed, scale {factor}"
            drift = float(((got.double() - x.double()) * x.double().sign()).mean())
            assert abs(drift) <= 0.3 * float(error.mean()), f"sizes drift by {drift:.3g}: cut off instead of rounded?"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_codes_fit_the_declared_bytes(
        self, stored: type[KVCacheDtype], generator: Any, torch_device: Any, case: Case
    ) -> None:
        """There are no more different values than the bytes of a token can tell apart."""
        query = replace(case.value, num_kv_heads=1, head_dim_v=case.value.head_dim)
        form = stored.page_format(query)
        bits = 8 * form.bytes_per_token / (2 * query.head_dim)
        x = self._numbers(generator, query, 4000, torch_device)
        got = stored.round_trip(x, self._scales(query, torch_device))
        # With scales in the page each token has values of its own.
        groups = got[:50, 0] if form.scale_bytes_per_token else got.reshape(1, -1)
        most = max(len(group.unique()) for group in groups)
        assert most <= 2**bits, f"{most} different values in {bits:g} bits: bytes_per_token is too small"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_tokens_and_heads_are_stored_alone(
        self, stored: type[KVCacheDtype], generator: Any, torch_device: Any, case: Case
    ) -> None:
        """A token has the same bits alone as beside others, a head as on another rank, whatever its neighbours hold."""
        query = replace(case.value, num_kv_heads=4)
        form = stored.page_format(query)
        x = self._numbers(generator, query, 12, torch_device)
        x[3], x[:, 2] = x[3] * 50, x[:, 2] / 50
        scales = self._scales(query, torch_device)
        if form.has_head_scales:
            scales = scales * torch.tensor([1.0, 4.0, 0.25, 2.0], device=torch_device)
        whole = stored.round_trip(x, scales)
        for token in (0, 3, 11):
            alone = stored.round_trip(x[token : token + 1], scales)
            assert is_same(alone, whole[token : token + 1]), f"token {token} comes back otherwise alone"
        for head in range(4):
            alone = stored.round_trip(x[:, head : head + 1], scales[head : head + 1])
            assert is_same(alone, whole[:, head : head + 1]), f"head {head} comes back otherwise alone"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_scales_divide_and_multiply(
        self, stored: type[KVCacheDtype], generator: Any, torch_device: Any, case: Case
    ) -> None:
        """Numbers that are a thousand times larger, under a scale that is, come back a thousand times larger."""
        query = case.value
        form = stored.page_format(query)
        if form.scale_bytes_per_token and not form.has_head_scales:
            unclaimed("scales stand in the page")
        x = self._numbers(generator, query, 20, torch_device)
        scales = self._scales(query, torch_device)
        plain = stored.round_trip(x, scales)
        for factor in (1024.0, 1 / 1024):
            got = stored.round_trip(x.float() * factor, scales * factor) / factor
            assert is_same(got, plain), f"a scale of {factor:g} changes more than the size"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_extremes_stay_numbers(self, stored: type[KVCacheDtype], torch_device: Any, case: Case) -> None:
        """Zeros stay zeros, what is out of range becomes the nearest in range, signs stay, NaN stays with its head."""
        query = case.value
        x = torch.zeros(6, query.num_kv_heads, query.head_dim, dtype=getattr(torch, query.dtype), device=torch_device)
        x[1, 0, 0], x[2] = _HUGE[query.dtype], -_HUGE[query.dtype]
        x[3, 0, 1], x[4], x[5, 1] = float("nan"), torch.finfo(x.dtype).tiny, 1.0
        got = stored.round_trip(x, self._scales(query, torch_device))
        kept = torch.ones_like(got, dtype=torch.bool)
        kept[3, 0] = False
        assert got[kept].isfinite().all(), "numbers out of range must become the nearest in range, not NaN or infinity"
        assert (got[0] == 0).all(), "zeros do not stay zeros"
        assert (got[2] < 0).all() and got[1, 0, 0] > 0, "a large number loses its sign or its size"
        assert (got[1, 1:] == 0).all() and (got[3, 1:] == 0).all(), "a head is spoilt by its neighbour"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_arguments_are_left_alone(
        self, stored: type[KVCacheDtype], generator: Any, torch_device: Any, case: Case
    ) -> None:
        """``round_trip`` changes nothing, takes any view for what it shows, and gives new memory; no token is fine."""
        query = case.value
        wide = self._numbers(generator, query, 18, torch_device)
        x, scales = wide[::2].mT.contiguous().mT, self._scales(query, torch_device)
        copies = [tensor.clone() for tensor in (x, scales)]
        first = stored.round_trip(x, scales)
        assert all(map(is_same, (x, scales), copies)), "round_trip changes its arguments"
        kept = first.clone()
        again = stored.round_trip(x.contiguous(), scales)
        assert is_same(kept, again) and is_same(first, kept), "the same numbers come back otherwise the second time"
        first.fill_(float("nan"))
        assert all(map(is_same, (x, scales, again), (*copies, kept))), "the result shares memory with something else"
        assert stored.round_trip(x[:0], scales).shape == (0, *x.shape[1:])
