"""The attention backend ``cpu``: compiled kernels where there are some, plain torch otherwise.

Shapes: T tokens, B requests, H query heads, K key/value heads, D head size, S slots of a block.

A block's page is [2, K, S, D], keys before values. The order inside a head's part of it is the kernel's choice, named by
the layout:

* ``pairs-1`` (bfloat16 on matrix tiles): keys as [S / 16] x [D / 2] rows of 16 slots x 2 dims, values as [S / 32] x
  [D / 16] x 16 rows of 16 dims x 2 slots: the form in which a tile product takes them.
* ``columns-1`` (other compiled kernels): keys as [S / 16] x [D] rows of 16 slots, values as [S] x [D].
* ``hsd-1`` (plain torch): both as [S] x [D].
"""

from __future__ import annotations

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
from rabbet_hw_cpu import native

if TYPE_CHECKING:
    import torch

    from rabbet.contracts.batch import AttentionBatch

__all__ = ["CpuAttention", "attend_reference", "is_packed", "store_reference"]

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's batch, and the pointers that the kernel takes."""

    batch: AttentionBatch
    arguments: native.StepArguments | None


@register_attention_backend("cpu")
class CpuAttention(AttentionBackend):
    """Paged attention for chunks, decodes and drafts in one call."""

    @classmethod
    def supports(cls, query: AttentionQuery) -> tuple[Refusal, ...]:
        """float32 and bfloat16 caches of the model's type, causal, head sizes up to 256 in steps of 16."""
        refusals = []

        def refuse(code: str, message: str, fix: str = "") -> None:
            refusals.append(Refusal(code=code, message=message, fix=fix))

        if query.device_type != "cpu":
            refuse("DEVICE", f"runs on cpu, not on {query.device_type}")
        if query.dtype not in ("float32", "bfloat16"):
            refuse("DTYPE", f"{query.dtype}; float32 and bfloat16 are supported", "--dtype bfloat16")
        if query.kv_cache_dtype != query.dtype:
            refuse("KV_DTYPE", f"a {query.kv_cache_dtype} cache under {query.dtype}", "--kv-cache-dtype auto")
        if query.head_dim != query.head_dim_v:
            refuse("HEAD_DIM", f"key heads of {query.head_dim} and value heads of {query.head_dim_v}")
        if query.head_dim > _MAX_HEAD_DIM or query.head_dim % 16:
            refuse("HEAD_DIM", f"{query.head_dim}; multiples of 16 up to {_MAX_HEAD_DIM} are supported")
        if query.num_heads % max(query.num_kv_heads, 1):
            refuse("HEADS", f"{query.num_heads} query heads over {query.num_kv_heads} key heads")
        if query.block_size % 16:
            refuse("BLOCK_SIZE", f"{query.block_size}; multiples of 16 are supported", "--block-size 16")
        if query.has_alibi:
            refuse("ALIBI", "ALiBi slopes are not implemented")
        if not query.is_causal:
            refuse("CAUSAL", "attention that is not causal is not implemented")
        if "graphs" in query.features and native.library() is None:
            refuse("MISSING_LIBRARY", "graphs need the compiled kernels, which were not built", "reinstall with a C++ compiler")
        for feature in sorted(query.features - {"mixed_batch", "sliding_window", "soft_cap", "sinks", "gqa", "graphs"}):
            refuse("FEATURE", f"{feature} is not implemented")
        return tuple(refusals)

    @classmethod
    def kv_layout(cls, spec: KVCacheSpec) -> KVLayout:
        """See the module's first lines."""
        name = "pairs-1" if is_packed(spec) else "hsd-1" if native.library() is None else "columns-1"
        return KVLayout(
            name=name,
            # Kernels store keys by columns or pairs: no axis counts slots then, and nobody may slice by one.
            axes=("kv", "head", "slot" if name == "hsd-1" else "packed_slot", "dim"),
            shape=(2, spec.num_kv_heads, spec.block_size, spec.head_dim),
            dtype=spec.dtype,
        )

    @classmethod
    def block_sizes(cls) -> tuple[int, ...]:
        """Any multiple of 16; 32 suits the tiles."""
        return (32, 16)

    @classmethod
    def graph_support(cls) -> GraphSupport:
        """All: the compiled kernels read everything where it stands at each run. Plain torch does on the host."""
        return GraphSupport.NEVER if native.library() is None else GraphSupport.RAGGED

    def __init__(self, context: AttentionContext) -> None:
        """See ``AttentionBackend``."""
        super().__init__(context)
        self._is_packed = is_packed(context.spec)

    def build_metadata(self, batch: AttentionBatch) -> _Step:
        """The batch, with its pointers.

        Raises:
            ValueError: If the step is not causal, which ``supports`` has refused.
        """
        if not batch.is_causal:
            raise ValueError("attention/cpu: is_causal is False; this backend computes causal attention only")
        return _Step(batch, native.step_arguments(batch))

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
        if metadata.arguments is None:
            store_reference(k_TKD, v_TKE, kv_cache, metadata.batch)
            attend_reference(layer, q_THD, kv_cache, metadata.batch, out_THE)
            return
        tensors = (q_THD, k_TKD, v_TKE, kv_cache, out_THE)
        block_size = self.context.spec.block_size
        native.attention(layer, tensors, metadata.arguments, block_size=block_size, is_packed=self._is_packed)


def is_packed(spec: KVCacheSpec) -> bool:
    """Whether the cache of ``spec`` is kept in tile order."""
    return spec.dtype == "bfloat16" and spec.block_size % 32 == 0 and spec.head_dim % 32 == 0 and native.has_amx()


def store_reference(k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch) -> None:
    """Write keys and values to their slots of the layout ``hsd-1``; slots of -1 are skipped."""
    slots = batch.slot_mapping[: batch.num_tokens]
    if (slots < 0).any():
        kept = (slots >= 0).nonzero().squeeze(1)
        slots, k_TKD, v_TKD = slots[kept], k_TKD[kept], v_TKD[kept]
    block_size = kv_cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    count = slots.shape[0]
    kv_cache[blocks, 0, :, offsets] = k_TKD[:count]
    kv_cache[blocks, 1, :, offsets] = v_TKD[:count]


def attend_reference(
    layer: AttentionLayerSpec,
    q_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionBatch,
    out_THD: torch.Tensor,
) -> None:
    """Request by request, with the scores in float32; the cache in the layout ``hsd-1``."""
    import torch

    starts, lengths = batch.query_start_cpu.tolist(), batch.seq_lens_cpu.tolist()
    block_size = kv_cache.shape[3]
    num_heads, num_kv_heads = q_THD.shape[1], kv_cache.shape[2]
    for index in range(batch.num_requests):
        start, end, length = starts[index], starts[index + 1], lengths[index]
        if end == start:
            continue
        first = 0 if layer.window is None else max(0, length - (end - start) - layer.window + 1) // block_size
        blocks = batch.block_table[index, first : -(-length // block_size)].long()
        pages = (
            kv_cache[blocks].transpose(0, 1).transpose(1, 2).flatten(2, 3)[:, :, : length - first * block_size].float()
        )
        q = q_THD[start:end].float().view(end - start, num_kv_heads, num_heads // num_kv_heads, -1)
        scores = torch.einsum("qkgd,kld->kgql", q, pages[0]) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        keys = torch.arange(first * block_size, length)
        queries = torch.arange(length - (end - start), length).unsqueeze(1)
        hidden = keys > queries
        if layer.window is not None:
            hidden |= keys <= queries - layer.window
        scores.masked_fill_(hidden, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, end - start, 1)
            weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        values = pages[1]
        out = torch.einsum("kgql,kld->qkgd", weights, values)
        out_THD[start:end] = out.reshape(end - start, num_heads, -1).to(out_THD.dtype)
