"""Linear layers, norms, rotary embedding and activations against float64, on every compiled variant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rabbet_hw_cpu import native
from rabbet_hw_cpu.linear import CpuLinear, PackedWeight
from rabbet_hw_cpu.ops import NativeLayerOps

from rabbet.layers.reference import TorchLayerOps

native.start(num_threads=2, cores=None)
needs_kernels = pytest.mark.skipif(
    native.library() is None, reason="no compiler was there when the package was installed"
)
DTYPES = [torch.float32, torch.bfloat16]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bounded(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of the plain form in the same dtype, against float64."""
    assert not got.isnan().any()
    error, allowed = (got.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    assert error <= 2 * allowed + 1e-6 * exact.abs().max(), f"{error:.3e} > 2 x {allowed:.3e}"


ROWS = [0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 65, 300]
SHAPES = [(64, 16), (96, 40), (576, 960), (64, 1008), (32, 1), (1600, 33), (33, 50)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_float64(dtype: torch.dtype, inputs: int, outputs: int, has_bias: bool, path: str) -> None:
    weight = random(2, outputs, inputs, dtype=dtype)
    bias = random(3, outputs, dtype=dtype) if has_bias else None
    backend = CpuLinear()
    packed = backend.pack(weight)
    assert isinstance(packed, PackedWeight) == (path != "torch")
    if path == "tiles" and dtype is torch.bfloat16:
        assert packed.is_tiled == (inputs % 32 == 0)
    for rows in ROWS:
        x = random(rows, rows, inputs, dtype=dtype)
        got = backend.apply(x, packed, bias)
        assert got.shape == (rows, outputs) and got.dtype is dtype
        if rows:
            exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
            bounded(got, F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 3072), (40, 64), (64, 96)])
def test_gated_silu_equals_float64(dtype: torch.dtype, inputs: int, outputs: int, path: str) -> None:
    weight = random(2, outputs, inputs, dtype=dtype) * inputs**-0.5
    backend = CpuLinear()
    packed = backend.pack(weight)
    for rows in (0, 1, 3, 16, 40, 130):
        x = random(1, rows, inputs, dtype=dtype) * 4
        got = backend.apply_gated_silu(x, packed)
        if path == "torch":
            assert got is None
            return
        assert got is not None and got.shape == (rows, outputs // 2)
        if rows:
            gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
            plain_gate, plain_up = F.linear(x, weight).chunk(2, dim=-1)
            bounded(got, F.silu(plain_gate) * plain_up, F.silu(gate) * up)


def test_gates_of_any_size_stay_finite(path: str) -> None:
    """silu of large negative and positive numbers."""
    if path == "torch":
        pytest.skip("torch has no fused form")
    for dtype in DTYPES:
        weight = torch.zeros(32, 32, dtype=dtype)
        weight[:16, 0], weight[16:, 1] = 1, 1
        x = torch.zeros(6, 32, dtype=dtype)
        x[:, 0] = torch.tensor([-1e30, -200.0, -0.0, 5.0, 200.0, 1e30])
        x[:, 1] = 1
        backend = CpuLinear()
        got = backend.apply_gated_silu(x, backend.pack(weight))
        assert got is not None
        torch.testing.assert_close(got[:, 0].double(), F.silu(x[:, 0].double()), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1600, 96)])
def test_a_row_is_multiplied_alike_alone_and_in_a_batch(
    dtype: torch.dtype, inputs: int, outputs: int, path: str
) -> None:
    if path == "torch":
        pytest.skip("torch rounds as it likes")
    backend = CpuLinear()
    packed = backend.pack(random(1, outputs, inputs, dtype=dtype))
    x = random(2, 300, inputs, dtype=dtype)
    whole = backend.apply(x, packed)
    for first, count in ((0, 1), (17, 1), (40, 5), (256, 44), (3, 65)):
        assert torch.equal(backend.apply(x[first : first + count], packed), whole[first : first + count])


def test_gate_and_up_that_do_not_fill_groups_are_left_to_the_caller() -> None:
    backend = CpuLinear()
    packed = backend.pack(random(2, 40, 64, dtype=torch.bfloat16))
    assert backend.apply_gated_silu(random(1, 2, 64, dtype=torch.bfloat16), packed) is None


def test_other_types_than_the_weights_are_converted(path: str) -> None:
    weight, bias = random(1, 48, 64, dtype=torch.bfloat16), random(2, 48)
    x = random(3, 5, 64)
    backend = CpuLinear()
    packed = backend.pack(weight)
    if path == "torch":
        pytest.skip("torch refuses mixed types")
    got = backend.apply(x, packed, bias)
    assert got.dtype is torch.float32
    exact = x.bfloat16().double() @ weight.double().T + bias.bfloat16().double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-1)
    strided = torch.stack((x, x), dim=1)[:, 1]
    assert torch.equal(backend.apply(strided, packed, bias), got)


def test_inputs_of_another_size_are_an_error() -> None:
    backend = CpuLinear()
    packed = backend.pack(random(1, 48, 64))
    with pytest.raises((ValueError, RuntimeError), match="64"):
        backend.apply(random(2, 3, 32), packed)


def test_float16_goes_to_torch() -> None:
    weight = random(1, 48, 64).half()
    assert CpuLinear().pack(weight) is weight


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (7, 960), (500, 64), (3, 17)])
def test_norms(dtype: torch.dtype, shape: tuple[int, int], path: str) -> None:
    if path == "torch":
        return
    ops, plain = NativeLayerOps(), TorchLayerOps()
    x, residual, weight = (
        random(1, *shape, dtype=dtype),
        random(2, *shape, dtype=dtype),
        random(3, shape[1], dtype=dtype),
    )
    if not shape[0]:
        assert ops.rms_norm(x, weight, 1e-5).shape == shape
        return

    def exact(value: torch.Tensor) -> torch.Tensor:
        return value * (value.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    bounded(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), exact(x.double()))
    wanted, total = plain.add_rms_norm(x, residual, weight, 1e-5)
    got, got_total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(got_total, total)
    bounded(got, wanted, exact(total.double()))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_inside_a_wider_tensor(dtype: torch.dtype) -> None:
    heads = random(1, 6, 5, 64, dtype=dtype)[:, 1:4]
    weight = random(2, 64, dtype=dtype)
    got = NativeLayerOps().rms_norm(heads, weight, 1e-6)
    assert got.shape == heads.shape
    torch.testing.assert_close(got, TorchLayerOps().rms_norm(heads, weight, 1e-6), rtol=1.6e-2, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotated", [64, 32])
def test_rotary_in_a_fused_tensor_touches_its_heads_only(
    dtype: torch.dtype, is_neox: bool, rotated: int, path: str
) -> None:
    if path == "torch":
        return
    fused = random(1, 9, 7, 64, dtype=dtype)
    before = fused.clone()
    angles = torch.rand(50, rotated // 2, generator=torch.Generator().manual_seed(2)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(3))
    wanted = TorchLayerOps().rotary(before[:, :4], before[:, 4:6], positions, table, is_neox=is_neox)
    NativeLayerOps().rotary(fused[:, :4], fused[:, 4:6], positions, table, is_neox=is_neox)
    exact = TorchLayerOps().rotary(
        before[:, :4].double(), before[:, 4:6].double(), positions, table.double(), is_neox=is_neox
    )
    bounded(fused[:, :4], wanted[0], exact[0].double())
    bounded(fused[:, 4:6], wanted[1], exact[1].double())
    assert torch.equal(fused[:, 6:], before[:, 6:])
    assert torch.equal(fused[..., rotated:], before[..., rotated:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype, path: str) -> None:
    if path == "torch":
        return
    ops, plain = NativeLayerOps(), TorchLayerOps()
    x = random(1, 33, 2 * 100, dtype=dtype) * 3
    gate, up = x.double().chunk(2, dim=-1)
    bounded(ops.silu_and_mul(x), plain.silu_and_mul(x), F.silu(gate) * up)
    for kind in ("none", "tanh"):
        bounded(
            ops.gelu_and_mul(x, approximate=kind),
            plain.gelu_and_mul(x, approximate=kind),
            F.gelu(gate, approximate=kind) * up,
        )
