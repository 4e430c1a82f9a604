"""The suite of linear backends.

Claims of a manifest that it reads (a key that is left out restricts nothing, unless it says "named"):

* ``device``, ``dtype``: as in ``LinearQuery``.
* ``weight_dtype``: named, types of weights other than the activations' own.
* ``scheme``: named, schemes other than ``none``. Only dense weights are computed here; a scheme's numbers are the business of
  its quantisation method's suite.
* ``features``: of ``gated_silu`` (``apply_gated_silu`` gives products, at least of some sizes) and ``batch_invariant`` (a row's
  outputs are bitwise the same whatever rows stand beside it).
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rabbet.contracts.linear import LinearQuery
from rabbet.layers import MergedColumnParallelLinear
from rabbet_sdk.conformance._kernels import (
    DTYPES,
    SENTINEL,
    claimed_dtype,
    held_bytes,
    inside,
    is_same,
    tensors_of,
    unnamed,
)  # fmt: skip
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unavailable, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.ranks import build_context
from rabbet_sdk.numerics import assert_within
from rabbet_sdk.oracles.linear import gated_silu, linear

__all__ = ["LinearConformance"]

_ROWS = (1, 2, 7, 64, 257)
_SIZES = {
    "square": (64, 64), "tall": (64, 1008), "wide": (1600, 33), "odd": (33, 50), "one_output": (96, 1),
    "one_input": (1, 40), "tiles": (576, 960),
}  # fmt: skip
_GATED_SIZES = ((64, 64), (40, 96), (96, 192), (33, 6), (576, 1024))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """Types and sizes of one layer."""

    dtype: str
    weight_dtype: str
    inputs: int = 96
    outputs: int = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A backend, and random layers for it."""

    backend: Any
    device: torch.device
    generator: torch.Generator

    def random(self, dtype: str, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator).to(getattr(torch, dtype)).to(self.device)

    def layer(self, setup: _Setup) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight [O, I], scaled so that outputs are near 1, and bias [O]."""
        weight = self.random("float32", setup.outputs, setup.inputs) * setup.inputs**-0.5
        return weight.to(getattr(torch, setup.weight_dtype)), self.random(setup.dtype, setup.outputs)

    def check(
        self, x: torch.Tensor, packed: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, record: Any = None
    ) -> torch.Tensor:
        """The product, held to shape, type and bound."""
        got = self.backend.apply(x, packed, bias)
        assert (got.shape, got.dtype) == ((*x.shape[:-1], weight.shape[0]), x.dtype), (got.shape, got.dtype)
        oracle, plain = linear(x, weight, bias), linear(x, weight, bias, dtype=torch.float32).to(x.dtype)
        assert_within(got, plain=plain, oracle=oracle, record=record)
        return got  # type: ignore[no-any-return]


class LinearConformance(SupportsConformance):
    """Subclass, name the plugin, done. See the module for claims."""

    kind = "linear"

    @classmethod
    def _case(cls, claims: Claims, id: str, setup: _Setup, device: str = "", scheme: str = "none") -> Case:
        facts = {"device": device or cls.device.partition(":")[0], "dtype": setup.dtype}
        named = {} if setup.weight_dtype == setup.dtype else {"weight_dtype": setup.weight_dtype}
        named |= {} if scheme == "none" else {"scheme": scheme}
        reasons = [claims.missing(facts), unnamed(claims, **named)]
        return Case(id=id, value=setup, unclaimed=", ".join(filter(None, reasons)))

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Devices, pairs of types, schemes."""
        name = claimed_dtype(claims)
        own, dtypes = cls.device.partition(":")[0], (*DTYPES, "float64", "int8", "float8_e4m3fn")
        found = []

        def add(id: str, dtype: str = name, weight: str = "", device: str = own, scheme: str = "none") -> None:
            setup = _Setup(dtype=dtype, weight_dtype=weight or dtype)
            query = LinearQuery(
                device_type=device, arch="", dtype=dtype, weight_dtype=setup.weight_dtype, scheme=scheme
            )
            found.append(replace(cls._case(claims, id, setup, device, scheme), value=query))

        for device in ("cpu", "cuda", "npu"):
            add(f"device_{device}", device=device)
        for dtype in dtypes:
            add(f"dtype_{dtype}", dtype)
        for dtype in DTYPES:
            for weight in dtypes:
                if weight != dtype:
                    add(f"{dtype}_weight_{weight}", dtype, weight)
        for scheme in dict.fromkeys(("fp8", "awq", "gptq", *claims.values("scheme"))):
            add(f"scheme_{scheme}", scheme=str(scheme))
        return found

    @classmethod
    def setup_cases(cls, claims: Claims) -> list[Case]:
        """Pairs of types by sizes."""
        pairs = [(dtype, dtype) for dtype in DTYPES]
        pairs += [(dtype, weight) for dtype in DTYPES for weight in DTYPES
                  if weight != dtype and weight in claims.values("weight_dtype")]  # fmt: skip
        return [
            cls._case(
                claims, f"{dtype}-{name}" if dtype == weight else f"{dtype}-{weight}-{name}",
                _Setup(dtype=dtype, weight_dtype=weight, inputs=inputs, outputs=outputs),
            )
            for dtype, weight in pairs
            for name, (inputs, outputs) in _SIZES.items()
        ]  # fmt: skip

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """What must hold whatever is computed: each type."""
        return [cls._case(claims, name, _Setup(dtype=name, weight_dtype=name)) for name in DTYPES]

    @pytest.fixture
    def bench(self, subject: Subject, torch_device: torch.device, generator: torch.Generator) -> Bench:
        """A new instance of the backend."""
        return Bench(backend=subject.plugin_class(), device=torch_device, generator=generator)

    # ---- values

    @level(2)
    @dangerous
    @cases("setup_cases")
    def test_products_are_those_of_the_definition(self, bench: Bench, case: Case, record_property: Any) -> None:
        """``x @ weight.T + bias`` for one row, few, odd and many, with and without bias."""
        weight, bias = bench.layer(case.value)
        packed = bench.backend.pack(weight.clone())
        for rows in _ROWS:
            x = bench.random(case.value.dtype, rows, case.value.inputs)
            bench.check(x, packed, weight, bias, record_property)
            bench.check(x, packed, weight, None, record_property)

    @classmethod
    def half_cases(cls, claims: Claims) -> list[Case]:
        """Types that are shorter than the sums."""
        return [case for case in cls.dtype_cases(claims) if case.id != "float32"]

    @level(2)
    @dangerous
    @cases("half_cases")
    def test_sums_are_kept_in_float32(self, bench: Bench, case: Case, record_property: Any) -> None:
        """Thousands of terms of one sign: a sum in the activations' type would lose what a float32 sum keeps."""
        x, weight = (bench.random(case.value.dtype, rows, 8192).abs() for rows in (5, 33))
        packed = bench.backend.pack((weight / 64).clone())
        bench.check(x, packed, weight / 64, None, record_property)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_leading_axes_are_free(self, bench: Bench, case: Case) -> None:
        """None, several and empty ones."""
        weight, bias = bench.layer(case.value)
        packed = bench.backend.pack(weight.clone())
        for axes in ((), (3, 5), (2, 1, 4), (0,), (2, 0)):
            x = bench.random(case.value.dtype, *axes, case.value.inputs)
            if x.numel():
                bench.check(x, packed, weight, bias)
            else:
                assert bench.backend.apply(x, packed, bias).shape == (*axes, case.value.outputs)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_any_view_is_taken_for_what_it_shows(self, bench: Bench, case: Case) -> None:
        """Parts of wider tensors, every second row, transposed ones, for inputs, weights and biases."""
        setup = case.value
        weight, bias = bench.layer(setup)
        wide = bench.random(setup.dtype, 14, 2 * setup.inputs)
        inputs = (wide[:, : setup.inputs], wide[1::2, setup.inputs :], wide.T[: setup.inputs].T[:9], wide[:, ::2],
                  bench.random(setup.dtype, 1, setup.inputs).expand(6, -1))  # fmt: skip
        weights = (weight, weight.T.contiguous().T, torch.cat((weight, weight))[3 : 3 + setup.outputs],
                   nn.Parameter(weight, requires_grad=False), torch.stack((weight, weight), dim=-1)[..., 1])  # fmt: skip
        biases = (bias, torch.stack((bias, bias), dim=-1)[:, 0])
        for number, one in enumerate(weights):
            packed = bench.backend.pack(one)
            for x in inputs:
                bench.check(x, packed, one.detach(), biases[number % 2])

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_unused_memory_never_reaches_outputs(self, bench: Bench, case: Case) -> None:
        """NaN or a number around inputs, weight and bias: equal results, whatever the sizes have to be rounded up to."""
        for inputs, outputs in ((33, 50), (96, 160), (5, 3)):
            setup = replace(case.value, inputs=inputs, outputs=outputs)
            weight, bias = bench.layer(setup)
            x, found = bench.random(setup.dtype, 9, inputs), []
            for fill in (float("nan"), SENTINEL):
                packed = bench.backend.pack(inside(weight, fill))
                found.append(bench.backend.apply(inside(x, fill), packed, inside(bias, fill)))
            assert found[0].isfinite().all(), "NaN beside a tensor reached the output"
            assert is_same(*found), "what stands beside a tensor changes the output"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_nan_stays_in_its_row(self, bench: Bench, case: Case) -> None:
        """NaN in a token shows in that token alone, NaN in a row of the weight in that output alone."""
        setup = case.value
        weight, bias = bench.layer(setup)
        x = bench.random(setup.dtype, 19, setup.inputs)
        clean = bench.backend.apply(x, bench.backend.pack(weight.clone()), bias)
        x[7, 3], weight[5, 2] = float("nan"), float("nan")
        got = bench.backend.apply(x, bench.backend.pack(weight), bias)
        spoilt = torch.zeros(got.shape, dtype=torch.bool, device=got.device)
        spoilt[7], spoilt[:, 5] = True, True
        assert got[spoilt].isnan().all(), "NaN does not show"
        assert not got[~spoilt].isnan().any(), "NaN of one row reaches others"
        assert_within(got[~spoilt], plain=clean[~spoilt], oracle=clean[~spoilt].double())

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_gated_silu_is_the_same_as_two_steps(
        self, bench: Bench, subject: Subject, case: Case, record_property: Any
    ) -> None:
        """``silu(gate) * up`` where there is a fused form, which the feature ``gated_silu`` says; huge gates included."""
        found = False
        for inputs, outputs in _GATED_SIZES:
            weight, _ = bench.layer(replace(case.value, inputs=inputs, outputs=outputs))
            packed = bench.backend.pack(weight.clone())
            for rows, factor in ((1, 1.0), (3, 4.0), (70, 60.0), (0, 1.0), (5, 1e4)):
                x = bench.random(case.value.dtype, rows, inputs) * factor
                got = bench.backend.apply_gated_silu(x, packed)
                if got is None:
                    continue
                found = True
                assert subject.claims.has("gated_silu"), "gives a product, though the feature gated_silu is not claimed"
                assert (got.shape, got.dtype) == ((rows, outputs // 2), x.dtype)
                oracle = gated_silu(linear(x, weight))
                largest = torch.finfo(x.dtype).max
                if rows and oracle.abs().max() < largest:
                    plain = gated_silu(linear(x, weight, dtype=torch.float32).to(x.dtype))
                    assert_within(got, plain=plain, oracle=oracle, record=record_property)
                assert not got.isnan().any(), "gates of any size give numbers"
        if not subject.claims.has("gated_silu"):
            unclaimed("feature gated_silu")
        if not found:
            unavailable("apply_gated_silu gives None for every size on this machine")

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rows_do_not_depend_on_one_another(self, bench: Bench, subject: Subject, case: Case) -> None:
        """A row alone, in other batches and in another place: near, and bitwise the same where that is claimed."""
        weight, bias = bench.layer(replace(case.value, inputs=576))
        packed = bench.backend.pack(weight.clone())
        x = bench.random(case.value.dtype, 130, 576)
        whole = bench.check(x, packed, weight, bias)
        for first, count in ((0, 1), (17, 1), (40, 5), (96, 34), (3, 65)):
            part = bench.check(x[first : first + count], packed, weight, bias)
            if subject.claims.has("batch_invariant"):
                assert is_same(part, whole[first : first + count]), f"rows {first}..{first + count} have other bits"
        order = torch.randperm(130, generator=bench.generator)
        moved = bench.check(x[order], packed, weight, bias)
        if subject.claims.has("batch_invariant"):
            assert is_same(moved, whole[order.to(whole.device)]), "rows have other bits in another order"

    # ---- state

    @level(3)
    @dangerous
    @cases("dtype_cases")
    def test_what_is_handed_over_is_left_alone(self, bench: Bench, case: Case) -> None:
        """``pack`` and ``apply`` change no argument, and an output stays what it was when more is computed."""
        weight, bias = bench.layer(case.value)
        given = weight.clone()
        packed = bench.backend.pack(given)
        x = bench.random(case.value.dtype, 6, case.value.inputs)
        copies = [tensor.clone() for tensor in (x, bias, weight)]
        first = bench.backend.apply(x, packed, bias)
        kept = first.clone()
        bench.backend.apply(-x, packed, bias)
        bench.backend.apply_gated_silu(x, packed)
        assert is_same(first, kept), "an output was overwritten by a later call"
        assert all(map(is_same, (x, bias, given), copies)), "pack or apply changed an argument"
        first.fill_(float("nan"))
        bench.check(x, packed, weight, bias)

    @level(3)
    @dangerous
    @cases("dtype_cases")
    def test_packing_again_takes_the_new_weight(self, bench: Bench, case: Case) -> None:
        """Another weight in the same memory, and the memory of a dropped weight used anew: nothing is remembered."""
        place = torch.empty(case.value.outputs, case.value.inputs, device=bench.device)
        place = place.to(getattr(torch, case.value.dtype))
        x = bench.random(case.value.dtype, 4, case.value.inputs)
        for _ in range(3):
            weight, bias = bench.layer(case.value)
            bench.check(x, bench.backend.pack(place.copy_(weight)), weight, bias)

    @level(3)
    @dangerous
    @cases("dtype_cases")
    def test_layers_load_twice(self, bench: Bench, case: Case) -> None:
        """A merged layer of core's, loaded, used and loaded again: the products of the weights of the time."""
        dtype = getattr(torch, case.value.dtype)
        context = build_context(linear=bench.backend, dtype=dtype, device=bench.device)
        layer = MergedColumnParallelLinear(64, (48, 48), context=context, prefix="mlp.gate_up_proj")
        parameter: Any = layer.weight
        for _ in range(3):
            parts = [bench.random(case.value.dtype, 48, 64) for _ in range(2)]
            for number, part in enumerate(parts):
                parameter.weight_loader(parameter, part, number)
            layer.process_weights_after_loading()
            x = bench.random(case.value.dtype, 5, 64)
            both, weight = torch.cat(parts), torch.cat(parts).float()
            assert_within(layer(x), plain=F.linear(x.float(), weight).to(dtype), oracle=linear(x, both))
            plain = gated_silu(linear(x, both, dtype=torch.float32).to(dtype))
            assert_within(layer.forward_gated_silu(x), plain=plain, oracle=gated_silu(linear(x, both)))

    @level(3)
    @dangerous
    def test_two_instances_share_no_state(self, subject: Subject, bench: Bench) -> None:
        """Several weights of one instance and of another, used by turns."""
        setup = _Setup(dtype=(name := claimed_dtype(subject.claims)), weight_dtype=name)
        other = replace(bench, backend=subject.plugin_class())
        made = []
        for one, inputs in ((bench, 96), (bench, 64), (other, 96), (other, 64)):
            weight, bias = one.layer(replace(setup, inputs=inputs))
            made.append((one, weight, one.backend.pack(weight.clone()), bias))
        for _ in range(2):
            for one, weight, packed, bias in made:
                one.check(one.random(name, 3, weight.shape[1]), packed, weight, bias)

    @level(3)
    @dangerous
    def test_packing_keeps_no_second_copy(self, subject: Subject, bench: Bench) -> None:
        """A packed weight holds little more than the dense one had, and what is dropped is gone."""
        name = claimed_dtype(subject.claims)
        for inputs, outputs in ((576, 1024), (1000, 777)):
            weight, bias = bench.layer(_Setup(dtype=name, weight_dtype=name, inputs=inputs, outputs=outputs))
            dense = weight.numel() * weight.element_size()
            packed = bench.backend.pack(weight)
            bench.backend.apply(bench.random(name, 3, inputs), packed, bias)
            held = held_bytes(packed)
            assert held <= 1.1 * dense + 65536, f"a weight of {dense} bytes is held in {held}: is a dense copy kept?"
            ghosts = [weakref.ref(tensor) for tensor in (weight, *tensors_of(packed))]
            del packed, weight
            gc.collect()
            assert all(ghost() is None for ghost in ghosts), "a weight lives on after its last use"
