"""Paged attention against a float64 oracle: compiled kernels and plain torch, over shapes, masks and mixed batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from rabbet_hw_cpu import attention as module
from rabbet_hw_cpu import native
from rabbet_hw_cpu.attention import CpuAttention

from rabbet.contracts.attention import AttentionContext, AttentionLayerSpec, AttentionQuery
from rabbet.contracts.batch import AttentionBatch
from rabbet.types.kv import KVCacheSpec

native.start(num_threads=2, cores=[0, 0])


@dataclass(frozen=True)
class Setup:
    """One shape."""

    dtype: str = "float32"
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block: int = 32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, setup: Setup, sinks: torch.Tensor | None) -> torch.Tensor:
    """float64 attention of the last ``len(q)`` tokens over all of k and v, head by head and query by query."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    offset, group = k.shape[0] - q.shape[0], setup.heads // setup.kv_heads
    for i in range(q.shape[0]):
        position = offset + i
        first = 0 if setup.window is None else max(0, position - setup.window + 1)
        for h in range(setup.heads):
            keys, values = k[first : position + 1, h // group].double(), v[first : position + 1, h // group].double()
            scores = keys @ q[i, h].double() * setup.dim**-0.5
            if setup.soft_cap is not None:
                scores = setup.soft_cap * torch.tanh(scores / setup.soft_cap)
            weights = (scores - scores.max()).exp()
            total = weights.sum()
            if sinks is not None:
                total = total + math.exp(float(sinks[h]) - float(scores.max()))
            out[i, h] = (weights / total) @ values
    return out


class Harness:
    """Feeds steps to a backend over a poisoned cache with shuffled blocks."""

    def __init__(self, setup: Setup, seed: int, num_requests: int, max_len: int = 400) -> None:
        self.setup = setup
        self.generator = torch.Generator().manual_seed(seed)
        spec = KVCacheSpec(
            block_size=setup.block, num_kv_heads=setup.kv_heads, head_dim=setup.dim, head_dim_v=setup.dim,
            dtype=setup.dtype, page_size_bytes=0, window=setup.window,
        )  # fmt: skip
        query = AttentionQuery(
            device_type="cpu", arch="", dtype=setup.dtype, kv_cache_dtype=setup.dtype, num_heads=setup.heads,
            num_kv_heads=setup.kv_heads, head_dim=setup.dim, head_dim_v=setup.dim, block_size=setup.block,
            window=setup.window, has_soft_cap=setup.soft_cap is not None, has_sinks=setup.sinks,
        )  # fmt: skip
        assert CpuAttention.supports(query) == ()
        self.backend = CpuAttention(
            AttentionContext(
                spec=spec,
                query=query,
                device=torch.device("cpu"),
                max_num_tokens=999,
                max_num_requests=9,
                max_model_len=max_len,
            )
        )
        blocks = -(-max_len // setup.block)
        total = num_requests * blocks + 1
        layout = CpuAttention.kv_layout(spec)
        self.cache = torch.full((total, *layout.shape), float("nan"), dtype=setup.torch_dtype)
        order = torch.randperm(total - 1, generator=self.generator) + 1
        self.table = order.view(num_requests, blocks).int()
        self.history: list[list[torch.Tensor]] = [[] for _ in range(num_requests)]
        self.sinks = torch.randn(setup.heads, generator=self.generator) if setup.sinks else None
        self.layer = AttentionLayerSpec(
            name="x", scale=setup.dim**-0.5, window=setup.window, soft_cap=setup.soft_cap, sinks=self.sinks
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.setup.torch_dtype)

    def step(self, counts: dict[int, int], *, strided: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and oracle of one step, request to number of tokens."""
        s = self.setup
        total = sum(counts.values())
        width = s.heads + 2 * s.kv_heads
        fused = self.random(total, width, s.dim) if strided else None
        q = fused[:, : s.heads] if fused is not None else self.random(total, s.heads, s.dim)
        k = fused[:, s.heads : s.heads + s.kv_heads] if fused is not None else self.random(total, s.kv_heads, s.dim)
        v = fused[:, s.heads + s.kv_heads :] if fused is not None else self.random(total, s.kv_heads, s.dim)
        starts, lengths, slots, positions, expected, at = [0], [], [], [], [], 0
        for request, count in counts.items():
            done = sum(part.shape[0] for part, _ in self.history[request])
            for position in range(done, done + count):
                slots.append(int(self.table[request, position // s.block]) * s.block + position % s.block)
                positions.append(position)
            self.history[request].append((k[at : at + count].clone(), v[at : at + count].clone()))
            keys = torch.cat([part for part, _ in self.history[request]])
            values = torch.cat([part for _, part in self.history[request]])
            expected.append(oracle(q[at : at + count], keys, values, s, self.sinks))
            at += count
            starts.append(at)
            lengths.append(done + count)
        rows = torch.tensor(list(counts))
        batch = AttentionBatch(
            num_requests=len(counts), num_tokens=total, max_query_len=max(counts.values()), max_seq_len=max(lengths),
            query_start=torch.tensor(starts, dtype=torch.int32), query_start_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32), seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            positions=torch.tensor(positions), block_table=self.table[rows].contiguous(), slot_mapping=torch.tensor(slots),
        )  # fmt: skip
        out = torch.full((total, s.heads, s.dim), float("nan"), dtype=s.torch_dtype)
        self.backend.forward(self.layer, q, k, v, self.cache, self.backend.build_metadata(batch), out)
        return out, torch.cat(expected)


SETUPS = [
    Setup(),
    Setup(block=16),
    Setup(dim=32, heads=4, kv_heads=4),
    Setup(dim=96, heads=8, kv_heads=1),
    Setup(dim=80, heads=5, kv_heads=1, block=48),
    Setup(dim=128, heads=8, kv_heads=2, window=33),
    Setup(dim=64, heads=9, kv_heads=3, window=1),
    Setup(dim=256, heads=2, kv_heads=1, soft_cap=5.0),
    Setup(window=31, soft_cap=20.0, sinks=True),
    Setup(sinks=True, block=64),
]
ALL = SETUPS + [Setup(**{**s.__dict__, "dtype": "bfloat16"}) for s in SETUPS]
STEPS = [
    {0: 31, 1: 1, 2: 130},
    {0: 1, 1: 1, 2: 1},
    {0: 1, 1: 64, 2: 3},
    {2: 1, 0: 33},
    {1: 7, 0: 8, 2: 1},
]


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(native, "has_amx", lambda: False)
    return request.param


@pytest.mark.parametrize("setup", ALL, ids=str)
def test_every_step_of_a_mixed_batch_equals_the_oracle(setup: Setup, path: str) -> None:
    harness = Harness(setup, seed=hash((setup.dim, setup.heads)) % 1000, num_requests=3)
    bound = 2e-5 if setup.dtype == "float32" else 2e-2
    for counts in STEPS:
        out, expected = harness.step(counts)
        assert not out.isnan().any()
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < bound, f"{counts}: relative error {error:.2e}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_equals_alone_and_chunked_equals_whole(dtype: str) -> None:
    setup = Setup(dtype=dtype)
    whole = Harness(setup, 5, 3)
    together, _ = whole.step({0: 40, 1: 17, 2: 64})
    alone = Harness(setup, 5, 3)
    fused, at = alone.random(121, 10, 64), 0
    for request, count in ((0, 40), (1, 17), (2, 64)):
        for first in range(0, count, 13):
            size = min(13, count - first)
            part = fused[at : at + size]
            alone.random = lambda *_shape, part=part: part  # type: ignore[method-assign]
            out, _ = alone.step({request: size})
            error = (out.double() - together[at : at + size].double()).abs().max()
            assert error < (1e-5 if dtype == "float32" else 1e-2)
            at += size


def test_slots_of_minus_one_write_nothing() -> None:
    setup = Setup(dtype="bfloat16")
    harness = Harness(setup, 3, 1)
    before = harness.cache.clone()
    batch = AttentionBatch(
        num_requests=1, num_tokens=1, max_query_len=1, max_seq_len=1, query_start=torch.tensor([0, 1], dtype=torch.int32),
        query_start_cpu=torch.tensor([0, 1], dtype=torch.int32), seq_lens=torch.tensor([1], dtype=torch.int32),
        seq_lens_cpu=torch.tensor([1], dtype=torch.int32), positions=torch.tensor([0]), block_table=harness.table[:1],
        slot_mapping=torch.tensor([-1]),
    )  # fmt: skip
    q, kv = harness.random(1, 6, 64), harness.random(1, 2, 64)
    out = torch.zeros(1, 6, 64, dtype=torch.bfloat16)
    harness.backend.forward(harness.layer, q, kv, kv, harness.cache, harness.backend.build_metadata(batch), out)
    assert torch.equal(harness.cache.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "float16"}, "DTYPE"), ({"kv_cache_dtype": "fp8"}, "KV_DTYPE"), ({"head_dim": 72, "head_dim_v": 72}, "HEAD_DIM"),
        ({"head_dim_v": 32}, "HEAD_DIM"), ({"block_size": 8}, "BLOCK_SIZE"), ({"has_alibi": True}, "ALIBI"),
        ({"is_causal": False}, "CAUSAL"), ({"device_type": "cuda"}, "DEVICE"), ({"features": frozenset({"graphs"})}, "FEATURE"),
        ({"num_heads": 5}, "HEADS"),
    ],
)  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(change: dict, code: str) -> None:
    fields = {
        "device_type": "cpu", "arch": "", "dtype": "float32", "kv_cache_dtype": "float32", "num_heads": 6, "num_kv_heads": 2,
        "head_dim": 64, "head_dim_v": 64, "block_size": 16,
    }  # fmt: skip
    assert code in [refusal.code for refusal in CpuAttention.supports(AttentionQuery(**(fields | change)))]
    assert module.CpuAttention.supports(AttentionQuery(**fields)) == ()
