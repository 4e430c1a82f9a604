"""Steps that are launched without waiting: the device runs one while the host plans and prepares the next.

What the host does not know yet stays on the device. The newest token of each slot stands in ``_last``; an input id of -1
means "take it from there". A step's numbers travel in one copy from pinned memory, its tokens come back in one copy, and
the host reads them when the next step is already under way. A decode step of a captured size is one replay besides, and so
is a step of other shape where the attention backends take any batch in a captured one's place.

Shapes: T tokens, B requests, S a captured batch size, M blocks a request at most, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.platform import CaptureError, DrawBatch, GraphSession, SupportsAsyncSteps, SupportsGraphs
from rabbet.runner.inputs import flat_tokens, slots_of
from rabbet.runner.slots import Row, Slots
from rabbet.types.outputs import StepResult
from rabbet.types.plan import StepPlan

__all__ = ["BAD_LOGITS", "Launcher", "draw_batch"]

logger = logging.getLogger(__name__)
BAD_LOGITS = "the model's logits hold NaN or infinity"
_ALIGNMENT = 16
_MOST_MIXED = 64
"""Requests of a captured step that is not a decode: each takes its row of logits, whether it samples or not."""
_RING = 3
"""Host buffers: the device may still read those of two steps under way while the next is written."""

Forward = Callable[[torch.Tensor, torch.Tensor, list[AttentionBatch]], torch.Tensor]
"""Token ids, positions and one batch a cache group to hidden states."""


def draw_batch(slots: Slots, index: Sequence[int], output_index: Sequence[int], device: torch.device) -> DrawBatch:
    """How the rows of a step that the host waits for are drawn."""
    picked = np.asarray(index, np.int64)
    floats = slots.floats[:, picked]
    arrays = (*floats, slots.top_k[picked], slots.seeds[picked], np.asarray(output_index, np.int64))
    return _draw_batch([torch.from_numpy(array).to(device) for array in arrays], *_kinds(floats, arrays[3]))


def _draw_batch(views: Sequence[torch.Tensor], is_random: bool, is_filtered: bool) -> DrawBatch:
    temperature, top_p, min_p, top_k, seeds, index = views
    return DrawBatch(
        temperature_B=temperature, top_k_B=top_k, top_p_B=top_p, min_p_B=min_p, seed_B=seeds, index_B=index,
        is_random=is_random, is_filtered=is_filtered,
    )  # fmt: skip


def _kinds(floats: Sequence[np.ndarray] | np.ndarray, top_k: np.ndarray) -> tuple[bool, bool]:
    """Whether any row is random, and whether any is filtered."""
    is_random = floats[0] > 0
    is_filtered = is_random & ((floats[1] < 1) | (floats[2] > 0) | (top_k > 0))
    return bool(is_random.any()), bool(is_filtered.any())


class _Pending:
    """A step under way; calling it waits. Whoever calls first writes the tokens into the rows."""

    def __init__(
        self,
        plan: StepPlan,
        slots: Slots,
        rows: list[Row],
        places: list[int],
        wait: Callable[[], None],
        tokens: Callable[[], list[int]],
    ) -> None:
        """``tokens`` reads those of ``rows`` once it has waited; they go to ``places`` of their slots."""
        self._plan, self._slots, self._rows, self._places = plan, slots, rows, places
        self._wait, self._tokens = wait, tokens
        self._result: StepResult | None = None

    def __call__(self) -> StepResult:
        if self._result is None:
            self._wait()
            sampled: dict[str, list[int]] = {}
            failed: dict[str, str] = {}
            slots = self._slots
            for row, place, token in zip(self._rows, self._places, self._tokens(), strict=True):
                if token < 0:
                    failed[row.request_id] = BAD_LOGITS
                else:
                    sampled[row.request_id] = [token]
                # The slot may have gone to another request since.
                if slots.rows.get(row.request_id) is row:
                    slots.token_ids[row.slot, place] = max(token, 0)
            self._result = StepResult(step_id=self._plan.step_id, sampled_token_ids=sampled, failed=failed)
        return self._result


@dataclass(frozen=True, slots=True)
class _Captured:
    """One batch size: its graph, and what that leaves."""

    session: GraphSession
    logits: torch.Tensor
    tokens: torch.Tensor
    draw: list[torch.Tensor]
    sample_slots: torch.Tensor


class Launcher:
    """Launches steps whose requests need nothing of the host but their numbers.

    Attributes:
        sizes: Batch sizes with graphs, ascending; a decode step takes the next larger one and is filled up with idle rows.
        token_sizes: Likewise numbers of tokens of other steps, of up to ``max_mixed`` requests.
    """

    def __init__(
        self,
        platform: SupportsAsyncSteps,
        slots: Slots,
        *,
        device: torch.device,
        block_size: int,
        max_model_len: int,
        forward: Forward,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        token_sizes: Sequence[int] = (),
    ) -> None:
        """Allocate what all steps share.

        Args:
            platform: What marks and draws, and captures if there are sizes.
            slots: The persistent batch.
            device: Where the model is.
            block_size: Tokens a KV block.
            max_model_len: Bound of every request's length.
            forward: The model and its attention metadata.
            compute_logits: The head.
            sizes: Batch sizes to capture.
            token_sizes: Numbers of tokens to capture for steps that are not decodes.
        """
        self._platform, self._slots, self._device = platform, slots, device
        self._block_size, self._max_model_len = block_size, max_model_len
        self._forward, self._compute_logits = forward, compute_logits
        self.sizes, self.token_sizes = tuple(sorted(sizes)), tuple(sorted(token_sizes))
        self.max_mixed = min(_MOST_MIXED, max(self.sizes, default=0))
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pending: deque[_Pending] = deque(maxlen=_RING - 1)
        num_slots = len(slots.num_tokens)
        self._last = torch.zeros(num_slots, dtype=torch.int64, device=device)
        is_pinned = device.type != "cpu"
        self._out = [torch.zeros(num_slots, dtype=torch.int64, pin_memory=is_pinned) for _ in range(_RING)]
        self._host = [torch.empty(0, dtype=torch.uint8) for _ in range(_RING)]
        self._turn = 0
        largest = max(self.sizes, default=0)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32)
        self._query_start_device = self._query_start.to(device)
        self._tables = [
            torch.zeros((largest, slots.max_blocks), dtype=torch.int32, device=device) for _ in slots.block_tables
        ]
        num_bytes = self._bytes_of(largest) + max(self.token_sizes, default=0) * (24 + 8 * len(self._tables))
        self._static = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def _bytes_of(self, size: int) -> int:
        """Bytes of the numbers of a decode step of ``size`` requests, full tables included."""
        return size * (128 + (8 + 4 * self._slots.max_blocks) * len(self._tables)) + 1024

    def is_possible(self, plan: StepPlan) -> bool:
        """Whether nothing in the plan has to wait for the host to know the tokens of the step before."""
        slots = self._slots
        index = [slots.rows[request_id].slot for request_id in plan.num_scheduled_tokens]
        return not plan.draft_token_ids and not slots.needs_host[index].any()

    def settle(self) -> None:
        """Wait for all steps under way, so that the host knows every token."""
        while self._pending:
            self._pending.popleft()()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; rows of the plan's requests are in place."""
        slots = self._slots
        rows = [slots.rows[request_id] for request_id in plan.num_scheduled_tokens]
        count = len(rows)
        index = np.fromiter((row.slot for row in rows), np.int64, count)
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, count)
        samples = np.nonzero(slots.num_computed[index] + counts >= slots.num_tokens[index])[0]
        num_tokens = int(counts.sum())
        is_decode = num_tokens == count == len(samples)
        sizes, needed = (self.sizes, count) if is_decode else (self.token_sizes, num_tokens)
        # Before ``capture_all`` there is none: the step that warms up must not capture, which may fail.
        size = next((size for size in sizes if size >= needed and (size, not is_decode) in self._captured), 0)
        self._turn = (self._turn + 1) % _RING
        at: slice | np.ndarray = slice(len(samples))
        if size and is_decode:
            tokens = self._replay(self._filled(index, size), count)
        elif size and count <= self.max_mixed:
            # It draws for every request, whether that has reached its last token or not.
            tokens, at = self._replay_mixed(index, counts, samples, size), samples
        else:
            tokens = self._run(index, counts, samples)
        out = self._out[self._turn][: len(tokens)]
        out.copy_(tokens, non_blocking=True)
        sampling = rows if len(samples) == count else [rows[i] for i in samples.tolist()]
        known = index[samples]
        places = slots.num_tokens[known]
        pending = _Pending(
            plan, slots, sampling, places.tolist(), self._platform.mark(), lambda: out.numpy()[at].tolist()
        )
        slots.token_ids[known, places] = -1
        slots.num_tokens[known] += 1
        self._pending.append(pending)
        return pending

    def capture_all(self) -> None:
        """Capture each size, largest first: smaller ones then find room in its memory."""
        none = np.zeros(0, np.int64)
        try:
            for size in reversed(self.sizes):
                self._turn = (self._turn + 1) % _RING
                self._replay(self._filled(none, size), 0)
                self._platform.mark()()
            for size in reversed(self.token_sizes):
                self._turn = (self._turn + 1) % _RING
                self._replay_mixed(none, none, none, size)
                self._platform.mark()()
        except CaptureError as error:
            logger.info("steps are not captured: %s", error)
            self.sizes = self.token_sizes = ()

    # ---- one step

    def _run(self, index: np.ndarray, counts: np.ndarray, samples: np.ndarray) -> torch.Tensor:
        """A step of any shape, launched operation by operation."""
        query_start, owner, positions, seq_lens = flat_tokens(self._slots, index, counts)
        num_tokens = len(owner)
        known = index[samples]
        draw = self._draw_arrays(known)
        arrays = [
            *self._token_arrays(owner, positions), *draw, known, seq_lens,
            query_start, (query_start[1:] - 1)[samples].astype(np.int64), *self._table_arrays(index, seq_lens),
        ]  # fmt: skip
        buffer = torch.empty(_size_of(arrays), dtype=torch.uint8, device=self._device)
        views = _views(buffer, arrays, self._move(arrays, buffer))
        groups = len(self._tables)
        ids, owners, places, mappings, rest = *views[:3], views[3 : 3 + groups], views[3 + groups :]
        batches = [
            AttentionBatch(
                num_requests=len(index), num_tokens=num_tokens, max_query_len=int(counts.max()), max_seq_len=int(seq_lens.max()),
                query_start=rest[8], query_start_cpu=torch.from_numpy(query_start), seq_lens=rest[7],
                seq_lens_cpu=torch.from_numpy(seq_lens), positions=places, block_table=table, slot_mapping=mapping,
            )
            for table, mapping in zip(rest[10:], mappings, strict=True)
        ]  # fmt: skip
        hidden = self._forward(self._ids(ids, owners), places, batches)
        if not len(samples):
            return ids[:0]
        logits = self._compute_logits(hidden[rest[9]])
        tokens = self._platform.draw(logits, _draw_batch(rest[:6], *_kinds(draw[:3], draw[3])))
        self._last.index_copy_(0, rest[6], tokens)
        return tokens

    def _replay(self, index: np.ndarray, count: int) -> torch.Tensor:
        """A step of one token a request, as one replay."""
        slots, size = self._slots, len(index)
        positions = slots.num_computed[index]
        seq_lens = (positions + 1).astype(np.int32)
        draw = self._draw_arrays(index)
        tables = self._table_arrays(index, seq_lens)
        arrays = [*self._token_arrays(index, positions), *draw, index, seq_lens, *tables]
        for mapping in arrays[3 : 3 + len(tables)]:
            mapping[count:] = -1
        offsets = self._move(arrays, self._static)
        for static, table, offset in zip(self._tables, tables, offsets[-len(tables) :], strict=True):
            static[:size, : table.shape[1]].copy_(_view(self._static, table, offset))
        captured = self._captured.get((size, False))
        if captured is None:
            self._captured[size, False] = captured = self._capture(size, _views(self._static, arrays, offsets))
        else:
            captured.session.replay()
        return self._drawn(captured, draw)

    def _replay_mixed(self, index: np.ndarray, counts: np.ndarray, samples: np.ndarray, size: int) -> torch.Tensor:
        """A step of any shape with at most ``size`` tokens and ``max_mixed`` requests, as one replay."""
        slots, most, count = self._slots, self.max_mixed, len(index)
        query_start, owner, positions, seq_lens = flat_tokens(slots, index, counts)
        num_tokens = len(owner)
        query_start = np.concatenate((query_start, np.full(most - count, num_tokens, np.int32)))
        seq_lens = np.concatenate((seq_lens, np.ones(most - count, np.int32)))
        known = np.full(most, slots.idle, np.int64)
        known[samples] = index[samples]
        draw, tables = self._draw_arrays(known), self._table_arrays(self._filled(index, most), seq_lens)
        positions = np.concatenate((positions, np.zeros(size - num_tokens, np.int64)))
        arrays = [
            *self._token_arrays(self._filled(owner, size), positions), *draw, known, seq_lens,
            query_start, np.maximum(query_start[1:] - 1, 0).astype(np.int64), *tables,
        ]  # fmt: skip
        for mapping in arrays[3 : 3 + len(tables)]:
            mapping[num_tokens:] = -1
        offsets = self._move(arrays, self._static)
        for static, table, offset in zip(self._tables, tables, offsets[-len(tables) :], strict=True):
            static[:most, : table.shape[1]].copy_(_view(self._static, table, offset))
        captured = self._captured.get((size, True))
        if captured is None:
            self._captured[size, True] = captured = self._capture(
                size, _views(self._static, arrays, offsets), is_mixed=True
            )
        else:
            captured.session.replay()
        return self._drawn(captured, draw)

    def _drawn(self, captured: _Captured, draw: list[np.ndarray]) -> torch.Tensor:
        """The tokens of a replay. What filters exclude is not part of the graph: such rows are drawn once more."""
        _, is_filtered = _kinds(draw[:3], draw[3])
        if not is_filtered:
            return captured.tokens
        tokens = self._platform.draw(captured.logits, _draw_batch(captured.draw, True, True))
        self._last.index_copy_(0, captured.sample_slots, tokens)
        return tokens

    def _capture(self, size: int, views: list[torch.Tensor], *, is_mixed: bool = False) -> _Captured:
        groups = len(self._tables)
        ids, owners, places, mappings, rest = *views[:3], views[3 : 3 + groups], views[3 + groups :]
        count = self.max_mixed if is_mixed else size
        starts = rest[8] if is_mixed else self._query_start_device[: size + 1]
        batches = [
            AttentionBatch(
                num_requests=count, num_tokens=size, max_query_len=size if is_mixed else 1, max_seq_len=self._max_model_len,
                query_start=starts, query_start_cpu=self._query_start[: count + 1],
                seq_lens=rest[7], seq_lens_cpu=torch.ones(count, dtype=torch.int32), positions=places,
                block_table=table[:count], slot_mapping=mapping, is_ragged=is_mixed,
            )
            for table, mapping in zip(self._tables, mappings, strict=True)
        ]  # fmt: skip
        made: list[tuple[torch.Tensor, torch.Tensor]] = []

        def work() -> None:
            hidden = self._forward(self._ids(ids, owners), places, batches)
            logits = self._compute_logits(hidden.index_select(0, rest[9]) if is_mixed else hidden)
            tokens = self._platform.draw(logits, _draw_batch(rest[:6], True, False))
            self._last.index_copy_(0, rest[6], tokens)
            made.append((logits, tokens))

        assert isinstance(self._platform, SupportsGraphs)
        session = self._platform.capture(work)
        logits, tokens = made[-1]
        return _Captured(session, logits, tokens, rest[:6], rest[6])

    def _ids(self, ids_T: torch.Tensor, owners_T: torch.Tensor) -> torch.Tensor:
        """Input ids, those that the host does not know from the device. A failed row left -1, and runs on for one step."""
        return torch.where(ids_T < 0, self._last.index_select(0, owners_T).clamp_min(0), ids_T)

    # ---- numbers of a step

    def _filled(self, index: np.ndarray, size: int) -> np.ndarray:
        """With idle rows up to ``size``."""
        return np.concatenate((index, np.full(size - len(index), self._slots.idle, np.int64)))

    def _token_arrays(self, owner: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """Ids, slots, positions, then the places in the cache for each group."""
        slots = self._slots
        places = [slots_of(table, owner, positions, self._block_size) for table in slots.block_tables]
        return [slots.token_ids[owner, positions], owner, positions, *places]

    def _draw_arrays(self, index: np.ndarray) -> list[np.ndarray]:
        """In the order of ``_draw_batch``."""
        slots = self._slots
        output_index = slots.num_tokens[index] - slots.num_prompt[index]
        return [*slots.floats[:, index], slots.top_k[index], slots.seeds[index], output_index]

    def _table_arrays(self, index: np.ndarray, seq_lens: np.ndarray) -> list[np.ndarray]:
        num_blocks = -(-int(seq_lens.max()) // self._block_size)
        return [table[index, :num_blocks] for table in self._slots.block_tables]

    def _move(self, arrays: Sequence[np.ndarray], target: torch.Tensor) -> list[int]:
        """All arrays to the device in one copy; where each of them begins."""
        total = _size_of(arrays)
        if self._host[self._turn].numel() < total:
            is_pinned = self._device.type != "cpu"
            self._host[self._turn] = torch.empty(2 * total, dtype=torch.uint8, pin_memory=is_pinned)
        host = self._host[self._turn]
        raw = host.numpy()
        offsets, offset = [], 0
        for array in arrays:
            raw[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offsets.append(offset)
            offset += _padded(array.nbytes)
        target[:total].copy_(host[:total], non_blocking=True)
        return offsets


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _size_of(arrays: Sequence[np.ndarray]) -> int:
    return sum(_padded(array.nbytes) for array in arrays)


def _view(buffer: torch.Tensor, array: np.ndarray, offset: int) -> torch.Tensor:
    dtype = torch.from_numpy(array[:0]).dtype
    return buffer[offset : offset + array.nbytes].view(dtype).view(array.shape)


def _views(buffer: torch.Tensor, arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> list[torch.Tensor]:
    return [_view(buffer, array, offset) for array, offset in zip(arrays, offsets, strict=True)]
