"""Drives an attention backend through its contract alone: requests, steps, a cache whose bytes are watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from rabbet.contracts.attention import AttentionBackend, AttentionContext, AttentionLayerSpec, AttentionQuery
from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.kv_cache_dtype import KVCacheDtype, KVDtypeQuery, PageFormat
from rabbet.errors import PluginError
from rabbet.types.kv import CacheKind, KVCacheSpec
from rabbet_sdk.conformance.subject import load_subject
from rabbet_sdk.oracles.attention import attention

__all__ = ["Request", "Rig", "Setup"]

_STORED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""KV-cache dtypes that are tested where no plugin of the name is installed: a byte an element, one scale a layer."""


@cache
def _coded(name: str) -> type[KVCacheDtype] | None:
    """The installed KV-cache dtype of a name."""
    try:
        return load_subject(f"kv_cache_dtype/{name}").plugin_class
    except PluginError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A layer and its cache, one value of each axis of the contract."""

    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    head_dim_v: int | None = None
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    is_causal: bool = True
    kv_scales: tuple[float, float] = (1.0, 1.0)
    device: str = "cpu"
    arch: str = ""
    extra: frozenset[str] = frozenset()

    @property
    def features(self) -> frozenset[str]:
        """Names that have to be claimed."""
        named = {
            "gqa": self.heads != self.kv_heads,
            "sliding_window": self.window is not None,
            "soft_cap": self.soft_cap is not None,
            "sinks": self.has_sinks,
            "alibi": self.has_alibi,
            "non_causal": not self.is_causal,
            "uneven_head_dim_v": self.head_dim_v not in (None, self.head_dim),
        }
        return frozenset(name for name, wanted in named.items() if wanted) | self.extra

    def query(self) -> AttentionQuery:
        """What ``supports`` is asked; ``features`` names only what the query has no field for."""
        return AttentionQuery(
            device_type=self.device, arch=self.arch, dtype=self.dtype, num_heads=self.heads,
            kv_cache_dtype=self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, head_dim_v=self.size_v,
            block_size=self.block_size, window=self.window, has_soft_cap=self.soft_cap is not None,
            has_sinks=self.has_sinks, has_alibi=self.has_alibi, is_causal=self.is_causal, features=self.extra,
        )  # fmt: skip

    @property
    def size_v(self) -> int:
        """Elements of a value head."""
        return self.head_dim_v or self.head_dim

    @property
    def codes(self) -> type[KVCacheDtype] | None:
        """The KV-cache dtype, if it is a plugin's."""
        return None if self.kv_cache_dtype == "auto" else _coded(self.kv_cache_dtype)

    def page_format(self) -> PageFormat:
        """How a token is stored."""
        if self.codes is not None:
            return self.codes.page_format(KVDtypeQuery(
                device_type=self.device, arch=self.arch, dtype=self.dtype, num_kv_heads=self.kv_heads,
                head_dim=self.head_dim, head_dim_v=self.size_v,
            ))  # fmt: skip
        name = self.dtype if self.kv_cache_dtype == "auto" else _STORED.get(self.kv_cache_dtype, self.kv_cache_dtype)
        size = getattr(torch, name).itemsize
        return PageFormat(storage_dtype=name, bytes_per_token=self.kv_heads * (self.head_dim + self.size_v) * size)

    def spec(self) -> KVCacheSpec:
        """The cache of the layer."""
        form = self.page_format()
        return KVCacheSpec(
            kind=CacheKind.FULL_ATTENTION if self.window is None else CacheKind.SLIDING_WINDOW,
            block_size=self.block_size, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            head_dim_v=self.size_v, dtype=form.storage_dtype, window=self.window,
            page_size_bytes=self.block_size * (form.bytes_per_token + form.scale_bytes_per_token),
            kv_cache_dtype="" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
        )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Request:
    """One request's true queries, keys and values, its blocks, and how many tokens are in the cache."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: list[int]
    done: int = 0


@dataclass(kw_only=True)
class Rig:
    """A backend with a cache of ``num_blocks`` pages and a page of canaries before and behind them.

    Attributes:
        fill: Value of every element of the cache and of outputs before something is written there.
    """

    backend_class: type[AttentionBackend]
    setup: Setup
    device: torch.device
    generator: torch.Generator
    options: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 48
    fill: float = float("nan")

    def __post_init__(self) -> None:
        setup, spec = self.setup, self.setup.spec()
        self.dtype: torch.dtype = getattr(torch, setup.dtype)
        layout = self.backend_class.kv_layout(spec)
        self.whole = torch.empty(
            (self.num_blocks + 2, *layout.shape), dtype=getattr(torch, layout.dtype), device=self.device
        )
        if self.whole.dtype.is_floating_point:
            # By a conversion: what is out of a short type's range becomes its largest number.
            self.whole.copy_(torch.tensor(self.fill).to(self.whole.dtype))
        else:  # NaN where a scale stands, whatever its type, or else small numbers
            self.whole.view(torch.uint8).fill_(255 if self.fill != self.fill else 60)
        self.cache = self.whole[1:-1]
        context = AttentionContext(
            spec=spec, query=setup.query(), device=self.device, max_num_tokens=512, max_num_requests=32,
            max_model_len=setup.block_size * 16, options=self.options,
        )  # fmt: skip
        self.backend = self.backend_class(context)
        self.layer = self.new_layer()
        self._free = torch.randperm(self.num_blocks - 2, generator=self.generator).add(1).tolist()

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers in the model's dtype."""
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def new_layer(self) -> AttentionLayerSpec:
        """Constants as the setup asks for them."""
        setup, scales = self.setup, dict[str, Any](zip(("k_scale", "v_scale"), self.setup.kv_scales, strict=True))
        if setup.page_format().has_head_scales:
            scales = {"k_head_scales": self.head_scales(0), "v_head_scales": self.head_scales(1)}
        return AttentionLayerSpec(
            name="layers.0.attn",
            scale=setup.scale or setup.head_dim**-0.5,
            window=setup.window,
            soft_cap=setup.soft_cap,
            sinks=self.random(setup.heads) if setup.has_sinks else None,
            alibi_slopes=self.random(setup.heads).abs().float() * 0.1 if setup.has_alibi else None,
            **scales,
        )

    def head_scales(self, which: int) -> torch.Tensor:
        """float32 [K]: of keys (0) or values (1); other ones for each head where the KV-cache dtype has them."""
        scales = torch.full((self.setup.kv_heads,), self.setup.kv_scales[which], device=self.device)
        if self.setup.page_format().has_head_scales:
            # Powers of two, so that dividing and multiplying by the inverse are the same; far apart, so that range counts.
            scales = scales * torch.tensor([1.0, 1 / 32, 32.0], device=self.device)[torch.arange(len(scales)) % 3]
        return scales

    def stored(self, tensor: torch.Tensor, which: int) -> torch.Tensor:
        """What true keys (0) or values (1) are in the cache, float64."""
        if self.setup.codes is not None:
            return self.setup.codes.round_trip(tensor, self.head_scales(which)).double()
        scale = self.setup.kv_scales[which]
        return (tensor / scale).to(getattr(torch, self.setup.spec().dtype)).to(torch.float64) * scale

    def request(self, length: int) -> Request:
        """A request of ``length`` tokens with blocks in random order."""
        setup = self.setup
        return Request(
            q=self.random(length, setup.heads, setup.head_dim),
            k=self.random(length, setup.kv_heads, setup.head_dim),
            v=self.random(length, setup.kv_heads, setup.size_v),
            blocks=[self._free.pop() for _ in range(-(-length // setup.block_size))],
        )

    def batch(self, rows: Sequence[tuple[Request, int]], *, padding: int = 0, writes: bool = True) -> AttentionBatch:
        """The step in which each request computes so many further tokens."""
        size, ends = self.setup.block_size, [request.done + count for request, count in rows]
        positions = [p for (request, _), end in zip(rows, ends, strict=True) for p in range(request.done, end)]
        slots = [
            request.blocks[p // size] * size + p % size
            for (request, _), end in zip(rows, ends, strict=True)
            for p in range(request.done, end)
        ]
        if not writes:
            slots = [-1] * len(slots)
        width = max(len(request.blocks) for request, _ in rows) + 3
        # Stale entries name a block that holds poison.
        table = [(request.blocks[: -(-end // size)] + [self.num_blocks - 1] * width)[:width]
                 for (request, _), end in zip(rows, ends, strict=True)]  # fmt: skip
        counts = torch.tensor([0] + [count for _, count in rows])
        starts, lengths = counts.cumsum(0).to(torch.int32), torch.tensor(ends, dtype=torch.int32)
        return AttentionBatch(
            num_requests=len(rows), num_tokens=len(positions), max_query_len=int(counts.max()), max_seq_len=max(ends),
            query_start=starts.to(self.device), query_start_cpu=starts, seq_lens=lengths.to(self.device),
            seq_lens_cpu=lengths, positions=torch.tensor(positions + [0] * padding).to(self.device),
            block_table=torch.tensor(table, dtype=torch.int32).to(self.device),
            slot_mapping=torch.tensor(slots + [-1] * padding).to(self.device), is_causal=self.setup.is_causal,
        )  # fmt: skip

    def inputs(self, rows: Sequence[tuple[Request, int]], padding: int = 0) -> list[torch.Tensor]:
        """q, k, v of the step; rows past its end hold the fill."""
        found = []
        for name in ("q", "k", "v"):
            parts = [getattr(request, name)[request.done : request.done + count] for request, count in rows]
            parts.append(torch.full((padding, *parts[0].shape[1:]), self.fill, dtype=self.dtype, device=self.device))
            found.append(torch.cat(parts))
        return found

    def output(self, tokens: int) -> torch.Tensor:
        """[tokens, H, E], full of the fill."""
        shape = (tokens, self.setup.heads, self.setup.size_v)
        return torch.full(shape, self.fill, dtype=self.dtype, device=self.device)

    def step(self, rows: Sequence[tuple[Request, int]], *, padding: int = 0, writes: bool = True) -> list[torch.Tensor]:
        """Compute a step; the outputs of each row."""
        batch = self.batch(rows, padding=padding, writes=writes)
        out = self.output(batch.num_tokens + padding)
        q_THD, k_TKD, v_TKE = self.inputs(rows, padding)
        self.backend.forward(self.layer, q_THD, k_TKD, v_TKE, self.cache, self.backend.build_metadata(batch), out)
        for request, count in rows:
            request.done += count
        return list(torch.split(out[: batch.num_tokens], [count for _, count in rows]))

    def started(self, before: int, now: int) -> Request:
        """A request with ``before`` tokens in the cache and ``now`` to come."""
        request = self.request(before + now)
        self.step([(request, before)])
        return request

    def prepare(self, history: Sequence[tuple[int, int]]) -> list[tuple[Request, int]]:
        """Requests of (tokens before, tokens now); what is before goes through the backend, request by request."""
        rows = []
        for before, now in history:
            request = self.request(before + now)
            for count in (before // 2, before - before // 2):
                if count:
                    self.step([(request, count)])
            rows.append((request, now))
        return rows

    def expected(self, request: Request, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The right outputs of the latest ``count`` tokens of ``request``."""
        done = request.done
        keys, values = (self.stored(tensor[:done], which) for which, tensor in enumerate((request.k, request.v)))
        q = request.q[done - count : done]
        return attention(self.layer, q, keys, values, dtype=dtype, is_causal=self.setup.is_causal)
