"""Chunks on Hopper: a warp that fetches, two warpgroups that multiply, in Gluon (Triton's language of layouts and barriers).

One program a processor goes through tiles of 2 x 64 rows, the longest first. Its producer warp reads the page table and has
the copy engine (TMA) put pages into a ring of tiles of keys and of values; two consumers of 64 rows each wait for a tile
by its barrier and give it back by another. As in FlashAttention-3 (arXiv 2407.08608) a consumer starts the scores of the
next tile and the sum of the last one before it takes powers, so that its multiplications run under its exponentials.

Names of constants as in ``kernels``; BOX slots are one copy, COLUMNS keys one tile of the ring, STAGES its tiles, WIDTH the
head size rounded up to 64 or 128. Tiles are gone through from the last keys to the first, so that masked ones come first.
"""

from __future__ import annotations

from rabbet_triton.launch import enter, wait_for_inputs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["hopper_chunk_kernel"]

_ROWS = gl.constexpr(64)
"""Rows of a consumer."""


@gluon.jit
def _tile(
    work, tile_requests, tile_starts, query_start, seq_lens, window,
    K: gl.constexpr, G: gl.constexpr, COLUMNS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The request, head, first token and keys of one piece of work."""
    tile = work // K
    head = work % K
    request = gl.load(tile_requests + tile)
    begin = gl.load(tile_starts + tile)
    first = gl.load(query_start + request)
    count = gl.load(query_start + request + 1) - first
    length = gl.load(seq_lens + request)
    earliest = length - count + begin
    end = gl.minimum(earliest + 2 * _ROWS // G, length)
    lowest = 0
    if HAS_WINDOW:
        lowest = gl.maximum(earliest - window + 1, 0)
    return request, head, begin, first, count, length, lowest, lowest // COLUMNS, (end + COLUMNS - 1) // COLUMNS


@gluon.jit
def _produce(
    q_desc, cache_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    tile_requests, tile_starts, query_start, seq_lens, tables, works, page_rows, all_rows, table_row, window,
    K: gl.constexpr, G: gl.constexpr, S: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer: queries of each piece of work, then its keys and values, tile by tile."""
    PARTS: gl.constexpr = WIDTH // 64
    PAGES: gl.constexpr = COLUMNS // BOX
    dtype: gl.constexpr = cache_desc.dtype
    boxes_k = k_smem._reinterpret(dtype, [STAGES * PARTS * PAGES, BOX, 64], cache_desc.layout)
    boxes_v = v_smem._reinterpret(dtype, [STAGES * PARTS * PAGES, BOX, 64], cache_desc.layout)
    boxes_q = q_smem._reinterpret(dtype, [2 * PARTS, _ROWS // G, G, 64], q_desc.layout)
    done = 0
    item = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        request, head, begin, first, _count, length, lowest, left, right = _tile(
            work, tile_requests, tile_starts, query_start, seq_lens, window, K, G, COLUMNS, HAS_WINDOW
        )
        for half in gl.static_range(2):
            mbarrier.wait(q_empty.index(half), (item & 1) ^ 1)
            mbarrier.expect(q_full.index(half), _ROWS * WIDTH * 2)
            for part in gl.static_range(PARTS):
                at = first + begin + half * (_ROWS // G)
                tma.async_copy_global_to_shared(
                    q_desc, [at, head * G, part * 64], q_full.index(half), boxes_q.index(half * PARTS + part)
                )
        table = tables + request.to(gl.int64) * table_row
        part_rows = head * S
        for step in range(0, right - left):
            tile = right - 1 - step
            stage = done % STAGES
            free = ((done // STAGES) & 1) ^ 1
            rows = ()
            for page in gl.static_range(PAGES):
                key = tile * COLUMNS + page * BOX
                is_used = (key < length) & (key + BOX > lowest)
                block = gl.load(table + key // S, mask=is_used, other=0)
                # Rows past the end of the cache come as zeros: pages that are not there may not be read.
                rows = rows + (gl.where(is_used, block * page_rows + part_rows + key % S, all_rows),)  # noqa: RUF005
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), COLUMNS * WIDTH * 2)
            for page in gl.static_range(PAGES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        cache_desc, [rows[page], part * 64], k_full.index(stage),
                        boxes_k.index((stage * PARTS + part) * PAGES + page),
                    )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), COLUMNS * WIDTH * 2)
            for page in gl.static_range(PAGES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        cache_desc, [rows[page] + K * S, part * 64], v_full.index(stage),
                        boxes_v.index((stage * PARTS + part) * PAGES + page),
                    )  # fmt: skip
            done += 1
        item += 1  # noqa: SIM113  the language has no enumerate


@gluon.jit
def _logits(
    scores, positions, slopes, keys_at, length, scale, window, soft_cap,
    HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Scores with all but the scale, which is left to the powers unless something has to come after it."""
    if HAS_SOFT_CAP:
        scaled = scores * (scale / (soft_cap * 1.4426950408889634))
        power = gl.exp2(2.8853900817779268 * -gl.abs(scaled))
        curve = (1.0 - power) / (1.0 + power)
        scores = gl.where(scaled >= 0, curve, -curve) * (soft_cap * 1.4426950408889634)
    elif HAS_ALIBI:
        scores = scores * scale
    if HAS_ALIBI:
        scores -= slopes[:, None] * (positions[:, None] - keys_at[None, :]).to(gl.float32) * 1.4426950408889634
    if IS_MASKED:
        seen = (keys_at[None, :] <= positions[:, None]) & (keys_at[None, :] < length)
        if HAS_WINDOW:
            seen = seen & (keys_at[None, :] > positions[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _powers(scores, most, scale, IS_MASKED: gl.constexpr):
    """Powers of two of a tile's scores, its sums, the new maximum, and what older sums shrink by."""
    highest = gl.maximum(most, gl.max(scores, 1))
    base = highest * scale
    if IS_MASKED:
        # A row that has seen nothing yet keeps minus infinity, and must not make NaN of it.
        base = gl.where(highest == float("-inf"), 0.0, base)
    powers = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(most * scale - base)
    return powers, gl.sum(powers, 1), highest, shrink


@gluon.jit
def _hold(sums):
    """The same numbers, before which the assembler moves no wait: its scheduler would have multiplications end first."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred is_less;
        .reg .b32 lanes;
        setp.lt.f32 is_less, $1, 0f00000000;
        selp.b32 lanes, 0, -1, is_less;
        bar.warp.sync lanes;
        mov.b32 $0, $1;
        }""",
        "=r,r", [sums], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _step(
    q, powers, most, weight, total, done, tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    positions, slopes, length, scale, factor, window, soft_cap,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile number ``done`` under way with the sum of the one before, whose powers are given."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    stage = done % STAGES
    last = (done - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    fresh = gl.zeros([_ROWS, COLUMNS], gl.float32, SCORES)
    keys = k_smem.index(stage).permute((1, 0))
    fresh = warpgroup_mma(q, keys, fresh, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), ((done - 1) // STAGES) & 1)
    total = warpgroup_mma(powers, v_smem.index(last), total, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[fresh])
    mbarrier.arrive(k_empty.index(stage), count=1)
    keys_at = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES))
    scores = _logits(
        scores, positions, slopes, keys_at, length, scale, window, soft_cap, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, IS_MASKED
    )
    taken, sums, most, shrink = _powers(scores, most, factor, IS_MASKED)
    weight = weight * shrink + sums
    weight = _hold(weight)
    total, _ = warpgroup_mma_wait(0, deps=[total, powers])
    mbarrier.arrive(v_empty.index(last), count=1)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, TOTAL))[:, None]
    powers = gl.convert_layout(taken.to(k_smem.dtype), gl.DotOperandLayout(0, TOTAL, 2))
    return powers, most, weight, total


@gluon.jit
def _consume(
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    out, tile_requests, tile_starts, query_start, seq_lens, sinks, alibi_slopes, works, scale, window, soft_cap,
    HALF: gl.constexpr, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_ALIBI: gl.constexpr,
):  # fmt: skip
    """One of two consumers: rows HALF * 64 and on of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    MENDED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = WIDTH // 64
    PAGE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = k_smem.dtype
    # Where the scores are scaled before the powers are taken.
    factor = scale
    if HAS_SOFT_CAP or HAS_ALIBI:
        factor = 1.0
    q = q_smem.index(HALF)
    done = 0
    item = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        _request, head, begin, first, count, length, _lowest, left, right = _tile(
            work, tile_requests, tile_starts, query_start, seq_lens, window, K, G, COLUMNS, HAS_WINDOW
        )
        rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES)) + HALF * _ROWS
        positions = length - count + begin + rows // G
        slopes = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        if HAS_ALIBI:
            slopes = gl.load(alibi_slopes + head * G + rows % G)
        # Every row sees the tiles left of this one, unless there is a window.
        plain = gl.maximum(gl.minimum((length - count + begin + 1) // COLUMNS, right - 1), left)
        if HAS_WINDOW:
            plain = left
        stage = done % STAGES
        mbarrier.wait(q_full.index(HALF), item & 1)
        mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
        scores = gl.zeros([_ROWS, COLUMNS], gl.float32, SCORES)
        scores = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        keys_at = (right - 1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SCORES))
        scores = _logits(
            scores, positions, slopes, keys_at, length, scale, window, soft_cap, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, True
        )
        most = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        taken, weight, most, shrink = _powers(scores, most, factor, True)
        powers = gl.convert_layout(taken.to(dtype), gl.DotOperandLayout(0, TOTAL, 2))
        total = gl.zeros([_ROWS, WIDTH], gl.float32, TOTAL)
        # Slots past the end may hold anything, NaN included, which no weight of zero hides.
        over = length - (right - 1) * COLUMNS
        if over < COLUMNS:
            mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
            lines = v_smem._reinterpret(dtype, [STAGES * PARTS * (COLUMNS // 16), 16, 64], PAGE)
            for block in range(over // 16, (over + BOX - 1) // BOX * (BOX // 16)):
                is_there = block * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, MENDED)) < over
                for part in gl.static_range(PARTS):
                    line = lines.index((stage * PARTS + part) * (COLUMNS // 16) + block)
                    values = line.load(MENDED)
                    line.store(gl.where(is_there[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
            gl.thread_barrier()
        done += 1
        for tile in range(right - 2, plain - 1, -1):
            powers, most, weight, total = _step(
                q, powers, most, weight, total, done, tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                positions, slopes, length, scale, factor, window, soft_cap,
                COLUMNS, STAGES, WIDTH, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, True,
            )  # fmt: skip
            done += 1
        for tile in range(plain - 1, left - 1, -1):
            powers, most, weight, total = _step(
                q, powers, most, weight, total, done, tile, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                positions, slopes, length, scale, factor, window, soft_cap,
                COLUMNS, STAGES, WIDTH, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, False,
            )  # fmt: skip
            done += 1
        mbarrier.arrive(q_empty.index(HALF), count=1)
        last = (done - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((done - 1) // STAGES) & 1)
        total = warpgroup_mma(powers, v_smem.index(last), total, is_async=True)
        if HAS_SINKS:
            weight += gl.exp2(gl.load(sinks + head * G + rows % G).to(gl.float32) * 1.4426950408889634 - most * factor)
        shrink = gl.convert_layout(1.0 / weight, gl.SliceLayout(1, TOTAL))
        total, _ = warpgroup_mma_wait(0, deps=[total, powers])
        mbarrier.arrive(v_empty.index(last), count=1)
        result = gl.convert_layout((total * shrink[:, None]).to(dtype), STORED)
        lines_at = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, STORED)) + HALF * _ROWS
        dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORED))
        tokens = begin + lines_at // G
        offsets = ((first + tokens) * (K * G) + head * G + lines_at % G).to(gl.int64) * D
        gl.store(
            out + offsets[:, None] + dims[None, :], result, mask=(tokens < count)[:, None] & (dims < D)[None, :]
        )
        item += 1  # noqa: SIM113  the language has no enumerate


@gluon.jit(do_not_specialize=["works", "page_rows", "all_rows", "table_row", "window"])
def hopper_chunk_kernel(
    out, q_desc, cache_desc, tile_requests, tile_starts, query_start, seq_lens, tables, sinks, slopes,
    works, page_rows, all_rows, table_row, scale, window, soft_cap,
    K: gl.constexpr, G: gl.constexpr, S: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, LEAST: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_ALIBI: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 / G query tokens for one key head each; G divides 64. 4 warps, and 5 more that the kernel starts.

    Args:
        q_desc: Of [T, H, D], in boxes of [64 / G, G, 64].
        cache_desc: Of [all_rows, D], in boxes of [BOX, 64].
        works: Tiles times K.
        page_rows: Rows of D elements from one page to the next.
    """
    enter(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    dtype: gl.constexpr = cache_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [2, _ROWS, WIDTH], TILE)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, WIDTH], TILE)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, WIDTH], TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(q_empty.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                out, tile_requests, tile_starts, query_start, seq_lens, sinks, slopes, works, scale, window, soft_cap,
                gl.constexpr(0), K, G, D, WIDTH, COLUMNS, BOX, STAGES,
                HAS_WINDOW, HAS_SOFT_CAP, HAS_SINKS, HAS_ALIBI,
            )),
            (_consume, (
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                out, tile_requests, tile_starts, query_start, seq_lens, sinks, slopes, works, scale, window, soft_cap,
                gl.constexpr(1), K, G, D, WIDTH, COLUMNS, BOX, STAGES,
                HAS_WINDOW, HAS_SOFT_CAP, HAS_SINKS, HAS_ALIBI,
            )),
            (_produce, (
                q_desc, cache_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                tile_requests, tile_starts, query_start, seq_lens, tables, works, page_rows, all_rows, table_row, window,
                K, G, S, WIDTH, COLUMNS, BOX, STAGES, HAS_WINDOW,
            )),
        ],
        [4, 1], [REGISTERS, LEAST],
    )  # fmt: skip
