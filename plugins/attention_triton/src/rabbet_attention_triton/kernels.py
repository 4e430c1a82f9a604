"""The kernels: keys and values into the cache, split decoding, tiled chunks. Names of constants are explained here once.

A page of the cache is [2, K, S, D]: keys before values, heads outside of slots, so that the slots of a head are one run of
memory. G query heads share a key head; they and the query tokens of a request are the rows of one tile, so that each key
is read once for all of them: row r is query token r // G and head r % G of the group.

Online softmax as in FlashAttention (arXiv 2205.14135); powers of two in place of e, with the factor in the scale. Splits
over keys as in Flash-Decoding: each split leaves its unnormalised sum, its largest score and its weight, and whichever
program ends last for a row adds them up, which needs no second launch.

Shapes: T tokens, B requests, H query heads, K key heads, G = H / K, D head size, S slots of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from rabbet_triton.launch import IS_INTERPRETED, enter, wait_for_inputs

__all__ = ["chunk_kernel", "decode_kernel", "store_kernel"]


@triton.jit
def _product(a, b, sum):
    if IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum, input_precision="ieee")
    return tl.dot(a, b, sum, input_precision="ieee")


@triton.jit
def store_kernel(
    k, v, cache, slots,
    k_token, k_head, v_token, v_head, page,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token a program: its K heads of keys and values go to its slot; a slot of -1 writes nothing."""
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, HEADS)[:, None]
        dims = tl.arange(0, WIDTH)[None, :]
        inside = (heads < K) & (dims < D)
        target = cache + (slot // S) * page + heads * (S * D) + (slot % S) * D + dims
        keys = tl.load(k + token.to(tl.int64) * k_token + heads * k_head + dims, inside)
        tl.store(target, keys.to(cache.dtype.element_ty), inside)
        values = tl.load(v + token.to(tl.int64) * v_token + heads * v_head + dims, inside)
        tl.store(target + K * S * D, values.to(cache.dtype.element_ty), inside)


@triton.jit
def _attend(
    q, most, weight, total, cache, table, positions, slopes,
    begin, end, lowest, length, page, head, scale, window, soft_cap,
    K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Keys ``begin`` to ``end`` of one request for a tile of rows; ``begin`` is a multiple of COLUMNS.

    Args:
        q: [M, WIDTH] queries.
        most: [M] largest score so far, times log2(e).
        weight: [M] sum of powers so far.
        total: [M, WIDTH] sum of weighted values so far.
        positions: [M] of the rows.
        lowest: First key that any row sees; the table may say anything of those before it.
        IS_MASKED: Whether a key may be hidden from a row, or lie past ``length``.
    """
    columns = tl.arange(0, COLUMNS)
    dims = tl.arange(0, WIDTH)
    part = head * (S * D)
    for start in range(begin, end, COLUMNS):
        keys_at = start + columns
        if IS_MASKED:
            present = (keys_at >= lowest) & (keys_at < length)
            block = tl.load(table + keys_at // S, present, other=0).to(tl.int64)
        else:
            block = tl.load(table + keys_at // S).to(tl.int64)
        place = block * page + part + (keys_at % S) * D
        # What lies outside may be anything, and so may what is right of D: neither may reach a product.
        if IS_MASKED:
            inside = present[:, None] & (dims < D)[None, :]
            keys = tl.load(cache + place[:, None] + dims[None, :], inside, other=0.0)
        elif WIDTH != D:
            keys = tl.load(cache + place[:, None] + dims[None, :], (dims < D)[None, :], other=0.0)
        else:
            keys = tl.load(cache + place[:, None] + dims[None, :])
        scores = _product(q, tl.trans(keys.to(q.dtype)), None) * scale
        if HAS_SOFT_CAP:
            # tanh, with the factor log2(e) taken out of the scale and put back.
            scaled = scores / (soft_cap * 1.4426950408889634)
            power = tl.exp2(2.8853900817779268 * -tl.abs(scaled))
            curve = (1.0 - power) / (1.0 + power)
            scores = tl.where(scaled >= 0, curve, -curve) * (soft_cap * 1.4426950408889634)
        if HAS_ALIBI:
            scores -= slopes[:, None] * (positions[:, None] - keys_at[None, :]).to(tl.float32) * 1.4426950408889634
        if IS_MASKED:
            seen = present[None, :] & (keys_at[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen &= keys_at[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        # A row that has seen nothing yet keeps minus infinity, and must not make NaN of it.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        powers = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        weight = weight * shrink + tl.sum(powers, 1)
        total = total * shrink[:, None]
        if IS_MASKED:
            values = tl.load(cache + (place + K * S * D)[:, None] + dims[None, :], inside, other=0.0)
        elif WIDTH != D:
            values = tl.load(cache + (place + K * S * D)[:, None] + dims[None, :], (dims < D)[None, :], other=0.0)
        else:
            values = tl.load(cache + (place + K * S * D)[:, None] + dims[None, :])
        total = _product(powers.to(q.dtype), values.to(q.dtype), total)
        most = highest
    return most, weight, total


@triton.jit(do_not_specialize=["splits"])
def decode_kernel(
    q, cache, out, partial, marks, counters, requests, query_start, seq_lens, tables, sinks, slopes, k, v, slots, splits,
    q_token, q_head, k_token, k_head, v_token, v_head, page, table_row, scale, window, soft_cap,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, MOST_SPLITS: tl.constexpr, SHORTEST: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_LIST: tl.constexpr, STORES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One split of one key head of one request with few query tokens: at most ROWS / G.

    Args:
        k: Keys of the step, which this kernel puts into the cache if STORES: each program those of its own split.
        v: Values, likewise.
        slots: Where they go.
        partial: float32 [B, K, splits, ROWS, WIDTH] sums of splits.
        marks: float32 [B, K, splits, 2, ROWS] largest scores and weights of splits.
        counters: int32 [B, K], zero before and after.
        requests: int32 [B] which requests, if HAS_LIST; else all, in order.
        splits: Programs a head, at most MOST_SPLITS; short requests use fewer, and a split has at least SHORTEST keys.
    """
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    index = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(requests + index) if HAS_LIST else index
    first = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - first
    # A request of a captured step may have no token now, or so many that they are a chunk's.
    if (count == 0) | (count * G > ROWS):
        return
    length = tl.load(seq_lens + request)
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(length - count - window + 1, 0)
    start = lowest // COLUMNS * COLUMNS
    share = tl.maximum(tl.cdiv(tl.cdiv(length - start, splits), COLUMNS) * COLUMNS, SHORTEST)
    used = tl.maximum(tl.cdiv(length - start, share), 1)
    if split >= used:
        return
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    tokens = rows // G
    heads = head * G + rows % G
    is_row = tokens < count
    positions = length - count + tokens
    inside = is_row[:, None] & (dims < D)[None, :]
    offsets = (first + tokens).to(tl.int64)
    queries = tl.load(q + offsets[:, None] * q_token + heads[:, None] * q_head + dims[None, :], inside, other=0.0)
    slope = tl.load(slopes + heads) if HAS_ALIBI else tl.zeros((ROWS,), tl.float32)
    begin = start + split * share
    if STORES:
        for token in range(tl.maximum(begin - (length - count), 0), count):
            slot = tl.load(slots + first + token).to(tl.int64)
            if (length - count + token < begin + share) & (slot >= 0):
                row = (first + token).to(tl.int64)
                target = cache + (slot // S) * page + head * (S * D) + (slot % S) * D + dims
                key = tl.load(k + row * k_token + head * k_head + dims, dims < D)
                tl.store(target, key.to(cache.dtype.element_ty), dims < D)
                value = tl.load(v + row * v_token + head * v_head + dims, dims < D)
                tl.store(target + K * S * D, value.to(cache.dtype.element_ty), dims < D)
        # Other threads of the program read what one of them has stored.
        tl.debug_barrier()
    most, weight, total = _attend(
        queries, tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, WIDTH), tl.float32), cache, tables + request.to(tl.int64) * table_row, positions, slope,
        begin, tl.minimum(begin + share, length), lowest, length, page, head, scale, window, soft_cap,
        K, S, D, WIDTH, COLUMNS, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, True,
    )  # fmt: skip
    if MOST_SPLITS > 1:
        if used > 1:
            place = (index * K + head).to(tl.int64) * splits
            mine = place + split
            place_in_split = rows[:, None] * WIDTH + dims[None, :]
            tl.store(partial + mine * (ROWS * WIDTH) + place_in_split, total, is_row[:, None])
            tl.store(marks + mine * (2 * ROWS) + rows, most)
            tl.store(marks + mine * (2 * ROWS) + ROWS + rows, weight)
            # All threads' stores come before the count, which the last program sees at its own.
            tl.debug_barrier()
            if tl.atomic_add(counters + index * K + head, 1, sem="acq_rel") < used - 1:
                return
            tl.store(counters + index * K + head, 0)
            others = tl.arange(0, MOST_SPLITS)
            is_other = (others < used)[:, None]
            its = marks + (place + others)[:, None] * (2 * ROWS) + rows[None, :]
            all_most = tl.load(its, is_other, other=float("-inf"), cache_modifier=".cg")
            all_weight = tl.load(its + ROWS, is_other, other=0.0, cache_modifier=".cg")
            most = tl.max(all_most, 0)
            base = tl.where(most == float("-inf"), 0.0, most)
            weight = tl.sum(all_weight * tl.exp2(all_most - base[None, :]), 0)
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            for other in range(0, used, 4):
                # Four at once, so that their loads wait together.
                for step in tl.static_range(4):
                    is_there = tl.zeros((ROWS,), tl.int32) + (other + step) < used
                    at = place + other + step
                    its_most = tl.load(
                        marks + at * (2 * ROWS) + rows, is_there, other=float("-inf"), cache_modifier=".cg"
                    )
                    its_total = tl.load(
                        partial + at * (ROWS * WIDTH) + place_in_split, (is_row & is_there)[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    total += its_total * tl.exp2(its_most - base)[:, None]
    if HAS_SINKS:
        weight += tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - most)
    result = total / tl.where(is_row, weight, 1.0)[:, None]
    tl.store(
        out + offsets[:, None] * (K * G * D) + heads[:, None] * D + dims[None, :],
        result.to(out.dtype.element_ty), inside,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests"])
def chunk_kernel(
    q, cache, out, tile_requests, tile_starts, query_start, seq_lens, tables, sinks, slopes,
    requests, q_token, q_head, page, table_row, scale, window, soft_cap,
    K: tl.constexpr, G: tl.constexpr, S: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST_REQUESTS: tl.constexpr, DECODE_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS / G query tokens of one request, for one key head. Tiles that see the most keys come first.

    Args:
        tile_requests: int32 [tiles] request of a tile. Without HAS_TILES each program finds its own from ``query_start``:
            the last tile of the last request first, none of those with so few tokens that they are decodes.
        tile_starts: int32 [tiles] its first query token within the request.
        requests: How many there are, at most MOST_REQUESTS.
    """
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    tile = tl.program_id(1)
    head = tl.program_id(0)
    request = tile
    begin_token = tile
    if HAS_TILES:
        request = tl.load(tile_requests + tile)
        begin_token = tl.load(tile_starts + tile)
    else:
        everyone = tl.arange(0, MOST_REQUESTS)
        is_one = everyone < requests
        counts = tl.load(query_start + everyone + 1, is_one, other=0) - tl.load(query_start + everyone, is_one, other=0)
        tiles = tl.where(counts * G > DECODE_ROWS, tl.cdiv(counts, ROWS // G), 0)
        wanted = tl.sum(tiles, 0) - 1 - tile
        # Most programs of a small step in a large one's graph end here.
        if wanted < 0:
            return
        request = tl.sum(((tl.cumsum(tiles, 0) <= wanted) & is_one).to(tl.int32), 0)
        begin_token = (wanted - tl.sum(tl.where(everyone < request, tiles, 0), 0)) * (ROWS // G)
    first = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - first
    length = tl.load(seq_lens + request)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    tokens = begin_token + rows // G
    heads = head * G + rows % G
    # Where G does not divide ROWS, the rows past the last whole token are left to the next tile.
    is_row = (tokens < count) & (rows < ROWS // G * G)
    positions = length - count + tokens
    inside = is_row[:, None] & (dims < D)[None, :]
    offsets = (first + tokens).to(tl.int64)
    queries = tl.load(q + offsets[:, None] * q_token + heads[:, None] * q_head + dims[None, :], inside, other=0.0)
    slope = tl.load(slopes + heads) if HAS_ALIBI else tl.zeros((ROWS,), tl.float32)
    earliest = length - count + begin_token
    end = tl.minimum(earliest + ROWS // G, length)
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(earliest - window + 1, 0)
    start = lowest // COLUMNS * COLUMNS
    table = tables + request.to(tl.int64) * table_row
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    # Every row sees the keys before this column, unless there is a window.
    plain = (earliest + 1) // COLUMNS * COLUMNS
    if HAS_WINDOW:
        plain = start
    most, weight, total = _attend(
        queries, most, weight, total, cache, table, positions, slope, start, plain, lowest, length, page, head,
        scale, window, soft_cap,
        K, S, D, WIDTH, COLUMNS, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, False,
    )  # fmt: skip
    most, weight, total = _attend(
        queries, most, weight, total, cache, table, positions, slope, plain, end, lowest, length, page, head,
        scale, window, soft_cap,
        K, S, D, WIDTH, COLUMNS, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, True,
    )  # fmt: skip
    if HAS_SINKS:
        weight += tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - most)
    result = total / tl.where(is_row, weight, 1.0)[:, None]
    tl.store(
        out + offsets[:, None] * (K * G * D) + heads[:, None] * D + dims[None, :],
        result.to(out.dtype.element_ty), inside,
    )  # fmt: skip
