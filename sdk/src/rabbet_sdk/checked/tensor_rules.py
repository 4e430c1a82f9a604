"""Rules of what computes on tensors: shapes, inputs left alone, no NaN out of none, memory that is not the plugin's.

torch is imported by the rules only: front-end plugins are checked where there is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from rabbet_sdk.checked.proxy import Call, rule

__all__ = ["changed", "snapshot"]

_MAX_BLOCKS = 64
"""Blocks of a KV cache whose bytes are compared around a call."""
_DEPTH = 3


def snapshot(value: Any, place: str = "", depth: int = _DEPTH) -> dict[str, tuple[Any, Any]]:
    """Every tensor within dataclasses, mappings, lists and objects, with a copy of it, by where it stands."""
    import torch

    if isinstance(value, torch.Tensor):
        return {place: (value, value.clone())}
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float | type):
        return {}
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif dataclasses.is_dataclass(value):
        items = [(item.name, getattr(value, item.name, None)) for item in dataclasses.fields(value)]
    else:
        items = list(vars(value).items()) if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") else []
    found: dict[str, tuple[Any, Any]] = {}
    for key, item in items:
        found |= snapshot(item, f"{place}.{key}" if place else str(key), depth - 1)
    return found


def changed(before: dict[str, tuple[Any, Any]]) -> list[str]:
    """Places whose tensors no longer hold the same bytes."""
    return [place for place, (tensor, copy) in before.items() if not _same(tensor, copy)]


def _same(one: Any, other: Any) -> bool:
    """Bit by bit, so that NaN equals itself."""
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)) if one.dim() else (
        torch.equal(one.reshape(1).view(torch.uint8), other.reshape(1).view(torch.uint8))
    )  # fmt: skip


def _alone(call: Call, before: dict[str, tuple[Any, Any]]) -> None:
    call.require(not (places := changed(before)), "inputs are left alone", f"it changed {', '.join(places)}")


def _is_clean(tensor: Any) -> bool:
    return not tensor.dtype.is_floating_point or bool(tensor.isfinite().all())


def _like(call: Call, result: Any, x: Any, shape: tuple[int | None, ...], *, is_clean: bool) -> None:
    """``result`` has the shape (None: any size) and x's dtype and device, and is NaN nowhere if what went in was finite."""
    fits = result.dim() == len(shape) and all(
        want in (None, have) for have, want in zip(result.shape, shape, strict=True)
    )
    wanted = f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
    call.require(fits, "shape of the result", f"{list(result.shape)}, not {wanted}")
    same = (result.dtype, result.device) == (x.dtype, x.device)
    call.require(
        same, "dtype of the result", f"{result.dtype} on {result.device} for an input of {x.dtype} on {x.device}"
    )
    call.require(
        not is_clean or not bool(result.isnan().any()), "no NaN", "NaN comes out, though inputs and weights are finite"
    )


# ---- attention


@rule("AttentionBackend", "graph_support")
def _no_graphs(call: Call) -> Generator[None, Any, Any]:  # noqa: ARG001
    """Checks look at values, which a captured step cannot."""
    from rabbet.contracts.attention import GraphSupport

    yield
    return GraphSupport.NEVER


@rule("AttentionBackend", "kv_layout")
def _layout(call: Call) -> Generator[None, Any, None]:
    import torch

    layout = yield
    spec = call.arguments["spec"]
    size = torch.empty(layout.shape, dtype=getattr(torch, layout.dtype), device="meta")
    used = size.numel() * size.element_size()
    call.require(
        used <= spec.page_size_bytes, "a block fits its page", f"{used} bytes, the page has {spec.page_size_bytes}"
    )
    call.require(len(layout.axes) == len(layout.shape), "axes name the shape", f"{layout.axes} for {layout.shape}")


@rule("AttentionBackend", "__init__")
def _context(call: Call) -> Generator[None, Any, None]:
    yield
    context = call.arguments["context"]
    call.notes.update(context=context, layout=type(call.plugin).kv_layout(context.spec))


@rule("AttentionBackend", "build_metadata")
def _metadata(call: Call) -> Generator[None, Any, None]:
    batch = call.arguments["batch"]
    before = snapshot(batch)
    metadata = yield
    _alone(call, before)
    call.notes.update(batch=batch, metadata=metadata, kept=snapshot(metadata))


@rule("AttentionBackend", "forward")
def _attend(call: Call) -> Generator[None, Any, None]:
    import torch

    arguments, notes = call.arguments, call.notes
    batch, query, out = notes["batch"], notes["context"].query, arguments["out_THE"]
    num = batch.num_tokens
    call.expect(
        arguments["metadata"] is notes["metadata"], "metadata of the step", "not what build_metadata gave for this step"
    )
    for name, heads, size in (
        ("q_THD", query.num_heads, query.head_dim), ("k_TKD", query.num_kv_heads, query.head_dim),
        ("v_TKE", query.num_kv_heads, query.head_dim_v), ("out_THE", query.num_heads, query.head_dim_v),
    ):  # fmt: skip
        shape = tuple(arguments[name].shape)
        call.expect(shape[1:] == (heads, size) and shape[0] >= num, "shapes", f"{name} is {list(shape)}")
    inputs = {name: arguments[name][:num] for name in ("q_THD", "k_TKD", "v_TKE")}
    is_clean = all(_is_clean(tensor) for tensor in inputs.values())
    # A row before and a row after are not the plugin's, nor are rows past the tokens.
    buffer = torch.full((len(out) + 2, *out.shape[1:]), float("nan"), dtype=out.dtype, device=out.device)
    arguments["out_THE"] = buffer[1:-1]
    canaries = {"memory before out_THE": buffer[:1], "rows of out_THE past num_tokens": buffer[num + 1 :]}
    for tensor in canaries.values():
        tensor.fill_(3.25)
    _poison_unused(notes, arguments["kv_cache"], batch)
    before = snapshot(inputs) | snapshot(canaries) | _foreign_blocks(notes, arguments["kv_cache"], batch)
    yield
    out[:num].copy_(buffer[1 : num + 1])
    _alone(call, before | notes["kept"])
    bad = buffer[1 : num + 1].isnan().flatten(1).any(1).nonzero().flatten().tolist() if is_clean else []
    told = f"NaN in rows {bad[:4]} of out_THE: not written, added to, or read from unused slots of the cache"
    call.require(not bad, "no NaN", told)


def _slot_axis(notes: dict[Any, Any]) -> int | None:
    """Axis of the cache tensor that counts slots, if the layout names one of the block's size."""
    layout, size = notes["layout"], notes["context"].spec.block_size
    axis = layout.axes.index("slot") if "slot" in layout.axes else None
    return axis + 1 if axis is not None and layout.shape[axis] == size else None


def _poison_unused(notes: dict[Any, Any], cache: Any, batch: Any) -> None:
    """NaN into slots past each request's end: they may hold anything."""
    axis = _slot_axis(notes)
    if axis is None or not cache.dtype.is_floating_point:
        return
    size, slots = notes["context"].spec.block_size, cache.movedim(axis, 1)
    for row, length in enumerate(batch.seq_lens_cpu[: batch.num_requests].tolist()):
        if length % size:
            slots[int(batch.block_table[row, (length - 1) // size]), length % size :] = float("nan")


def _foreign_blocks(notes: dict[Any, Any], cache: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    """Parts of the cache near the written slots that the step must not change: the null block, the last one, neighbours,
    and where the layout names its slots the other slots of written blocks."""
    size = notes["context"].spec.block_size
    slots = batch.slot_mapping[: batch.num_tokens]
    written = sorted({slot // size for slot in slots.tolist() if slot >= 0})
    near = {0, len(cache) - 1} | {block + step for block in written[:_MAX_BLOCKS] for step in (-1, 1)}
    found: dict[str, tuple[Any, Any]] = {}
    for block in sorted(near - set(written)):
        if 0 <= block < len(cache):
            found |= snapshot(cache[block], f"block {block} of kv_cache")
    axis = _slot_axis(notes)
    for block in written[:_MAX_BLOCKS] if axis is not None else ():
        taken = {slot % size for slot in slots.tolist() if slot >= 0 and slot // size == block}
        view = cache.movedim(axis, 1)[block]
        for slot in sorted({min(taken) - 1, max(taken) + 1} - taken):
            if 0 <= slot < size:
                found |= snapshot(view[slot], f"slot {slot} in block {block} of kv_cache")
    return found


# ---- linear layers, experts, quantisation


@rule("LinearBackend", "pack")
def _pack(call: Call) -> Generator[None, Any, None]:
    weight = call.arguments["weight_OI"]
    facts = (weight.shape[0], _is_clean(weight))
    packed = yield
    call.notes[id(packed)] = facts


@rule("LinearBackend", "apply", "apply_gated_silu")
def _product(call: Call) -> Generator[None, Any, None]:
    x = call.arguments["x_TI"]
    rows, is_finite = call.notes.get(id(call.arguments["packed"]), (None, False))
    inputs = {"x_TI": x, "bias_O": call.arguments.get("bias_O")}
    before = snapshot(inputs)
    result = yield
    _alone(call, before)
    if result is not None:
        is_gated = call.method == "apply_gated_silu"
        size = rows // 2 if rows is not None and is_gated else rows
        is_clean = is_finite and all(_is_clean(item) for item in inputs.values() if item is not None)
        _like(call, result, x, (*x.shape[:-1], size), is_clean=is_clean)


@rule("MoEBackend", "apply")
def _experts(call: Call) -> Generator[None, Any, None]:
    x = call.arguments["x_TI"]
    before = snapshot({key: value for key, value in call.arguments.items() if key not in ("self", "packed")})
    result = yield
    _alone(call, before)
    _like(call, result, x, tuple(x.shape), is_clean=False)


@rule("QuantizationConfig", "get_quant_method")
def _layer_kind(call: Call) -> Generator[None, Any, None]:
    from rabbet.contracts import quantization
    from rabbet.layers import Attention, FusedMoE, LinearBase, VocabParallelEmbedding

    method = yield
    layer = call.arguments["layer"]
    for cls, wanted in (
        (LinearBase, quantization.LinearMethod), (FusedMoE, quantization.FusedMoEMethod),
        (VocabParallelEmbedding, quantization.EmbeddingMethod), (Attention, quantization.KVCacheMethod),
    ):  # fmt: skip
        if method is not None and isinstance(layer, cls):
            told = f"{type(method).__name__} for {call.arguments['prefix']}, which needs a {wanted.__name__}"
            call.require(isinstance(method, wanted), "the method fits the layer", told)


@rule("LinearMethod", "create_weights")
@rule("FusedMoEMethod", "create_weights")
@rule("EmbeddingMethod", "create_weights")
def _create(call: Call) -> Generator[None, Any, None]:
    layer = call.arguments["layer"]
    before = set(dict(layer.named_parameters(recurse=False)))
    yield
    made = {name: item for name, item in layer.named_parameters(recurse=False) if name not in before}
    call.require(bool(made), "weights are registered", "no parameter on the layer")
    bare = [name for name, item in made.items() if not callable(getattr(item, "weight_loader", None))]
    call.require(not bare, "weights can be loaded", f"no weight_loader on {', '.join(bare)}")
    rows = call.arguments.get("output_partition_sizes")
    call.notes[id(layer)] = (sum(rows) if rows is not None else call.arguments.get("num_rows"), False)


@rule("LinearMethod", "process_weights_after_loading")
@rule("FusedMoEMethod", "process_weights_after_loading")
@rule("EmbeddingMethod", "process_weights_after_loading")
def _process(call: Call) -> Generator[None, Any, None]:
    layer = call.arguments["layer"]
    call.expect(id(layer) in call.notes, "call order", "called before create_weights")
    yield
    parts = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
    before = snapshot(parts)
    call.again()
    places = changed(before)
    call.require(not places, "a second call changes nothing", f"it changed {', '.join(places)}")
    call.notes[id(layer)] = (call.notes[id(layer)][0], all(_is_clean(item) for item in parts.values()))


@rule("LinearMethod", "apply")
@rule("FusedMoEMethod", "apply")
@rule("EmbeddingMethod", "logits")
def _apply(call: Call) -> Generator[None, Any, None]:
    layer, x = call.arguments["layer"], call.arguments["x_TI"]
    call.expect(id(layer) in call.notes, "call order", "called before create_weights")
    rows, is_finite = call.notes[id(layer)]
    inputs = {key: value for key, value in call.arguments.items() if key not in ("self", "layer")}
    before = snapshot(inputs)
    result = yield
    _alone(call, before)
    is_clean = is_finite and all(_is_clean(item) for item in inputs.values() if item is not None)
    shape = tuple(x.shape) if "topk_ids_TA" in inputs else (*x.shape[:-1], rows)
    _like(call, result, x, shape, is_clean=is_clean)


# ---- models, logits


@rule("Model", "__init__")
def _config(call: Call) -> Generator[None, Any, None]:
    yield
    config = call.arguments["config"]
    call.notes["vocab"] = getattr(getattr(config, "text_config", config), "vocab_size", None)


@rule("Model", "forward")
def _hidden(call: Call) -> Generator[None, Any, None]:
    ids, positions = call.arguments["input_ids"], call.arguments["positions"]
    before = snapshot({"input_ids": ids, "positions": positions})
    result = yield
    _alone(call, before)
    if hasattr(result, "dim"):  # stages before the last hand on what is no tensor
        fits = result.dim() == 2 and len(result) == len(positions)
        call.require(fits, "shape of the result", f"{list(result.shape)} for {len(positions)} tokens")
        call.require(not bool(result.isnan().any()), "no NaN", "hidden states hold NaN")


@rule("Model", "compute_logits")
def _logits(call: Call) -> Generator[None, Any, None]:
    hidden = call.arguments["hidden_TN"]
    before = snapshot({"hidden_TN": hidden})
    result = yield
    _alone(call, before)
    shape, vocab = tuple(result.shape), call.notes.get("vocab")
    fits = len(shape) == 2 and shape[0] == len(hidden) and vocab in (None, shape[1])
    call.require(fits, "shape of the result", f"{list(shape)}, not [{len(hidden)}, {vocab}]")


@rule("LogitsProcessor", "apply")
def _processed(call: Call) -> Generator[None, Any, None]:
    batch = call.arguments["batch"]
    live = call.notes.setdefault("slots", set())
    call.expect(set(batch.slots) <= live, "call order", f"rows of slots that were never added: {batch.slots}")
    first = batch.logits_BV
    kept, tokens = first.clone(), [list(row) for row in batch.output_token_ids]
    result = yield
    _like(call, result, first, tuple(first.shape), is_clean=not bool(kept.isnan().any()))
    call.require(
        tokens == [list(row) for row in batch.output_token_ids], "inputs are left alone", "output_token_ids changed"
    )
    if call.plugin.is_argmax_invariant:
        moved = (kept.argmax(-1) != result.argmax(-1)).nonzero().flatten().tolist()
        call.require(not moved, "the likeliest token stays", f"is_argmax_invariant, but it moved in rows {moved[:4]}")


@rule("LogitsProcessor", "add", "remove")
def _slots(call: Call) -> Generator[None, Any, None]:
    live, slot = call.notes.setdefault("slots", set()), call.arguments["slot"]
    is_add = call.method == "add"
    told = f"slot {slot} is taken" if is_add else f"slot {slot} is free"
    call.expect((slot in live) != is_add, "call order", told)
    yield
    live.symmetric_difference_update({slot})


@rule("Proposer", "propose")
def _drafts(call: Call) -> Generator[None, Any, None]:
    batch = call.arguments["batch"]
    before = snapshot(batch)
    tokens = [list(row) for row in batch.token_ids or ()]
    result = yield
    _alone(call, before)
    call.require(
        tokens == [list(row) for row in batch.token_ids or ()], "inputs are left alone", "it changed token_ids"
    )
    one = (result.token_ids is None) != (result.device_token_ids is None)
    call.require(one, "one kind of result", "token_ids and device_token_ids: exactly one of them is set")
    rows = result.token_ids if result.token_ids is not None else _host_rows(result.device_token_ids)
    call.require(
        len(rows) == len(batch.request_ids), "a row a request", f"{len(rows)} rows, not {len(batch.request_ids)}"
    )
    query = call.plugin.context.query
    for row, most in zip(rows, batch.max_drafts, strict=True):
        call.require(len(row) <= most, "at most max_drafts", f"{len(row)} drafts where {most} were wanted")
        bad = [token for token in row if not 0 <= token < query.vocab_size]
        call.require(not bad, "ids in the vocabulary", f"{bad[:4]}; the vocabulary has {query.vocab_size}")
    if result.probabilities is not None:
        sums = result.probabilities.sum(-1)
        for index, row in enumerate(rows):
            near = bool(((sums[index, : len(row)] - 1).abs() < 1e-3).all())
            call.require(near, "q is a distribution", f"probabilities of row {index} do not sum to 1")


def _host_rows(ids: Any) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in ids.tolist()]
