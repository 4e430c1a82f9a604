"""Paged attention against a float64 oracle: every compiled variant and plain torch, over shapes, masks and mixed batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from rabbet_hw_cpu import native
from rabbet_hw_cpu.attention import CpuAttention

from rabbet.contracts.attention import AttentionContext, AttentionLayerSpec, AttentionQuery, GraphSupport
from rabbet.contracts.batch import AttentionBatch
from rabbet.types.kv import KVCacheSpec

native.start(num_threads=2, cores=None)


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

    def __str__(self) -> str:
        marks = [f"w{self.window}"] if self.window else []
        marks += [f"cap{self.soft_cap}"] if self.soft_cap else []
        marks += ["sinks"] if self.sinks else []
        return "-".join([self.dtype, f"{self.heads}q{self.kv_heads}kv", f"d{self.dim}", f"b{self.block}", *marks])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, setup: Setup, sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Attention of the last ``len(q)`` tokens over all of k and v, as its formula, in ``dtype``."""
    group = setup.heads // setup.kv_heads
    keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * setup.dim**-0.5
    if setup.soft_cap is not None:
        scores = setup.soft_cap * torch.tanh(scores / setup.soft_cap)
    place = torch.arange(k.shape[0])
    distance = place[k.shape[0] - q.shape[0] :, None] - place[None]
    hidden = (distance < 0) | (distance >= (setup.window or 1 << 30))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, extra), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values)


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
        context = AttentionContext(
            spec=spec, query=query, device=torch.device("cpu"), max_num_tokens=999, max_num_requests=9, max_model_len=max_len
        )  # fmt: skip
        self.backend = CpuAttention(context)
        blocks = -(-max_len // setup.block)
        total = num_requests * blocks + 1
        self.cache = torch.full((total, *CpuAttention.kv_layout(spec).shape), float("nan"), dtype=setup.torch_dtype)
        order = torch.randperm(total - 1, generator=self.generator) + 1
        self.table = order.view(num_requests, blocks).int()
        self.history: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_requests)]
        # In the model's type, as a checkpoint has them.
        sinks = torch.randn(setup.heads, generator=self.generator).to(setup.torch_dtype)
        self.sinks = sinks if setup.sinks else None
        self.layer = AttentionLayerSpec(
            name="x", scale=setup.dim**-0.5, window=setup.window, soft_cap=setup.soft_cap, sinks=self.sinks
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.setup.torch_dtype)

    def inputs(self, count: int) -> torch.Tensor:
        return self.random(count, self.setup.heads + 2 * self.setup.kv_heads, self.setup.dim)

    def table_of(self, rows: list[int], lengths: list[int]) -> torch.Tensor:
        """Rows whose unused entries, past the end and left of the window, point nowhere."""
        table = self.table[torch.tensor(rows)].clone()
        for row, length in enumerate(lengths):
            table[row, -(-length // self.setup.block) :] = 1 << 30
        return table

    def step(
        self, counts: dict[int, int], fused: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, float64 oracle and plain form of one step, request to number of tokens."""
        s = self.setup
        total = sum(counts.values())
        fused = self.inputs(total) if fused is None else fused
        q, k, v = fused.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        starts, lengths, slots, positions, exact, plain, at = [0], [], [], [], [], [], 0
        for request, count in counts.items():
            done = sum(part.shape[0] for part, _ in self.history[request])
            for position in range(done, done + count):
                slots.append(int(self.table[request, position // s.block]) * s.block + position % s.block)
                positions.append(position)
            self.history[request].append((k[at : at + count].clone(), v[at : at + count].clone()))
            keys = torch.cat([part for part, _ in self.history[request]])
            values = torch.cat([part for _, part in self.history[request]])
            exact.append(attend(q[at : at + count], keys, values, s, self.sinks, torch.float64))
            plain.append(attend(q[at : at + count], keys, values, s, self.sinks, s.torch_dtype))
            at += count
            starts.append(at)
            lengths.append(done + count)
        batch = AttentionBatch(
            num_requests=len(counts), num_tokens=total, max_query_len=max(counts.values()), max_seq_len=max(lengths),
            query_start=torch.tensor(starts, dtype=torch.int32), query_start_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32), seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            positions=torch.tensor(positions), block_table=self.table_of(list(counts), lengths),
            slot_mapping=torch.tensor(slots),
        )  # fmt: skip
        # Two rows more than there are tokens: they must stay as they are.
        out = torch.full((total + 2, s.heads, s.dim), float("nan"), dtype=s.torch_dtype)
        self.backend.forward(self.layer, q, k, v, self.cache, self.backend.build_metadata(batch), out)
        assert out[total:].isnan().all()
        return out[:total], torch.cat(exact), torch.cat(plain)


def bounded(out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, what: object = "") -> None:
    """At most twice the error of the plain form in the same dtype."""
    assert not out.isnan().any(), f"{what}: NaN"
    error, allowed = (out.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    assert error <= 2 * allowed + 1e-6 * exact.abs().max(), f"{what}: {error:.2e} > 2 x {allowed:.2e}"


SETUPS = [
    Setup(),
    Setup(block=16),
    Setup(dim=32, heads=4, kv_heads=4),
    Setup(dim=96, heads=8, kv_heads=1),
    Setup(dim=80, heads=5, kv_heads=1, block=48),
    Setup(dim=128, heads=8, kv_heads=2, window=33),
    Setup(heads=9, kv_heads=3, window=1),
    Setup(heads=9, kv_heads=3, window=128, block=16),
    Setup(dim=256, heads=2, kv_heads=1, soft_cap=5.0),
    Setup(window=31, soft_cap=20.0, sinks=True),
    Setup(dim=16, heads=34, kv_heads=1, block=128),
    Setup(sinks=True, block=64),
]
ALL = SETUPS + [replace(setup, dtype="bfloat16") for setup in SETUPS]
STEPS = [
    {0: 31, 1: 1, 2: 130},
    {0: 1, 1: 1, 2: 1},
    {0: 1, 1: 64, 2: 3},
    {2: 1, 0: 33},
    {1: 7, 0: 8, 2: 1},
]


@pytest.mark.parametrize("setup", ALL, ids=str)
def test_every_step_of_a_mixed_batch_equals_the_oracle(setup: Setup, path: str) -> None:
    harness = Harness(setup, seed=setup.dim + setup.heads, num_requests=3)
    for counts in STEPS:
        bounded(*harness.step(counts), counts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 16, 100])
def test_lengths_around_the_edges_of_blocks_and_rounds(dtype: str, block: int, window: int | None, path: str) -> None:
    lengths = sorted({edge + off for edge in (block, 2 * block, 128, 256) for off in (-1, 0, 1)})
    harness = Harness(Setup(dtype=dtype, block=block, window=window), block, len(lengths))
    bounded(*harness.step(dict(enumerate(lengths))), "prompts")
    bounded(*harness.step(dict.fromkeys(range(len(lengths)), 1)), "decodes")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_is_computed_alike_in_a_batch_alone_and_in_chunks(dtype: str, window: int | None, path: str) -> None:
    setup = Setup(dtype=dtype, heads=9, kv_heads=3, window=window)
    whole = Harness(setup, 5, 3)
    fused = whole.inputs(321)
    together, _, _ = whole.step({0: 40, 1: 17, 2: 264}, fused)
    alone, at = Harness(setup, 5, 3), 0
    for request, count in ((0, 40), (1, 17), (2, 264)):
        for first in range(0, count, 13):
            size = min(13, count - first)
            out, _, _ = alone.step({request: size}, fused[at : at + size])
            if path == "torch":
                torch.testing.assert_close(out, together[at : at + size], rtol=1e-2, atol=1e-2)
            else:
                assert torch.equal(out, together[at : at + size])
            at += size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_left_of_the_window_may_hold_anything(dtype: str, path: str) -> None:
    harness = Harness(Setup(dtype=dtype, window=20), 7, 1)
    harness.step({0: 60})
    kept = harness.cache.clone()
    harness.cache[int(harness.table[0, 0])] = float("nan")
    bounded(*harness.step({0: 1}))
    assert not torch.equal(kept, harness.cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_scores_do_not_overflow(dtype: str, path: str) -> None:
    harness = Harness(Setup(dtype=dtype), 11, 1)
    fused = harness.inputs(150) * 60
    out, exact, plain = harness.step({0: 150}, fused)
    bounded(out, exact, plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_with_gaps_between_their_heads(dtype: str, path: str) -> None:
    setup = Setup(dtype=dtype)
    harness, spread = Harness(setup, 13, 1), Harness(setup, 13, 1)
    fused = harness.inputs(20)
    gapped = torch.full((20, 10, 70), float("nan"), dtype=setup.torch_dtype)
    gapped[..., :64] = fused
    assert torch.equal(harness.step({0: 20}, fused)[0], spread.step({0: 20}, gapped[..., :64])[0])


def test_slots_of_minus_one_write_nothing(path: str) -> None:
    harness = Harness(Setup(dtype="bfloat16"), 3, 1)
    before = harness.cache.clone()
    one = torch.tensor([0, 1], dtype=torch.int32)
    batch = AttentionBatch(
        num_requests=1, num_tokens=1, max_query_len=1, max_seq_len=1, query_start=one, query_start_cpu=one,
        seq_lens=one[1:], seq_lens_cpu=one[1:], positions=torch.tensor([0]), block_table=harness.table[:1],
        slot_mapping=torch.tensor([-1]),
    )  # fmt: skip
    q, kv = harness.random(1, 6, 64), harness.random(1, 2, 64)
    out = torch.zeros(1, 6, 64, dtype=torch.bfloat16)
    harness.backend.forward(harness.layer, q, kv, kv, harness.cache, harness.backend.build_metadata(batch), out)
    assert torch.equal(harness.cache.view(torch.int16), before.view(torch.int16))


def test_a_step_that_is_not_causal_is_an_error() -> None:
    harness = Harness(Setup(), 3, 1)
    one = torch.tensor([0, 1], dtype=torch.int32)
    batch = AttentionBatch(
        num_requests=1, num_tokens=1, max_query_len=1, max_seq_len=1, query_start=one, query_start_cpu=one,
        seq_lens=one[1:], seq_lens_cpu=one[1:], positions=torch.tensor([0]), block_table=harness.table[:1],
        slot_mapping=torch.tensor([0]), is_causal=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="is_causal"):
        harness.backend.build_metadata(batch)


def test_layouts_of_one_shape_have_names_of_their_own(path: str) -> None:
    layout = CpuAttention.kv_layout(
        KVCacheSpec(block_size=32, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype="bfloat16", page_size_bytes=0)
    )
    assert layout.name == {"tiles": "pairs-1", "torch": "hsd-1"}.get(path, "columns-1")
    assert layout.shape == (2, 2, 32, 64)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "float16"}, "DTYPE"), ({"kv_cache_dtype": "fp8"}, "KV_DTYPE"), ({"head_dim": 72, "head_dim_v": 72}, "HEAD_DIM"),
        ({"head_dim_v": 32}, "HEAD_DIM"), ({"block_size": 8}, "BLOCK_SIZE"), ({"has_alibi": True}, "ALIBI"),
        ({"is_causal": False}, "CAUSAL"), ({"device_type": "cuda"}, "DEVICE"), ({"features": frozenset({"log_sum_exp"})}, "FEATURE"),
        ({"num_heads": 5}, "HEADS"),
    ],
)  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(change: dict, code: str) -> None:
    fields = {
        "device_type": "cpu", "arch": "", "dtype": "float32", "kv_cache_dtype": "float32", "num_heads": 6, "num_kv_heads": 2,
        "head_dim": 64, "head_dim_v": 64, "block_size": 16,
    }  # fmt: skip
    assert code in [refusal.code for refusal in CpuAttention.supports(AttentionQuery(**(fields | change)))]
    assert CpuAttention.supports(AttentionQuery(**fields)) == ()


def test_graphs_need_the_compiled_kernels(path: str) -> None:
    query = AttentionQuery(
        device_type="cpu", arch="", dtype="float32", kv_cache_dtype="float32", num_heads=6, num_kv_heads=2, head_dim=64,
        head_dim_v=64, block_size=16, features=frozenset({"graphs"}),
    )  # fmt: skip
    codes = [refusal.code for refusal in CpuAttention.supports(query)]
    assert codes == (["MISSING_LIBRARY"] if path == "torch" else [])
    assert (CpuAttention.graph_support() is GraphSupport.NEVER) == (path == "torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_token_is_not_hidden(dtype: str, path: str) -> None:
    """NaN in a visible key shows, and in the rows that see it only."""
    harness = Harness(Setup(dtype=dtype, heads=2, kv_heads=1), 17, 1)
    fused = harness.inputs(40)
    fused[25, 2] = float("nan")
    out, _, _ = harness.step({0: 40}, fused)
    assert out[25:].isnan().all()
    if path != "torch":
        assert not out[:25].isnan().any()
