"""The attention backend ``triton``: one batch is divided into requests with few query tokens and tiles of chunks.

Shapes: T tokens, B requests, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rabbet.contracts import Refusal, register_attention_backend
from rabbet.contracts.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayerSpec,
    AttentionQuery,
    GraphSupport,
    KVLayout,
)
from rabbet.types.kv import KVCacheSpec
from rabbet_attention_triton.amd import amd_shape

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.batch import AttentionBatch

__all__ = ["TritonAttention"]

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_HEAD_DIM = 256
_LOG2E = 1.4426950408889634
_MAX_SPLITS = 64
_SHORTEST = 64
"""Keys that a split has at least: fewer cost more in adding up than they gain."""
_PROGRAMS = 8
"""Programs of a decode for each processor, two of which run at a time."""
_DECODE_OPTIONS = {"num_warps": 4, "num_stages": 3}
_MOST_ROWS = 64
"""Rows of a decode tile: query tokens of a request times heads of a group."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's batch, divided.

    Attributes:
        batch: The batch.
        num_decodes: Requests with few query tokens.
        decode_list: Which they are, or None: all, in order.
        decode_rows: Rows of a decode tile.
        splits: Programs a head of a decode.
        num_tiles: Tiles of the other requests.
        tiles: int32 [2, tiles]: their requests and first query tokens; None: each finds its own.
        stores: Whether decodes put keys and values into the cache themselves.
    """

    batch: AttentionBatch
    num_decodes: int
    decode_list: torch.Tensor | None
    decode_rows: int
    splits: int
    num_tiles: int
    tiles: torch.Tensor | None
    stores: bool = False


@register_attention_backend("triton")
class TritonAttention(AttentionBackend):
    """Paged attention for chunks, decodes and drafts in one batch."""

    @classmethod
    def supports(cls, query: AttentionQuery) -> tuple[Refusal, ...]:
        """Caches of the model's type, causal, head sizes up to 256 in steps of 16, blocks of 16 or more."""
        refusals = []

        def refuse(code: str, message: str, fix: str = "") -> None:
            refusals.append(Refusal(code=code, message=message, fix=fix))

        if query.device_type != "cuda":
            refuse("DEVICE", f"runs on cuda, not on {query.device_type}")
        if query.dtype not in _DTYPES:
            refuse("DTYPE", f"{query.dtype}; {', '.join(_DTYPES)} are supported", "--dtype bfloat16")
        if query.kv_cache_dtype != query.dtype:
            refuse("KV_DTYPE", f"a {query.kv_cache_dtype} cache under {query.dtype}", "--kv-cache-dtype auto")
        if query.head_dim != query.head_dim_v:
            refuse("HEAD_DIM", f"key heads of {query.head_dim} and value heads of {query.head_dim_v}")
        if query.head_dim > _MAX_HEAD_DIM or query.head_dim % 16:
            refuse("HEAD_DIM", f"{query.head_dim}; multiples of 16 up to {_MAX_HEAD_DIM} are supported")
        if query.num_heads % max(query.num_kv_heads, 1):
            refuse("HEADS", f"{query.num_heads} query heads over {query.num_kv_heads} key heads")
        elif query.num_heads // max(query.num_kv_heads, 1) > _MOST_ROWS:
            refuse("HEADS", f"more than {_MOST_ROWS} query heads share a key head")
        if query.block_size % 16:
            refuse("BLOCK_SIZE", f"{query.block_size}; multiples of 16 are supported", "--block-size 16")
        if not query.is_causal:
            refuse("CAUSAL", "attention that is not causal is not implemented")
        known = {"mixed_batch", "sliding_window", "soft_cap", "sinks", "gqa", "alibi", "graphs"}
        for feature in sorted(query.features - known):
            refuse("FEATURE", f"{feature} is not implemented")
        return tuple(refusals)

    @classmethod
    def kv_layout(cls, spec: KVCacheSpec) -> KVLayout:
        """Keys before values, heads outside of slots."""
        return KVLayout(
            name="hsd-1",
            axes=("kv", "head", "slot", "dim"),
            shape=(2, spec.num_kv_heads, spec.block_size, spec.head_dim),
            dtype=spec.dtype,
        )

    @classmethod
    def block_sizes(cls) -> tuple[int, ...]:
        """Any multiple of 16."""
        return (16,)

    @classmethod
    def graph_support(cls) -> GraphSupport:
        """All: everything that depends on the step is read on the device."""
        return GraphSupport.RAGGED

    def __init__(self, context: AttentionContext) -> None:
        """See ``AttentionBackend``."""
        import torch
        import triton

        from rabbet_attention_triton import launches

        super().__init__(context)
        self._launches = launches
        query = context.query
        self._group = query.num_heads // query.num_kv_heads
        self._width = max(16, int(triton.next_power_of_2(query.head_dim)))
        self._columns = 64 if self._width <= 128 else 32
        if query.dtype == "float32":
            self._columns = 32
        self._amd = amd_shape(query.arch)
        if self._amd is not None:
            self._columns = min(self._columns, self._amd.columns)
        device = context.device
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most_rows = max(16, int(triton.next_power_of_2(self._group)))
        self._hopper = launches.hopper_shape(device, query.dtype, query.head_dim, self._group, query.block_size)
        # Sums of splits: as many programs as fill the device a few times over need them at once.
        self._most_partials = max(
            2 * _PROGRAMS * self._processors + query.num_kv_heads, 2 * _MAX_SPLITS * query.num_kv_heads
        )
        self._partial = torch.empty(self._most_partials * _MOST_ROWS * self._width, dtype=torch.float32, device=device)
        self._marks = torch.empty(self._most_partials * _MOST_ROWS * 2, dtype=torch.float32, device=device)
        count = max(context.max_num_requests, 1) * query.num_kv_heads
        self._counters = torch.zeros(count, dtype=torch.int32, device=device)

    def _splits(self, num_requests: int) -> int:
        """Programs a head: so many that the last ones to run leave little of the device idle, and their sums find room."""
        heads = num_requests * self.context.query.num_kv_heads
        wanted = min(_MAX_SPLITS, -(-_PROGRAMS * self._processors // heads), self._most_partials // heads)
        return 1 << (int(max(wanted, 1)).bit_length() - 1)

    def build_metadata(self, batch: AttentionBatch) -> _Step:
        """Divide the batch.

        Raises:
            ValueError: If the step is not causal, which ``supports`` has refused.
        """
        import numpy as np
        import torch

        if not batch.is_causal:
            raise ValueError("attention/triton: is_causal is False; this backend computes causal attention only")
        rows, splits = self._most_rows, self._splits(batch.num_requests)
        if batch.is_ragged:
            # Every request may turn out to be either; chunks, which have more tokens than a decode, end in a tile that is not full.
            most_chunks = min(batch.num_requests, batch.num_tokens // (rows // self._group + 1))
            num_tiles = batch.num_tokens // (self._chunk_rows() // self._group) + most_chunks
            return _Step(batch, batch.num_requests, None, rows, splits, num_tiles, None)
        if batch.max_query_len * self._group <= rows:
            return _Step(batch, batch.num_requests, None, rows, splits, 0, None, stores=True)
        counts = np.diff(batch.query_start_cpu[: batch.num_requests + 1].numpy())
        is_decode = counts * self._group <= self._most_rows
        decodes = np.nonzero(is_decode & (counts > 0))[0].astype(np.int32)
        # Long tiles first: a tile of many keys that starts last would be waited for alone.
        rest = np.nonzero(~is_decode)[0]
        step = self._chunk_rows() // self._group
        requests = np.repeat(rest, -(-counts[rest] // step))
        starts = np.concatenate([np.arange(0, counts[request], step) for request in rest])
        seen = batch.seq_lens_cpu.numpy()[requests] - counts[requests] + starts
        order = np.argsort(-seen, kind="stable")
        numbers = np.concatenate((decodes, requests[order], starts[order])).astype(np.int32)
        moved = torch.from_numpy(numbers).to(batch.query_start.device, non_blocking=True)
        num_decodes, num_tiles = len(decodes), len(requests)
        splits = self._splits(num_decodes) if num_decodes else 1
        return _Step(
            batch, num_decodes, moved[:num_decodes], rows, splits, num_tiles,
            moved[num_decodes:].view(2, num_tiles),
        )  # fmt: skip

    def _chunk_rows(self) -> int:
        """Rows of a chunk's tile."""
        if self.context.query.dtype == "float32":
            return max(32, self._most_rows)
        rows = 128 if self._width <= 128 else 64
        return max(rows if self._amd is None else min(rows, self._amd.chunk_rows), self._most_rows)

    def _chunk_options(self, rows: int) -> Mapping[str, int]:
        """Of the launch of tiles with so many rows."""
        if self._amd is not None:
            return self._amd.chunk
        return {"num_warps": 8 if rows >= 128 else 4, "num_stages": 2 if self._width * self._columns > 8192 else 3}

    def forward(
        self,
        layer: AttentionLayerSpec,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKE: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: _Step,
        out_THE: torch.Tensor,
    ) -> None:
        """See ``AttentionBackend``."""
        batch, query = metadata.batch, self.context.query
        num_kv_heads, head_dim, block_size = query.num_kv_heads, query.head_dim, kv_cache.shape[3]
        page, dependent = kv_cache.stride(0), self._launches.dependence(q_THD, is_small=batch.num_tokens == 1)
        strides = (k_TKD.stride(0), k_TKD.stride(1), v_TKE.stride(0), v_TKE.stride(1))
        # Where all requests have few tokens one launch does everything.
        stores = metadata.stores
        if not stores:
            heads = 1 << (num_kv_heads - 1).bit_length()
            self._launches.store(
                (batch.num_tokens, 1, 1), k_TKD, v_TKE, kv_cache, batch.slot_mapping, *strides, page,
                num_kv_heads, block_size, head_dim, heads, self._width, dependent, num_warps=4,
            )  # fmt: skip
        flags = (
            layer.window is not None, layer.soft_cap is not None, layer.sinks is not None, layer.alibi_slopes is not None,
        )  # fmt: skip
        # A pointer is needed where there is nothing to point at.
        sinks = layer.sinks if layer.sinks is not None else self._marks
        slopes = layer.alibi_slopes if layer.alibi_slopes is not None else self._marks
        shared = (
            page, batch.block_table.stride(0), layer.scale * _LOG2E, layer.window or 0, float(layer.soft_cap or 0.0),
        )  # fmt: skip
        if metadata.num_decodes:
            listed = metadata.decode_list
            self._launches.decode(
                (metadata.num_decodes, num_kv_heads, metadata.splits),
                q_THD, kv_cache, out_THE, self._partial, self._marks, self._counters,
                batch.query_start if listed is None else listed, batch.query_start, batch.seq_lens, batch.block_table,
                sinks, slopes, k_TKD, v_TKE, batch.slot_mapping, metadata.splits, q_THD.stride(0), q_THD.stride(1),
                *strides, *shared,
                num_kv_heads, self._group, block_size, head_dim, metadata.decode_rows, self._width, self._columns,
                _MAX_SPLITS if metadata.splits > 1 else 1, _SHORTEST, *flags, listed is not None, stores, dependent,
                **(_DECODE_OPTIONS if self._amd is None else self._amd.decode),
            )  # fmt: skip
        if metadata.num_tiles:
            rows, tiles = self._chunk_rows(), metadata.tiles
            # Its programs walk a list of tiles, which a captured step of any shape has not.
            if tiles is not None and self._hopper is not None and self._launches.chunk_on_hopper(
                self._hopper, out_THE, q_THD, kv_cache,
                (tiles[0], tiles[1], batch.query_start, batch.seq_lens, batch.block_table, sinks, slopes),
                programs=self._processors, tiles=metadata.num_tiles * num_kv_heads, most_keys=batch.max_seq_len,
                sizes=(num_kv_heads, self._group, block_size, head_dim), numbers=shared[1:], flags=flags,
                dependent=dependent,
            ):  # fmt: skip
                return
            first, second = (batch.query_start, batch.query_start) if tiles is None else tiles
            self._launches.chunk(
                (num_kv_heads, metadata.num_tiles, 1),
                q_THD, kv_cache, out_THE, first, second, batch.query_start, batch.seq_lens,
                batch.block_table, sinks, slopes, batch.num_requests, q_THD.stride(0), q_THD.stride(1), *shared,
                num_kv_heads, self._group, block_size, head_dim, rows, self._width, self._columns,
                1 << (batch.num_requests - 1).bit_length() if tiles is None else 1, metadata.decode_rows, *flags,
                tiles is not None, dependent,
                **self._chunk_options(rows),
            )  # fmt: skip
