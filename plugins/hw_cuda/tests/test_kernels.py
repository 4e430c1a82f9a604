"""Kernels against float64: errors at most twice those of plain torch in the same dtype, and nothing outside written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rabbet_hw_cuda.linear import CudaLinear
from rabbet_hw_cuda.ops import TritonLayerOps
from rabbet_sdk.numerics import assert_within

from rabbet.layers.reference import TorchLayerOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]
PLAIN = TorchLayerOps()
EPS = 1e-6


@pytest.fixture
def ops() -> TritonLayerOps:
    return TritonLayerOps()


def drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(device, dtype)


# The interpreter cuts bfloat16 off where a GPU rounds.
FACTOR = 2.0 if torch.cuda.is_available() else 4.0


def close(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    assert got.dtype is plain.dtype and got.shape == plain.shape
    assert_within(got, plain=plain, oracle=exact, factor=FACTOR)


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1024])
def test_norms(dtype: torch.dtype, size: int, ops: TritonLayerOps, device: torch.device) -> None:
    weight = drawn(device, dtype, size)
    for rows in (0, 1, 5):
        x, residual = drawn(device, dtype, rows, size), drawn(device, dtype, rows, size)
        plain_sum, exact_sum = x + residual, x.double() + residual.double()
        if rows:
            close(ops.rms_norm(x, weight, EPS), PLAIN.rms_norm(x, weight, EPS), exact_norm(x, weight))
        got, total = ops.add_rms_norm(x, residual, weight, EPS)
        assert total.shape == got.shape == (rows, size)
        if rows:
            close(total, plain_sum, exact_sum)
            close(got, PLAIN.rms_norm(total, weight, EPS), exact_norm(total, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_a_view(dtype: torch.dtype, ops: TritonLayerOps, device: torch.device) -> None:
    whole = drawn(device, dtype, 3, 7, 32)
    heads, weight = whole[:, 2:5], drawn(device, dtype, 32)
    before = whole.clone()
    close(ops.rms_norm(heads, weight, EPS), PLAIN.rms_norm(heads, weight, EPS), exact_norm(heads, weight))
    assert torch.equal(whole, before), "an input was changed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (80, 80), (32, 8)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotation_with_and_without_norms_of_heads(
    dtype: torch.dtype, is_neox: bool, size: int, rotated: int, has_norm: bool, ops: TritonLayerOps, device: torch.device
) -> None:
    num_heads, num_kv_heads, tokens = 5, 2, 3
    whole = drawn(device, dtype, tokens, num_heads + 2 * num_kv_heads, size)
    q, k, v = whole.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    values = v.clone()
    positions = torch.tensor([11, 0, 5], device=device)
    angles = torch.rand(12, rotated // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    weights = [drawn(device, dtype, size) for _ in range(2)]
    plain_q, plain_k = q.clone(), k.clone()
    exact_q, exact_k = q.double(), k.double()
    if has_norm:
        exact_q, exact_k = (exact_norm(x, w) for x, w in zip((q, k), weights, strict=True))
        plain_q, plain_k = (PLAIN.rms_norm(x, w, EPS) for x, w in zip((plain_q, plain_k), weights, strict=True))
    plain = PLAIN.rotary(plain_q, plain_k, positions, table, is_neox=is_neox)
    exact = rotate(exact_q, positions, table, is_neox), rotate(exact_k, positions, table, is_neox)
    if has_norm:
        got = ops.norm_rotary(q, k, *weights, EPS, positions, table, is_neox=is_neox)
    else:
        got = ops.rotary(q, k, positions, table, is_neox=is_neox)
    for one, theirs, oracle in zip(got, plain, exact, strict=True):
        close(one, theirs, oracle)
    assert torch.equal(v, values), "what lies behind the heads was changed"


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    half = table.shape[1] // 2
    out = x.clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
            cosine, sine = table[position, i].double(), table[position, half + i].double()
            first, second = x[token, :, a].clone(), x[token, :, b].clone()
            out[token, :, a] = first * cosine - second * sine
            out[token, :, b] = second * cosine + first * sine
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 1025])
def test_gates(dtype: torch.dtype, size: int, ops: TritonLayerOps, device: torch.device) -> None:
    for rows in (0, 1, 3):
        x = drawn(device, dtype, rows, 2 * size) * 4
        if not rows:
            assert ops.silu_and_mul(x).shape == (0, size)
            continue
        x[0, 0], x[0, 1] = 80.0, -80.0
        gate, up = x.double().chunk(2, -1)
        close(ops.silu_and_mul(x), PLAIN.silu_and_mul(x), F.silu(gate) * up)
        for kind in ("none", "tanh"):
            got, plain = ops.gelu_and_mul(x, approximate=kind), PLAIN.gelu_and_mul(x, approximate=kind)
            close(got, plain, F.gelu(gate, approximate=kind) * up)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 100), (70, 1040)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_of_few_rows(
    dtype: torch.dtype, outputs: int, inputs: int, has_bias: bool, device: torch.device
) -> None:
    backend = CudaLinear()
    weight = drawn(device, dtype, outputs, inputs)
    bias = drawn(device, dtype, outputs) if has_bias else None
    for rows in (1, 17):
        # Rows of a wider tensor, the rest of which is poison.
        x = torch.full((rows, inputs + 8), float("nan"), dtype=dtype, device=device)[:, :inputs]
        x.copy_(drawn(device, dtype, rows, inputs))
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        # torch's own product may multiply what lies behind a row by zero, and poison times zero is poison.
        close(backend.apply(x, backend.pack(weight), bias), F.linear(x.contiguous(), weight, bias), exact)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), [(34, 100), (16, 2048)])
def test_gated_products_of_few_rows(dtype: torch.dtype, outputs: int, inputs: int, device: torch.device) -> None:
    backend = CudaLinear()
    weight = drawn(device, dtype, outputs, inputs) * inputs**-0.5
    for rows in (1, 18):
        x = drawn(device, dtype, rows, inputs) * 2
        gate, up = (x.double() @ weight.double().T).chunk(2, -1)
        plain_gate, plain_up = F.linear(x, weight).chunk(2, -1)
        got = backend.apply_gated_silu(x, weight)
        assert got is not None
        close(got, F.silu(plain_gate) * plain_up, F.silu(gate) * up)


def test_what_is_not_few_is_left_to_torch(device: torch.device) -> None:
    backend = CudaLinear()
    weight, many = drawn(device, torch.bfloat16, 8, 16), drawn(device, torch.bfloat16, 33, 16)
    assert backend.apply_gated_silu(many, weight) is None
    assert torch.equal(backend.apply(many, weight), F.linear(many, weight))
    with pytest.raises(RuntimeError):
        backend.apply(drawn(device, torch.bfloat16, 2, 15), weight)
