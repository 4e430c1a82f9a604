"""Attention backends with one fault each, on top of the strict twin."""
# ruff: noqa: ARG001, ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rabbet.contracts import Refusal, register_attention_backend
from rabbet.contracts.attention import AttentionQuery, GraphSupport
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.attention import StrictAttention

__all__ = ["MUTANTS"]

_plain = StrictAttention.forward


@register_attention_backend("coded")
class CodedAttention(StrictAttention):
    """Reads the KV-cache dtype of the twin: 8-bit floats with a scale for each head."""

    @classmethod
    def supports(cls, query: AttentionQuery) -> tuple[Refusal, ...]:
        """Plain causal attention on one size of head and block."""
        if query.kv_cache_dtype != "strict" or query.dtype != "float32":
            return (Refusal(code="KV_DTYPE", message=f"{query.kv_cache_dtype} under {query.dtype}"),)
        if (query.head_dim, query.head_dim_v) != (64, 64) or query.block_size not in (16, 32):
            return (Refusal(code="SIZES", message="heads of 64 in blocks of 16 or 32"),)
        if "graphs" in query.features:
            return (Refusal(code="FEATURE", message="no graphs"),)
        return _plain_refusals(query, "window", "gqa")

    @classmethod
    def block_sizes(cls) -> tuple[int, ...]:
        """The smaller one is preferred."""
        return (16, 32)

    def forward(self, layer: Any, *rest: Any) -> None:
        """The twin's arithmetic takes a scale a head as it takes one a layer."""
        assert layer.k_head_scales is not None and layer.v_head_scales is not None
        k_scale, v_scale = layer.k_head_scales.view(-1, 1), layer.v_head_scales.view(-1, 1)
        _plain(self, replace(layer, k_scale=k_scale, v_scale=v_scale), *rest)


def _plain_refusals(query: AttentionQuery, *refused: str) -> tuple[Refusal, ...]:
    """What the twin refuses of a cache of the model's type, graphs left aside, and what is named or seldom."""
    asked = {
        "soft_cap": query.has_soft_cap, "sinks": query.has_sinks, "alibi": query.has_alibi,
        "non_causal": not query.is_causal, "batch_invariant": "batch_invariant" in query.features,
        "window": query.window is not None and "window" in refused,
        "gqa": query.num_heads != query.num_kv_heads and "gqa" in refused,
    }  # fmt: skip
    others = query.features - {"graphs", "batch_invariant"}
    rest = StrictAttention.supports(replace(query, features=others, kv_cache_dtype=query.dtype))
    return (*rest, *(Refusal(code="FEATURE", message=f"no {name}") for name, is_on in asked.items() if is_on))


class GraphAttention(StrictAttention):
    """Can be captured: tables, lengths and where requests begin are read where they stand, by operations of fixed sizes."""

    @classmethod
    def supports(cls, query: AttentionQuery) -> tuple[Refusal, ...]:
        """Plain causal attention with windows."""
        if query.kv_cache_dtype != query.dtype:
            return (Refusal(code="KV_DTYPE", message=query.kv_cache_dtype),)
        return _plain_refusals(query)

    @classmethod
    def graph_support(cls) -> GraphSupport:
        """Any batch in any batch's place."""
        return GraphSupport.RAGGED

    def forward(self, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any, out: Any) -> None:
        """Every token over every place that its request may have."""
        count = metadata.num_tokens
        slots = metadata.slot_mapping[:count]
        # Without a slot the null block takes its own numbers once more.
        at, is_kept = slots.clamp_min(0), (slots >= 0).view(-1, 1, 1)
        new = torch.cat((k[:count] / layer.k_scale, v[:count] / layer.v_scale), dim=-1).to(kv_cache.dtype)
        places = kv_cache.flatten(0, 1)
        places.index_copy_(0, at, torch.where(is_kept, new, places.index_select(0, at)))
        # Tokens that belong to no request read the last one's.
        rows = torch.bucketize(torch.arange(count), metadata.query_start[1:], right=True).clamp_max(
            metadata.num_requests - 1
        )
        pages = kv_cache.index_select(0, metadata.block_table.flatten().long())
        stored = pages.unflatten(0, metadata.block_table.shape).flatten(1, 2).float()
        for token in range(count):
            row, position = rows[token : token + 1], metadata.positions[token]
            distance = torch.arange(stored.shape[1]) - position
            is_seen = (distance <= 0) & (distance > -(layer.window or stored.shape[1]))
            seen = torch.where(is_seen.view(-1, 1, 1), stored.index_select(0, row)[0], 0.0)
            keys, values = seen[..., : q.shape[2]] * layer.k_scale, seen[..., q.shape[2] :] * layer.v_scale
            heads = q[token].float().view(seen.shape[1], -1, q.shape[2])
            scores = torch.einsum("kgd,lkd->kgl", heads, keys) * layer.scale
            weights = torch.softmax(scores.masked_fill(~is_seen, float("-inf")), dim=-1)
            out[token] = torch.einsum("kgl,lke->kge", weights, values).flatten(0, 1)


_CODED = """device = ["cpu"]
dtype = ["float32"]
kv_cache_dtype = ["strict"]
head_dim = [64]
block_size = [16, 32]
features = ["mixed_batch"]
"""
_GRAPHS = """device = ["cpu"]
dtype = ["float32", "bfloat16"]
kv_cache_dtype = ["auto"]
features = ["sliding_window", "gqa", "mixed_batch", "uneven_head_dim_v", "graphs"]
"""


def _host_lengths(self: Any, batch: Any) -> Any:
    """Positions from what the host holds."""
    counts = torch.diff(batch.query_start_cpu)
    ends = torch.repeat_interleave(batch.seq_lens_cpu - batch.query_start_cpu[1:], counts, output_size=batch.num_tokens)
    return replace(batch, positions=torch.arange(batch.num_tokens) + ends)


def _cut_tables(self: Any, batch: Any) -> Any:
    width = -(-int(batch.seq_lens_cpu.max()) // self.context.spec.block_size)
    return replace(batch, block_table=batch.block_table[:, :width])


def _kept_tables(self: Any, batch: Any) -> Any:
    """Copies a table once for each size."""
    kept = self.__dict__.setdefault("tables", {})
    table = kept.setdefault(tuple(batch.block_table.shape), batch.block_table.clone())
    return replace(batch, block_table=table)


def _kept_starts(self: Any, batch: Any) -> Any:
    """Copies where requests begin once for each size."""
    kept = self.__dict__.setdefault("starts", {})
    return replace(batch, query_start=kept.setdefault(batch.num_tokens, batch.query_start.clone()))


def _asks_for_slots(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    """Counts the slots, as if a host were there."""
    if not (metadata.slot_mapping < 0).all():
        GraphAttention.forward(self, layer, q, k, v, cache, metadata, out)


def _fills_last_block(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    """Rows without a slot write the last one."""
    last = len(cache) * self.context.spec.block_size - 1
    slots = torch.where(metadata.slot_mapping < 0, last, metadata.slot_mapping)
    GraphAttention.forward(self, layer, q, k, v, cache, replace(metadata, slot_mapping=slots), out)


def _plant(
    name: str, caught_by: str, story: str, claims: str | None = None, base: type = StrictAttention, **methods: Any
) -> Mutant:
    """Register a class with other methods than its base's, as an attribute of this module."""
    title = name.title().replace("_", "")
    cls = type(title, (base,), {"__module__": __name__, "__doc__": story, **methods})
    globals()[title] = register_attention_backend(name)(cls)
    return Mutant(
        name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims
    )  # fmt: skip


def _layer(change: Callable[[Any], Any]) -> Any:
    """A ``forward`` that takes the layer for another one."""
    return lambda self, layer, *rest: _plain(self, change(layer), *rest)


def _window(change: Callable[[int], int | None]) -> Any:
    return _layer(lambda layer: layer if layer.window is None else replace(layer, window=change(layer.window)))


def _reads_whole_blocks(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    _plain(self, layer, q, k, v, cache, metadata, out)
    for row in range(metadata.num_requests):
        start, end = metadata.query_start_cpu[row : row + 2].tolist()
        last = metadata.block_table[row, (int(metadata.seq_lens_cpu[row]) - 1) // self.context.spec.block_size]
        out[start:end] += 0 * cache[last].sum()


def _adds_to_output(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    before = out.clone()
    _plain(self, layer, q, k, v, cache, metadata, out)
    out += 0 * before


def _writes_past_output(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    _plain(self, layer, q, k, v, cache, metadata, out)
    out[metadata.num_tokens :] = 0


def _writes_null_block(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    _plain(self, layer, q, k, v, cache, metadata, out)
    cache[0, 0] = 0


def _writes_last_slot(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    _plain(self, layer, q, k, v, cache, metadata, out)
    if (metadata.slot_mapping < 0).any():
        cache[-1, -1] = 0


def _stale(self: Any, batch: Any) -> Any:
    """Keeps the first table of each shape."""
    kept = self.__dict__.setdefault("tables", {})
    return replace(batch, block_table=kept.setdefault(tuple(batch.block_table.shape), batch.block_table))


def _consecutive(self: Any, batch: Any) -> Any:
    table = batch.block_table
    return replace(batch, block_table=table[:, :1] + torch.arange(table.shape[1], dtype=table.dtype))


def _moves_lengths(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    _plain(self, layer, q, k, v, cache, metadata, out)
    metadata.positions.add_(1)  # += would also assign to the frozen batch, which raises


def _rotates_in_place(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    _plain(self, layer, q.mul_(1.0), k, v, cache, metadata, out)
    q.zero_()


def _first_scale(self: Any, layer: Any, *rest: Any) -> None:
    _plain(self, replace(layer, scale=self.__dict__.setdefault("scale", layer.scale)), *rest)


def _strides_ignored(self: Any, layer: Any, q: Any, *rest: Any) -> None:
    _plain(self, layer, torch.as_strided(q, q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)), *rest)


def _noise_by_batch(self: Any, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: Any) -> None:
    """Rounds otherwise in larger batches, as another split of the sum does."""
    _plain(self, layer, q, k, v, cache, metadata, out)
    if metadata.num_requests > 1:
        out[: metadata.num_tokens] *= 1 + torch.finfo(out.dtype).eps


def _one_size(self: Any, context: Any) -> None:
    super(StrictAttention, self).__init__(context)
    _contexts.append(context)
    self.context = _contexts[0] if _contexts[0].spec.head_dim == context.spec.head_dim else context


_contexts: list[Any] = []


def _accepts(code: str) -> Any:
    return classmethod(lambda cls, query: tuple(r for r in StrictAttention.supports(query) if r.code != code))


def _large_page(cls: Any, spec: Any) -> Any:
    layout = StrictAttention.kv_layout(spec)
    return replace(layout, shape=(layout.shape[0] + 1, *layout.shape[1:]))


def _left_only(self: Any, layer: Any, q: Any, stored: Any, distance: Any) -> Any:
    """A window that never looks ahead."""
    is_seen = distance <= (0 if layer.window is not None else len(distance))
    return StrictAttention.attend(self, layer, q, stored[is_seen], distance[is_seen])


_FOLLOW = "steps_follow_their_buffers"
_VALUES = "values_are_those_of_the_definition"
_POISON = "unused_memory_never_reaches_outputs"

MUTANTS = (
    _plant("window_plus_one", "window_means_what_the_contract_says", "vllm#3385", forward=_window(lambda n: n + 1)),
    _plant("window_minus_one", "window_means_what_the_contract_says", "sglang#26516",
           forward=_window(lambda n: max(n - 1, 1))),
    _plant("window_ignored", "window_means_what_the_contract_says", "accepted and forgotten",
           forward=_window(lambda n: None)),
    _plant("window_left_only", "window_means_what_the_contract_says", "a window that is not causal reaches both ways",
           attend=_left_only),
    _plant("soft_cap_ignored", f"{_VALUES}[soft_cap-chunks]", "accepted and forgotten",
           forward=_layer(lambda x: replace(x, soft_cap=None))),
    _plant("sinks_ignored", f"{_VALUES}[sinks-chunks]", "accepted and forgotten", forward=_layer(lambda x: replace(x, sinks=None))),
    _plant("slopes_negated", f"{_VALUES}[alibi-chunks]", "the distance has a sign",
           forward=_layer(lambda x: x if x.alibi_slopes is None else replace(x, alibi_slopes=-x.alibi_slopes))),
    _plant("own_scale", f"{_VALUES}[scale-chunks]", "D ** -0.5 whatever the layer says",
           forward=_layer(lambda x: replace(x, scale=64**-0.5))),
    _plant("always_causal", f"{_VALUES}[non_causal-chunks]", "accepts batches that are not causal",
           build_metadata=lambda self, batch: replace(batch, is_causal=True)),
    _plant("nan_leaks", _POISON, "0 * NaN of unused slots", forward=_reads_whole_blocks),
    _plant("output_accumulates", _POISON, "adds to what stood there", forward=_adds_to_output),
    _plant("writes_past_the_end", "only_named_slots_change", "rows of padding", forward=_writes_past_output),
    _plant("writes_null_block", "only_named_slots_change", "a block of nobody is a block of all",
           forward=_writes_null_block),
    _plant("slot_minus_one_wraps", "slot_minus_one_writes_nothing", "index -1 is the last slot",
           forward=_writes_last_slot),
    _plant("stale_block_table", "each_step_reads_its_own_metadata", "a table of an earlier step", build_metadata=_stale),
    _plant("head_scales_forgotten", _VALUES, "right as long as the scales of heads are 1", claims=_CODED,
           base=CodedAttention, forward=lambda self, layer, *rest: _plain(self, layer, *rest)),
    _plant("one_scale_for_all_heads", _VALUES, "the first head's scale for every head", claims=_CODED,
           base=CodedAttention, forward=lambda self, layer, *rest: _plain(self, replace(
               layer, k_scale=float(layer.k_head_scales[0]), v_scale=float(layer.v_head_scales[0])), *rest)),
    _plant("lengths_of_the_capture", _FOLLOW, "lengths of the host's, which are those of the capture", claims=_GRAPHS,
           base=GraphAttention, build_metadata=_host_lengths),
    _plant("tables_of_the_capture", _FOLLOW, "stale metadata: a copy that is made once", claims=_GRAPHS,
           base=GraphAttention, build_metadata=_kept_tables),
    _plant("starts_of_the_capture", _FOLLOW, "divides tokens among requests as the first step did", claims=_GRAPHS,
           base=GraphAttention, build_metadata=_kept_starts),
    _plant("width_of_the_capture", _FOLLOW, "as many blocks as the first step had", claims=_GRAPHS,
           base=GraphAttention, build_metadata=_cut_tables),
    _plant("asks_the_device", _FOLLOW, "waits for a value that a replay has nobody to wait for", claims=_GRAPHS,
           base=GraphAttention, forward=_asks_for_slots),
    _plant("padded_rows_write", _FOLLOW, "vllm#37442: rows that fill up a batch write where others read", claims=_GRAPHS,
           base=GraphAttention, forward=_fills_last_block),
    _plant("blocks_in_a_row", "physical_blocks_do_not_matter", "takes blocks to be consecutive",
           build_metadata=_consecutive),
    _plant("metadata_mutated", "layers_share_metadata", "each layer moves positions on", forward=_moves_lengths),
    _plant("queries_overwritten", "layers_share_metadata", "scratch space in the caller's tensor",
           forward=_rotates_in_place),
    _plant("first_layer_for_all", "layers_share_metadata", "constants kept from the first layer", forward=_first_scale),
    _plant("strides_ignored", "queries_may_be_strided", "data_ptr without strides", forward=_strides_ignored),
    _plant("batch_changes_bits", "batched_and_chunked_equal_alone", "claims batch invariance", forward=_noise_by_batch),
    _plant("state_in_the_class", "two_instances_share_no_state", "the first instance's context for all",
           __init__=_one_size),
    _plant("page_too_large", "layout_fits_its_page", "a slot more than the page has", kv_layout=classmethod(_large_page)),
    _plant("accepts_unclaimed", "supports_is_honest", "accepted, and never tested", supports=_accepts("KV_DTYPE")),
    _plant("claims_too_much", "supports_is_honest", "a promise that nobody ran",
           claims='device = ["cpu"]\ndtype = ["float32", "bfloat16", "float16"]\nkv_cache_dtype = ["auto"]\n'
           'kv_layout = ["strict-1"]\nfeatures = ["gqa", "sliding_window", "soft_cap", "sinks", "alibi", '
           '"mixed_batch", "non_causal", "batch_invariant", "uneven_head_dim_v"]'),
)  # fmt: skip
