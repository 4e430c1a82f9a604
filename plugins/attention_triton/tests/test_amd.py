"""Shapes for AMD GPUs; without one their kernels can be compiled, though not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from rabbet_attention_triton.amd import amd_shape
from rabbet_attention_triton.backend import TritonAttention
from rabbet_triton import launch

from rabbet.contracts.attention import AttentionContext, AttentionQuery
from rabbet.types.kv import KVCacheSpec

# In a process of its own: the interpreter, which other tests use, compiles nothing.
COMPILE = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rabbet_attention_triton.amd import amd_shape
from rabbet_attention_triton.kernels import chunk_kernel, decode_kernel, store_kernel

arch = sys.argv[1]
shape = amd_shape(arch)
shared = dict(K=8, G=4, S=16, D=128, WIDTH=128, COLUMNS=min(64, shape.columns), DEPENDENT=0)
flags = dict(HAS_WINDOW=False, HAS_SOFT_CAP=False, HAS_SINKS=False, HAS_ALIBI=False)
decode = dict(ROWS=16, MOST_SPLITS=64, SHORTEST=64, HAS_LIST=False, STORES=True)
halves, floats = ("q", "cache", "out", "k", "v"), ("partial", "marks", "sinks", "slopes")
ids = ("counters", "query_start", "seq_lens", "tables", "tile_requests", "tile_starts")
types = {**dict.fromkeys(halves, "*bf16"), **dict.fromkeys(floats, "*fp32"), **dict.fromkeys(ids, "*i32"),
         "slots": "*i64", "page": "i64", "scale": "fp32", "soft_cap": "fp32"}
for kernel, constants, options in (
    (store_kernel, dict(HEADS=8), {"num_warps": 4}),
    (decode_kernel, {**decode, **flags}, shape.decode),
    (chunk_kernel, {"ROWS": shape.chunk_rows, "MOST_REQUESTS": 64, "DECODE_ROWS": 16, "HAS_TILES": False, **flags}, shape.chunk),
):
    given = {**shared, **constants}
    types["requests"] = "*i32" if kernel is decode_kernel else "i32"
    names = [parameter.name for parameter in kernel.params]
    fixed = {name: given[name] for name in names if name in given}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    made = triton.compile(ASTSource(kernel, signature, fixed, aligned), target=target, options=dict(options))
    code = made.asm["amdgcn"]
    spilled = int(re.search(r"vgpr_spill_count:\\s*(\\d+)", code)[1])
    products = len(re.findall(r"v_s?w?mfma|v_wmma", code))
    print(json.dumps([kernel.__name__, made.metadata.warp_size, made.metadata.shared, spilled, products]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_kernels_compile_with_the_shapes_of_each_kind_of_gpu(arch: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, arch], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["store_kernel", "decode_kernel", "chunk_kernel"]
    for name, warp_size, local_bytes, spilled, products in rows:
        assert warp_size == (64 if arch.startswith("gfx9") else 32)
        assert local_bytes <= (160 if arch == "gfx950" else 64) << 9, f"{name}: two programs do not fit a processor"
        assert products or name == "store_kernel", f"{name} multiplies without matrix instructions"
        if arch.startswith("gfx9"):
            assert not spilled, f"{name} spills {spilled} registers"


def query(arch: str, **facts: Any) -> AttentionQuery:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "head_dim_v": 128, "block_size": 16, **facts}
    return AttentionQuery(device_type="cuda", arch=arch, dtype="bfloat16", kv_cache_dtype="bfloat16", **sizes)


def backend(arch: str, **facts: Any) -> TritonAttention:
    asked = query(arch, **facts)
    spec = KVCacheSpec(
        block_size=16, num_kv_heads=asked.num_kv_heads, head_dim=asked.head_dim, head_dim_v=asked.head_dim, dtype="bfloat16",
        page_size_bytes=4 * 16 * asked.num_kv_heads * asked.head_dim,
    )  # fmt: skip
    return TritonAttention(
        AttentionContext(
            spec=spec, query=asked, device=torch.device("cpu"), max_num_tokens=64, max_num_requests=4, max_model_len=256
        )
    )


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100", "gfx1201", "gfx9999"])
def test_amd_gpus_are_served(arch: str) -> None:
    assert not TritonAttention.supports(query(arch))
    shape = amd_shape(arch)
    assert shape is not None
    made = backend(arch)
    assert (made._columns, made._chunk_rows(), made._chunk_options(made._chunk_rows())) == (
        shape.columns, shape.chunk_rows, shape.chunk,
    )  # fmt: skip
    assert backend(arch, num_heads=128)._chunk_rows() >= 64, "a tile holds a group's rows"


@pytest.mark.parametrize("arch", ["sm_90", ""])
def test_other_gpus_keep_their_shapes(arch: str) -> None:
    assert amd_shape(arch) is None
    made = backend(arch)
    assert (made._columns, made._chunk_rows()) == (64, 128)
    assert made._chunk_options(128) == {"num_warps": 8, "num_stages": 3}


class _Function:
    """A kernel in Triton's place, which notes what it is compiled for."""

    def __init__(self) -> None:
        names = ("x", "DEPENDENT")
        self.params = [type("P", (), {"is_constexpr": name == "DEPENDENT", "do_not_specialize": False}) for name in names]
        self.compiled: list[dict[str, int]] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        def start(*_arguments: Any, **options: int) -> Any:
            self.compiled.append(options)
            return {_grid: lambda *_arguments: None}

        return start


def test_launches_on_amd_wait_for_the_kernel_in_front_and_tell_small_tensors_from_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capability of 9 is not NVIDIA's there, and a form with offsets of 32 bits must not meet a larger tensor."""
    monkeypatch.setattr(launch, "IS_INTERPRETED", type("No", (), {"value": False}))
    monkeypatch.setattr(launch, "_IS_HIP", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 4))
    launch._has_dependent.cache_clear()
    try:
        assert launch.dependence(torch.empty(1), is_small=True) == 0
    finally:
        launch._has_dependent.cache_clear()
    function = _Function()
    kernel = launch.Kernel(function)
    small, large = torch.empty(4, device="meta"), torch.empty(1 << 29, device="meta")
    for x in (small, large, small, large[:4]):
        kernel((1, 1, 1), x, 0, num_warps=4, num_stages=2, waves_per_eu=2)
    assert function.compiled == [{"num_warps": 4, "num_stages": 2, "waves_per_eu": 2}] * 2
