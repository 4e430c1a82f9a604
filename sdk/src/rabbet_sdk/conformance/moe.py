"""The suite of expert backends.

Claims of a manifest that it reads (a key that is left out restricts nothing, unless it says "named"):

* ``device``, ``dtype``: as in ``MoEQuery``.
* ``num_experts``, ``top_k``: sizes that work.
* ``scheme``: named, schemes other than ``none``. Only dense experts are computed here; a scheme's numbers are the business of
  its quantisation method's suite.
* ``features``: of ``expert_parallel`` (some experts stand on other ranks) and ``batch_invariant`` (a token's outputs are
  bitwise the same whatever tokens stand beside it).

No activation but ``silu`` can be claimed: the contract tells ``apply`` of none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rabbet.contracts.linear import MoEQuery
from rabbet.layers import FusedMoE
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
from rabbet_sdk.conformance.outcome import dangerous, level, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.ranks import build_context
from rabbet_sdk.numerics import assert_within, poison
from rabbet_sdk.oracles.quantization import dense_experts

__all__ = ["MoEConformance"]

_ROWS = (1, 5, 21)
_SIZES = {"base": (64, 48, 8, 2), "odd": (33, 25, 5, 3), "one_expert": (40, 16, 1, 1), "all_chosen": (32, 64, 4, 4),
          "many": (32, 16, 60, 6), "one_inner": (48, 1, 3, 2), "tiles": (192, 160, 4, 2)}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """Type and sizes of one layer."""

    dtype: str
    inputs: int = 64
    inner: int = 48
    experts: int = 8
    top_k: int = 2


@dataclass(frozen=True, slots=True)
class _Experts:
    """Dense weights: gate and up [X, 2N, I], down [X, I, N]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def sums(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the contract's formula gives, in ``dtype``."""
        gates = [(both[: len(both) // 2], both[len(both) // 2 :]) for both in self.gate_up.to(dtype).cpu()]
        return dense_experts(x.to(dtype).cpu(), gates, list(self.down.to(dtype).cpu()), weights.cpu(), ids.cpu())


class _PoisonedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that are made without contents are full of NaN."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return poison(made) if func in _ALLOCATIONS else made


_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default,
                torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A backend, and random experts for it."""

    backend: Any
    device: torch.device
    generator: torch.Generator

    def random(self, dtype: str, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator).to(getattr(torch, dtype)).to(self.device)

    def experts(self, setup: _Setup) -> _Experts:
        """Weights, scaled so that outputs are near 1."""
        gate_up = self.random("float32", setup.experts, 2 * setup.inner, setup.inputs) * setup.inputs**-0.5
        down = self.random("float32", setup.experts, setup.inputs, setup.inner) * 2 * setup.inner**-0.5
        return _Experts(gate_up.to(getattr(torch, setup.dtype)), down.to(getattr(torch, setup.dtype)))

    def tokens(self, setup: _Setup, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs, and for each token the weights and ids of different experts, in no order."""
        ids = [torch.randperm(setup.experts, generator=self.generator)[: setup.top_k].tolist() for _ in range(rows)]
        return self.random(setup.dtype, rows, setup.inputs), self.weights(rows, setup), self.ids(ids)

    def weights(self, rows: int, setup: _Setup) -> torch.Tensor:
        """float32 [T, A]; they need not add up to 1."""
        return (torch.rand(rows, setup.top_k, generator=self.generator) + 0.1).to(self.device)

    def ids(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """int32 [T, A]."""
        return torch.tensor([list(row) for row in ids], dtype=torch.int32, device=self.device)

    def pack(self, experts: _Experts) -> Any:
        """What ``pack`` makes of a copy."""
        return self.backend.pack(experts.gate_up.clone(), experts.down.clone())

    def check(
        self, experts: _Experts, packed: Any, step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], record: Any = None
    ) -> torch.Tensor:
        """The sums, held to shape, type and bound."""
        got = self.backend.apply(step[0], packed, step[1], step[2], None)
        self.near(got, experts, step, record)
        return got  # type: ignore[no-any-return]

    def near(self, got: torch.Tensor, experts: _Experts, step: Any, record: Any = None) -> None:
        """Hold ``got`` to the formula."""
        x, weights, ids = step
        assert (got.shape, got.dtype, got.device) == (x.shape, x.dtype, x.device), (got.shape, got.dtype, got.device)
        plain, oracle = (experts.sums(x, weights, ids, dtype) for dtype in (x.dtype, torch.float64))
        assert_within(got, plain=plain, oracle=oracle, record=record)


class MoEConformance(SupportsConformance):
    """Subclass, name the plugin, done. See the module for claims."""

    kind = "moe"

    @classmethod
    def _unclaimed(cls, claims: Claims, setup: _Setup, device: str = "", scheme: str = "none") -> str:
        facts = {"device": device or cls.device.partition(":")[0], "dtype": setup.dtype,
                 "num_experts": setup.experts, "top_k": setup.top_k}  # fmt: skip
        named = {} if scheme == "none" else {"scheme": scheme}
        return ", ".join(filter(None, [claims.missing(facts), unnamed(claims, **named)]))

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Devices, types, numbers of experts, experts on other ranks, activations, schemes."""
        own, base = cls.device.partition(":")[0], cls._base(claims)
        found = []

        def add(id: str, setup: _Setup = base, device: str = own, scheme: str = "none", **more: Any) -> None:
            sizes: dict[str, Any] = {"num_experts": setup.experts, "num_local_experts": setup.experts}
            query = MoEQuery(
                device_type=device, arch="", dtype=setup.dtype, top_k=setup.top_k, scheme=scheme, **(sizes | more)
            )
            reasons = [cls._unclaimed(claims, setup, device, scheme)]
            if query.num_local_experts < query.num_experts and not claims.has("expert_parallel"):
                reasons.append("feature expert_parallel")
            if query.activation != "silu":
                reasons.append(f"activation {query.activation}: apply is not told of it")
            found.append(Case(id=id, value=query, unclaimed=", ".join(filter(None, reasons))))

        for device in ("cpu", "cuda", "npu"):
            add(f"device_{device}", device=device)
        for dtype in (*DTYPES, "float64", "int8", "float8_e4m3fn"):
            add(f"dtype_{dtype}", replace(base, dtype=dtype))
        for experts, top_k in ((1, 1), (8, 2), (16, 1), (60, 4), (128, 8), (256, 8), (4, 4)):
            add(f"experts_{experts}_{top_k}", replace(base, experts=experts, top_k=top_k))
        for local in (base.experts // 2, 1):
            if local < base.experts:
                add(f"local_{local}", num_local_experts=local)
        for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu2", "swiglu_oai"):
            add(f"activation_{activation}", activation=activation)
        for scheme in dict.fromkeys(("fp8", "awq", "gptq", *claims.values("scheme"))):
            add(f"scheme_{scheme}", scheme=str(scheme))
        return found

    @classmethod
    def _base(cls, claims: Claims) -> _Setup:
        """The plainest claimed setup."""

        def first(key: str, choices: tuple[int, ...]) -> int:
            return next((size for size in choices if claims.allows(key, size)), choices[0])

        experts = first("num_experts", (8, 4, 16, 32, 64, 128))
        return _Setup(dtype=claimed_dtype(claims), experts=experts, top_k=first("top_k", (2, 1, 4, 8)))

    @classmethod
    def setup_cases(cls, claims: Claims) -> list[Case]:
        """Types by sizes."""
        found = []
        for dtype in DTYPES:
            for name, (inputs, inner, experts, top_k) in _SIZES.items():
                setup = _Setup(dtype=dtype, inputs=inputs, inner=inner, experts=experts, top_k=top_k)
                found.append(Case(id=f"{dtype}-{name}", value=setup, unclaimed=cls._unclaimed(claims, setup)))
        return found

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """What must hold whatever is computed: each type."""
        setups = [replace(cls._base(claims), dtype=name) for name in DTYPES]
        return [Case(id=setup.dtype, value=setup, unclaimed=cls._unclaimed(claims, setup)) for setup in setups]

    @pytest.fixture
    def bench(self, subject: Subject, torch_device: torch.device, generator: torch.Generator) -> Bench:
        """A new instance of the backend."""
        return Bench(backend=subject.plugin_class(), device=torch_device, generator=generator)

    # ---- values

    @level(2)
    @dangerous
    @cases("setup_cases")
    def test_sums_are_those_of_the_definition(self, bench: Bench, case: Case, record_property: Any) -> None:
        """``sum_a w_a * down_a(silu(gate_a(x)) * up_a(x))`` for one token, few and many."""
        experts = bench.experts(case.value)
        packed = bench.pack(experts)
        for rows in _ROWS:
            bench.check(experts, packed, bench.tokens(case.value, rows), record_property)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_any_routing_is_followed(self, bench: Bench, case: Case) -> None:
        """All tokens to the same experts, one after the other, one expert more than once, weights of 0 and below; no token."""
        setup, experts = case.value, bench.experts(case.value)
        packed, count, width = bench.pack(experts), case.value.experts, case.value.top_k
        routings: list[list[Sequence[int]]] = [
            [range(count - width, count)] * 70,
            [[(row + a) % count for a in range(width)] for row in range(3 * count)],
            [[row % count] * width for row in range(11)],
            [range(width)[::-1]] * 3,
        ]
        for ids in routings:
            table = bench.ids(ids)
            weights = bench.weights(len(table), setup)
            weights[0], weights[-1] = 0.0, -weights[-1]
            bench.check(experts, packed, (bench.random(setup.dtype, len(table), setup.inputs), weights, table))
        x = bench.random(setup.dtype, 0, setup.inputs)
        none = bench.backend.apply(x, packed, weights[:0], table[:0], None)
        assert none.shape == (0, setup.inputs), f"a step without tokens gave {tuple(none.shape)}"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_experts_of_other_ranks_add_nothing(self, bench: Bench, subject: Subject, case: Case) -> None:
        """Ids are global: each rank sums its own experts, in whatever order it holds them, and the ranks' sums add up.

        A token whose experts are all elsewhere gets zeros, not what stood in memory.
        """
        if not subject.claims.has("expert_parallel"):
            unclaimed("feature expert_parallel")
        setup, whole = case.value, bench.experts(case.value)
        step = bench.tokens(setup, 23)
        x, weights, ids = step
        for held in ([7, 0, 3], [1, 2, 4, 5, 6], [5], list(range(8))):
            held = [expert for expert in held if expert < setup.experts]
            expert_map = torch.full((setup.experts,), -1, dtype=torch.int32, device=bench.device)
            expert_map[held] = torch.arange(len(held), dtype=torch.int32, device=bench.device)
            with _PoisonedMemory():  # type: ignore[no-untyped-call]
                packed = bench.backend.pack(whole.gate_up[held].clone(), whole.down[held].clone())
                got = bench.backend.apply(x, packed, weights, ids, expert_map)
            is_here = (expert_map[ids.long()] >= 0).float()
            bench.near(got, whole, (x, weights * is_here, ids))
            away = is_here.sum(-1) == 0
            assert (got[away] == 0).all(), "a token without local experts must get zeros"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_any_view_is_taken_for_what_it_shows(self, bench: Bench, case: Case) -> None:
        """Parts of wider tensors, every second row, transposed ones, for inputs, experts, weights and ids."""
        setup, experts = case.value, bench.experts(case.value)
        _, weights, ids = bench.tokens(setup, 9)
        wide = bench.random(setup.dtype, 18, 2 * setup.inputs)
        inputs = (wide[:9, : setup.inputs], wide[::2, setup.inputs :], wide.T[: setup.inputs, :9].T, wide[:9, ::2])
        gate_up, down = experts.gate_up, experts.down
        held: tuple[tuple[torch.Tensor, torch.Tensor], ...] = (
            (gate_up.mT.contiguous().mT, down.mT.contiguous().mT),
            (torch.cat((gate_up, gate_up))[2 : 2 + setup.experts].roll(2, 0), torch.stack((down, down), -1)[..., 1]),
            (nn.Parameter(gate_up, requires_grad=False), nn.Parameter(down, requires_grad=False)),
        )
        for one, other in held:
            packed = bench.backend.pack(one, other)
            now = _Experts(one.detach().clone(), other.detach().clone())
            for x in inputs:
                routing = (weights.T.contiguous().T, torch.stack((ids, ids), -1)[..., 0])
                bench.check(now, packed, (x, *routing))

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_unused_memory_never_reaches_outputs(self, bench: Bench, case: Case) -> None:
        """NaN or a number around everything that is handed over, and in new tensors: equal results."""
        for inputs, inner in ((33, 25), (96, 80)):
            setup, found = replace(case.value, inputs=inputs, inner=inner), []
            experts, (x, weights, ids) = bench.experts(setup), bench.tokens(setup, 9)
            for fill, number in ((float("nan"), setup.experts + 1000), (SENTINEL, -1000)):
                routing = inside(weights, fill), inside(ids, number)
                with _PoisonedMemory():  # type: ignore[no-untyped-call]
                    packed = bench.backend.pack(inside(experts.gate_up, fill), inside(experts.down, fill))
                    found.append(bench.backend.apply(inside(x, fill), packed, *routing, None))
            assert found[0].isfinite().all(), "NaN beside a tensor, or of new memory, reached the output"
            assert is_same(*found), "what stands beside a tensor changes the output"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_nan_stays_with_its_token_and_its_expert(self, bench: Bench, case: Case) -> None:
        """NaN in a token shows in that token alone, NaN in an expert in the tokens that chose it."""
        setup, experts = case.value, bench.experts(case.value)
        x, weights, ids = bench.tokens(setup, 19)
        clean = bench.backend.apply(x, bench.pack(experts), weights, ids, None)
        x[7, 3] = experts.gate_up[0, 1, 2] = experts.down[setup.experts - 1, 0, 0] = float("nan")
        got = bench.backend.apply(x, bench.pack(experts), weights, ids, None)
        spoilt = ((ids == 0) | (ids == setup.experts - 1)).any(-1)
        spoilt[7] = True
        assert got[spoilt].isnan().any(-1).all(), "NaN does not show"
        assert not got[~spoilt].isnan().any(), "NaN of one token or expert reaches others"
        assert_within(got[~spoilt], plain=clean[~spoilt], oracle=clean[~spoilt].double())

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_tokens_do_not_depend_on_one_another(self, bench: Bench, subject: Subject, case: Case) -> None:
        """A token alone, in other batches and in another place: near, and bitwise the same where that is claimed."""
        experts, step = bench.experts(case.value), bench.tokens(case.value, 50)
        packed = bench.pack(experts)
        whole = bench.check(experts, packed, step)
        order = torch.randperm(50, generator=bench.generator).to(bench.device)
        ranges = [torch.arange(first, first + count) for first, count in ((0, 1), (17, 1), (40, 5), (3, 45))]
        for rows in (*ranges, order):
            part = bench.check(experts, packed, tuple(tensor[rows.to(bench.device)] for tensor in step))  # type: ignore[arg-type]
            if subject.claims.has("batch_invariant"):
                assert is_same(part, whole[rows]), f"{len(rows)} of the tokens have other bits"

    # ---- state

    @level(3)
    @dangerous
    @cases("dtype_cases")
    def test_what_is_handed_over_is_left_alone(self, bench: Bench, case: Case) -> None:
        """``pack`` and ``apply`` change no argument, and an output stays what it was when more is computed."""
        experts, step = bench.experts(case.value), bench.tokens(case.value, 6)
        given = (experts.gate_up.clone(), experts.down.clone())
        packed = bench.backend.pack(*given)
        every = torch.arange(case.value.experts, dtype=torch.int32, device=bench.device)
        handed = (*step, every, *given)
        copies = [tensor.clone() for tensor in handed]
        first = bench.backend.apply(step[0], packed, *step[1:], None)
        kept = first.clone()
        bench.backend.apply(-step[0], packed, *step[1:], None)
        if case.value.experts > 1 and type(bench.backend).supports(self._parallel_query(case.value)) == ():
            bench.backend.apply(-step[0], packed, *step[1:], every)
        assert is_same(first, kept), "an output was overwritten by a later call"
        assert all(map(is_same, handed, copies)), "pack or apply changed an argument"
        first.fill_(float("nan"))
        bench.check(experts, packed, step)

    @classmethod
    def _parallel_query(cls, setup: _Setup) -> MoEQuery:
        return MoEQuery(device_type=cls.device.partition(":")[0], arch="", dtype=setup.dtype,
                        num_experts=setup.experts, num_local_experts=1, top_k=setup.top_k)  # fmt: skip

    @level(3)
    @dangerous
    @cases("dtype_cases")
    def test_packing_again_takes_the_new_weights(self, bench: Bench, case: Case) -> None:
        """Other experts in the same memory, and the memory of dropped ones used anew: nothing is remembered."""
        places, step = bench.experts(case.value), bench.tokens(case.value, 4)
        for _ in range(3):
            new = bench.experts(case.value)
            packed = bench.backend.pack(places.gate_up.copy_(new.gate_up), places.down.copy_(new.down))
            bench.check(new, packed, step)

    @level(3)
    @dangerous
    @cases("dtype_cases")
    def test_layers_load_twice(self, bench: Bench, case: Case) -> None:
        """A layer of core's, loaded, used and loaded again: the sums of the weights of the time, by its own routing."""
        setup = case.value
        layer: Any = FusedMoE(
            num_experts=setup.experts, top_k=setup.top_k, hidden_size=setup.inputs, intermediate_size=setup.inner,
            context=build_context(moe=bench.backend, dtype=getattr(torch, setup.dtype), device=bench.device),
            prefix="mlp.experts",
        )  # fmt: skip
        for _ in range(3):
            experts = bench.experts(setup)
            for expert in range(setup.experts):
                for name, part in zip(("gate", "up"), experts.gate_up[expert].chunk(2), strict=True):
                    layer.gate_up.weight_loader(layer.gate_up, part, (expert, name))
                layer.down.weight_loader(layer.down, experts.down[expert], (expert, "down"))
            layer.process_weights_after_loading()
            x, logits = bench.random(setup.dtype, 5, setup.inputs), bench.random("float32", 5, setup.experts)
            weights, ids = logits.softmax(-1).topk(setup.top_k)
            bench.near(layer(x, logits), experts, (x, weights / weights.sum(-1, keepdim=True), ids))

    @level(3)
    @dangerous
    def test_two_instances_share_no_state(self, subject: Subject, bench: Bench) -> None:
        """Experts of one instance and of another, of one size and of others, used by turns."""
        base, other = self._base(subject.claims), replace(bench, backend=subject.plugin_class())
        made = []
        for one, setup in ((bench, base), (bench, replace(base, inner=32)), (other, base), (other, base)):
            experts = one.experts(setup)
            made.append((one, setup, experts, one.pack(experts)))
        for _ in range(2):
            for one, setup, experts, packed in made:
                one.check(experts, packed, one.tokens(setup, 3))

    @level(3)
    @dangerous
    def test_packing_keeps_no_second_copy(self, subject: Subject, bench: Bench) -> None:
        """Packed experts hold little more than the dense ones had, and what is dropped is gone."""
        for inputs, inner in ((256, 192), (250, 77)):
            setup = replace(self._base(subject.claims), inputs=inputs, inner=inner)
            experts = bench.experts(setup)
            dense = sum(tensor.numel() * tensor.element_size() for tensor in (experts.gate_up, experts.down))
            packed = bench.backend.pack(experts.gate_up, experts.down)
            x, weights, ids = bench.tokens(setup, 3)
            bench.backend.apply(x, packed, weights, ids, None)
            held = held_bytes(packed)
            assert held <= 1.1 * dense + 65536, f"experts of {dense} bytes are held in {held}: is a dense copy kept?"
            ghosts = [weakref.ref(tensor) for tensor in (experts.gate_up, experts.down, *tensors_of(packed))]
            del packed, experts
            gc.collect()
            assert all(ghost() is None for ghost in ghosts), "experts live on after their last use"
