"""Linear layers, norms, rotary embedding and activations against float64, and the platform's numbers."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from rabbet_hw_cpu import native
from rabbet_hw_cpu.linear import CpuLinear, PackedWeight
from rabbet_hw_cpu.ops import NativeLayerOps
from rabbet_hw_cpu.platform import CpuPlatform

from rabbet.contracts.platform import PlatformQuery
from rabbet.layers.reference import TorchLayerOps

native.start(num_threads=2, cores=[0, 0])
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


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 16), (96, 40), (576, 960), (64, 1008), (32, 1), (4128, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bfloat16_linear_equals_float64(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    x, weight = random(1, rows, inputs, dtype=torch.bfloat16), random(2, outputs, inputs, dtype=torch.bfloat16)
    bias = random(3, outputs, dtype=torch.bfloat16) if has_bias else None
    backend = CpuLinear()
    packed = backend.pack(weight)
    assert isinstance(packed, PackedWeight) == native.has_amx()
    got = backend.apply(x, packed, bias)
    assert got.shape == (rows, outputs) and got.dtype is torch.bfloat16
    if rows:
        exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
        bounded(got, F.linear(x, weight, bias), exact)


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_gated_silu_equals_float64(rows: int) -> None:
    x, weight = random(1, rows, 576, dtype=torch.bfloat16), random(2, 2 * 1536, 576, dtype=torch.bfloat16) / 24
    backend = CpuLinear()
    got = backend.apply_gated_silu(x, backend.pack(weight))
    if not native.has_amx():
        assert got is None
        return
    assert got is not None
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    plain_gate, plain_up = F.linear(x, weight).chunk(2, dim=-1)
    bounded(got, F.silu(plain_gate) * plain_up, F.silu(gate) * up)


def test_gate_and_up_that_do_not_fill_blocks_are_left_to_the_caller() -> None:
    backend = CpuLinear()
    assert (
        backend.apply_gated_silu(
            random(1, 2, 64, dtype=torch.bfloat16), backend.pack(random(2, 40, 64, dtype=torch.bfloat16))
        )
        is None
    )


def test_float32_and_odd_sizes_go_to_torch() -> None:
    backend = CpuLinear()
    x, weight = random(1, 5, 40), random(2, 7, 40)
    assert torch.equal(backend.apply(x, backend.pack(weight)), F.linear(x, weight))
    odd = random(2, 7, 40, dtype=torch.bfloat16)
    assert torch.equal(backend.apply(x.bfloat16(), backend.pack(odd)), F.linear(x.bfloat16(), odd))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (7, 960), (500, 64)])
def test_norms(dtype: torch.dtype, shape: tuple[int, int]) -> None:
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
def test_rotary_in_a_fused_tensor_touches_its_heads_only(dtype: torch.dtype, is_neox: bool, rotated: int) -> None:
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
def test_gated_activations(dtype: torch.dtype) -> None:
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


def test_platform_says_what_is_there() -> None:
    (device,) = CpuPlatform.detect()
    memory = CpuPlatform().memory()
    assert device.total_memory_bytes == memory.total_bytes > 0
    assert 0 < memory.used_by_process_bytes < memory.total_bytes
    server, offline = (CpuPlatform.batch_defaults(is_server=flag, world_size=1) for flag in (True, False))
    assert (server.max_num_batched_tokens, server.max_num_seqs) == (2048, 128)
    assert (offline.max_num_batched_tokens, offline.max_num_seqs) == (4096, 256)
    assert server.max_kv_cache_bytes is not None and server.max_kv_cache_bytes <= device.total_memory_bytes // 4


def test_platform_refuses_more_ranks_than_cores_and_float16() -> None:
    cores = len(os.sched_getaffinity(0))
    codes = [
        r.code
        for r in CpuPlatform.supports(PlatformQuery(dtype="float16", num_local_ranks=cores + 1, device_ids=("0",)))
    ]
    assert codes == ["DTYPE", "RANKS", "DEVICE_IDS"]
    assert CpuPlatform.supports(PlatformQuery(dtype="bfloat16")) == ()
