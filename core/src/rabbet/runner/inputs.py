"""Turns a plan into the flat inputs of one step, with a handful of array operations whatever the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rabbet.contracts.batch import AttentionBatch
from rabbet.runner.slots import Row, Slots
from rabbet.types.plan import StepPlan

__all__ = ["SampleRow", "StepInputs", "build_inputs", "flat_tokens", "slots_of"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits.

    Attributes:
        row: The request.
        history: Tokens that precede the sampled one, drafts included.
        output_index: Index of the sampled token among the request's output tokens.
    """

    row: Row
    history: int
    output_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step.

    Attributes:
        rows: Requests in batch order.
        input_ids: int64 [T].
        positions: int64 [T].
        batches: One a cache group.
        query_start: Host copy of the token offsets, [B + 1].
        sample_index: int64 rows of the hidden states whose logits are needed.
        sample_rows: What they are for.
        num_sampled: Rows of logits of each request that samples: its drafts and one more.
    """

    rows: list[Row]
    input_ids: torch.Tensor
    positions: torch.Tensor
    batches: list[AttentionBatch]
    query_start: np.ndarray
    sample_index: torch.Tensor
    sample_rows: list[SampleRow]
    num_sampled: dict[str, int]


def build_inputs(plan: StepPlan, slots: Slots, *, block_size: int, device: torch.device) -> StepInputs:
    """The inputs of ``plan``, whose requests all have rows."""
    rows = [slots.rows[request_id] for request_id in plan.num_scheduled_tokens]
    index = np.fromiter((row.slot for row in rows), np.int64, len(rows))
    counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(rows))
    for request_id, drafts in plan.draft_token_ids.items():
        slot = slots.rows[request_id].slot
        start = int(slots.num_tokens[slot])
        slots.token_ids[slot, start : start + len(drafts)] = drafts
    query_start, owner, positions, seq_lens = flat_tokens(slots, index, counts)
    num_tokens = len(owner)
    sample_index, sample_rows, num_sampled = _samples(plan, slots, rows, query_start, seq_lens)
    to_device = _Mover(device)
    positions_device = to_device(positions)
    shared: dict[str, Any] = {
        "num_requests": len(rows),
        "num_tokens": num_tokens,
        "max_query_len": int(counts.max()),
        "max_seq_len": int(seq_lens.max()),
        "query_start": to_device(query_start),
        "query_start_cpu": torch.from_numpy(query_start),
        "seq_lens": to_device(seq_lens),
        "seq_lens_cpu": torch.from_numpy(seq_lens),
        "positions": positions_device,
    }
    num_blocks = -(-int(seq_lens.max()) // block_size)
    batches = []
    for table in slots.block_tables:
        slot_mapping = slots_of(table, owner, positions, block_size)
        batches.append(
            AttentionBatch(
                block_table=to_device(np.ascontiguousarray(table[index, :num_blocks])),
                slot_mapping=to_device(slot_mapping),
                **shared,
            )
        )
    return StepInputs(
        rows=rows,
        input_ids=to_device(slots.token_ids[owner, positions]),
        positions=positions_device,
        batches=batches,
        query_start=query_start,
        sample_index=to_device(np.asarray(sample_index, np.int64)),
        sample_rows=sample_rows,
        num_sampled=num_sampled,
    )


def flat_tokens(
    slots: Slots, index: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of a step, one request after another.

    Args:
        slots: The persistent batch.
        index: int64 [B] rows of the requests.
        counts: int64 [B] tokens of each in this step.

    Returns:
        Where requests begin, int32 [B + 1]; row and position of each token, int64 [T]; lengths after the step, int32 [B].
    """
    computed = slots.num_computed[index]
    query_start = np.zeros(len(index) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    seq_lens = (computed + counts).astype(np.int32)
    num_tokens = int(query_start[-1])
    if num_tokens == len(index):
        return query_start, index, computed, seq_lens
    positions = np.arange(num_tokens) + np.repeat(computed - query_start[:-1], counts)
    return query_start, np.repeat(index, counts), positions, seq_lens


def slots_of(table: np.ndarray, owner: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Places in the cache of tokens with these rows of a block table and positions, int64."""
    places: np.ndarray = table[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return places


def _samples(
    plan: StepPlan, slots: Slots, rows: list[Row], query_start: np.ndarray, seq_lens: np.ndarray
) -> tuple[list[int], list[SampleRow], dict[str, int]]:
    """Rows of the step whose logits are needed: those that reach the last known token."""
    sample_index: list[int] = []
    sample_rows: list[SampleRow] = []
    num_sampled: dict[str, int] = {}
    ends = query_start[1:].tolist()
    for row, end, length in zip(rows, ends, seq_lens.tolist(), strict=True):
        num_drafts = len(plan.draft_token_ids.get(row.request_id, ()))
        known = int(slots.num_tokens[row.slot])
        if length < known + num_drafts:
            continue
        num_sampled[row.request_id] = num_drafts + 1
        for i in range(num_drafts + 1):
            sample_index.append(end - num_drafts - 1 + i)
            sample_rows.append(SampleRow(row, known + i, known + i - row.num_prompt_tokens))
    return sample_index, sample_rows, num_sampled


class _Mover:
    """Host arrays to the device; on the CPU they are shared, not copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device is None else tensor.to(self._device, non_blocking=True)
