"""The part of the suite of platforms that holds small operations to their formulas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rabbet_sdk.conformance._kernels import DTYPES, inside, is_same
from rabbet_sdk.conformance._platform_live import Live
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level
from rabbet_sdk.numerics import assert_within
from rabbet_sdk.oracles import layer_ops as oracles

__all__ = ["LayerOpsConformance"]

_NAN = float("nan")
_ROWS = (0, 1, 2, 7, 65)


class LayerOpsConformance(SupportsConformance):
    """Tests of what ``Platform.layer_ops`` gives; part of ``PlatformConformance``, whose fixture ``live`` they take."""

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """Each type that a model computes in."""
        return [Case(id=name, value=name, unclaimed=claims.missing({"dtype": name})) for name in DTYPES]

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rms_norm_is_its_formula(self, live: Live, case: Case, record_property: Any) -> None:
        """Any rows, leading axes and sizes, small numbers beside eps, large ones whose squares overflow a half."""
        ops, dtype = live.ops(), getattr(torch, case.value)
        for size in (64, 576, 1000):
            weight = live.random(case.value, size)
            for rows in _ROWS:
                for scale, eps in ((1.0, 1e-6), (1e-3, 1e-6), (1e-3, 1e-2), (1000.0, 1e-5)):
                    x = inside(live.random(case.value, rows, size, scale=scale), _NAN)
                    kept = x.clone()
                    got = ops.rms_norm(x, weight, eps)
                    assert (got.shape, got.dtype) == (x.shape, dtype) and is_same(x, kept), "shape, type, or input"
                    self._norm_is_near(got, x, weight, eps, record_property)
        # Heads of a packed tensor.
        packed, weight = live.random(case.value, 7, 5 * 64 + 96), live.random(case.value, 64)
        heads = packed[:, : 5 * 64].view(7, 5, 64)
        self._norm_is_near(ops.rms_norm(heads, weight, 1e-6), heads, weight, 1e-6, record_property)

    @staticmethod
    def _norm_is_near(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, record: Any = None) -> None:
        ones = torch.ones_like(weight)
        plain = oracles.rms_norm(x, ones, eps, torch.float32).to(x.dtype) * weight
        assert_within(got, plain=plain, oracle=oracles.rms_norm(x, weight, eps, torch.float64), record=record)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_add_rms_norm_gives_norm_and_sum(self, live: Live, case: Case, record_property: Any) -> None:
        """``r = x + residual``, and its norm."""
        ops = live.ops()
        for rows in _ROWS:
            x, residual = live.random(case.value, rows, 576), live.random(case.value, rows, 576, scale=3.0)
            weight, exact, plain = live.random(case.value, 576), x.double() + residual.double(), x + residual
            norm, total = ops.add_rms_norm(x, residual, weight, 1e-5)
            assert_within(total, plain=plain, oracle=exact, record=record_property)
            ones = torch.ones_like(weight)
            wanted = oracles.rms_norm(exact, weight, 1e-5, torch.float64)
            rounded = oracles.rms_norm(plain, ones, 1e-5, torch.float32).to(plain.dtype) * weight
            assert_within(norm, plain=rounded, oracle=wanted, record=record_property)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rotary_turns_pairs_by_their_angle(self, live: Live, case: Case, record_property: Any) -> None:
        """Both ways to pair, whole heads and parts of them, queries and keys out of one packed tensor."""
        ops, dtype = live.ops(), getattr(torch, case.value)
        for head, turned, heads, kv_heads in ((64, 64, 4, 2), (64, 32, 5, 1), (128, 128, 2, 2), (80, 20, 3, 3)):
            angles = live.random("float32", 50, turned // 2, scale=3.0)
            table = torch.cat((angles.cos(), angles.sin()), dim=1)
            for rows in _ROWS:
                positions = torch.randint(0, 50, (rows,), generator=live.generator).to(live.device)
                for is_neox in (True, False):
                    packed = live.random(case.value, rows, (heads + 2 * kv_heads) * head)
                    before = packed.clone()
                    q, k, v = self._split(packed, heads, kv_heads, head)
                    got = ops.rotary(q, k, positions, table, is_neox=is_neox)
                    old_q, old_k, old_v = self._split(before, heads, kv_heads, head)
                    for new, old in zip(got, (old_q, old_k), strict=True):
                        exact, plain = (
                            oracles.rotary(old, positions, table, is_neox=is_neox, dtype=kind)
                            for kind in (torch.float64, torch.float32)
                        )
                        assert_within(new, plain=plain.to(dtype), oracle=exact, record=record_property)
                        assert is_same(new[..., turned:], old[..., turned:]), "elements behind the rotated ones changed"
                    assert is_same(v, old_v), "values beside queries and keys changed"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_norm_rotary_is_both_steps(self, live: Live, case: Case, record_property: Any) -> None:
        """The norm of each head, then the rotation."""
        ops, dtype, eps = live.ops(), getattr(torch, case.value), 1e-5
        angles = live.random("float32", 50, 32, scale=3.0)
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        weights, ones = [live.random(case.value, 64) for _ in range(2)], torch.ones(64, dtype=dtype, device=live.device)
        for rows in _ROWS:
            positions = torch.randint(0, 50, (rows,), generator=live.generator).to(live.device)
            packed = live.random(case.value, rows, 8 * 64)
            old = self._split(packed.clone(), 4, 2, 64)
            q, k, v = self._split(packed, 4, 2, 64)
            got = ops.norm_rotary(q, k, *weights, eps, positions, table, is_neox=True)
            for new, x, weight in zip(got, old, weights, strict=False):
                exact = oracles.rms_norm(x, weight, eps, torch.float64)
                plain = oracles.rms_norm(x, ones, eps, torch.float32).to(dtype) * weight
                exact, plain = (
                    oracles.rotary(x, positions, table, is_neox=True, dtype=kind)
                    for x, kind in ((exact, torch.float64), (plain, torch.float32))
                )
                assert_within(new, plain=plain.to(dtype), oracle=exact, record=record_property)
            assert is_same(v, old[2]), "values beside queries and keys changed"

    @staticmethod
    def _split(packed: torch.Tensor, heads: int, kv_heads: int, head: int) -> list[torch.Tensor]:
        parts: Any = torch.split(packed, [heads * head, kv_heads * head, kv_heads * head], dim=-1)
        return [part.unflatten(-1, (-1, head)) for part in parts]

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_gated_activations_are_their_formulas(self, live: Live, case: Case, record_property: Any) -> None:
        """The first half goes through the activation; gates of any size, also such as overflow an exponential."""
        ops = live.ops()
        for name, act, plain in (
            ("silu", ops.silu_and_mul, F.silu),
            ("gelu", lambda x: ops.gelu_and_mul(x, approximate="none"), F.gelu),
            ("gelu_tanh", lambda x: ops.gelu_and_mul(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
        ):
            for rows, size, scale in ((0, 64, 1.0), (1, 33, 1.0), (7, 1000, 4.0), (65, 64, 60.0)):
                x = live.random(case.value, rows, 2 * size, scale=scale)
                kept, (gate, up) = x.clone(), x.chunk(2, dim=-1)
                got = act(x)
                assert (got.shape, got.dtype) == ((rows, size), x.dtype), f"{name}: {tuple(got.shape)} {got.dtype}"
                assert is_same(x, kept), f"{name} changes its input"
                assert_within(got, plain=plain(gate) * up, oracle=oracles.gated(x, name), record=record_property)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rows_of_small_operations_are_apart(self, live: Live, case: Case) -> None:
        """NaN in a row shows in that row alone, and a row alone has the bits that it has among others."""
        ops, weight = live.ops(), live.random(case.value, 128)
        x = live.random(case.value, 19, 128)
        spoilt = x.clone()
        spoilt[7, 3] = _NAN
        for name, act in (
            ("rms_norm", lambda x: ops.rms_norm(x, weight, 1e-5)),
            ("add_rms_norm", lambda x: ops.add_rms_norm(x.clone(), x.clone(), weight, 1e-5)[0]),
            ("silu_and_mul", ops.silu_and_mul),
        ):
            whole, got = act(x), act(spoilt)
            others = [row for row in range(19) if row != 7]
            assert got[7].isnan().any(), f"{name}: NaN does not show"
            assert is_same(got[others], whole[others]), f"{name}: NaN of one row reaches others"
            assert is_same(act(x[4:5].clone()), whole[4:5]), f"{name}: a row has other bits alone"
