"""The persistent batch: one row a running request, on the host. A step changes only what changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rabbet.types.plan import NewRequest, RunningRequest
from rabbet.types.sampling import SamplingParams

__all__ = ["Row", "Slots"]

_MAX_INT32 = (1 << 31) - 1


@dataclass(slots=True)
class Row:
    """What the sampler needs to know of one request.

    Attributes:
        request_id: The engine's id.
        slot: Index of the row.
        num_prompt_tokens: Tokens of the prompt.
        sampling: How tokens are chosen.
        seed: Seed of its draws.
        end_token_ids: Masked before ``min_tokens``.
        bad_words: Token sequences whose last token is masked.
        is_plain: Greedy or plain sampling: no masks, biases, penalties.
        lists: What ``adjust_logits`` made of the request's lists.
    """

    request_id: str
    slot: int
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    end_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    is_plain: bool = True
    lists: Any = None


class Slots:
    """Token ids, lengths and block tables of all rows, as arrays.

    ``token_ids[slot, :num_tokens[slot]]`` are the known tokens; drafts may stand behind them during a step. Where steps are
    launched ahead, -1 stands for a token that the device knows and the host does not yet.

    Attributes:
        idle: A row that belongs to nobody and has no tokens: batches are filled up with it.
        floats: Temperature (0 if greedy), top_p and min_p of each row.
        needs_host: Rows whose logits or log probabilities are worked on with tokens that the host has to know.
    """

    def __init__(self, *, num_slots: int, max_model_len: int, num_groups: int, block_size: int) -> None:
        """Reserve rows; memory is touched only as it is used."""
        self.idle = num_slots
        num_slots += 1
        self.max_blocks = -(-(max_model_len + 1) // block_size) + 1
        self.token_ids = np.zeros((num_slots, max_model_len + 128), np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.block_tables = [np.zeros((num_slots, self.max_blocks), np.int32) for _ in range(num_groups)]
        self.num_blocks = [np.zeros(num_slots, np.int64) for _ in range(num_groups)]
        # How tokens are drawn, a column a number, so that a step takes the rows of all its requests at once.
        self.floats = np.zeros((3, num_slots), np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.seeds = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.needs_host = np.zeros(num_slots, bool)
        self.rows: dict[str, Row] = {}
        self._free = list(range(self.idle - 1, -1, -1))

    def add(self, request: NewRequest) -> Row:
        """Make a row."""
        slot = self._free.pop()
        sampling = request.sampling
        row = Row(
            request_id=request.request_id,
            slot=slot,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling,
            seed=request.seed,
            end_token_ids=request.end_token_ids,
            bad_words=request.bad_words_token_ids,
            is_plain=not (
                sampling.needs_penalties
                or sampling.logit_bias
                or sampling.allowed_token_ids
                or request.bad_words_token_ids
                or sampling.min_tokens
            ),
        )
        self.rows[request.request_id] = row
        self.floats[:, slot] = 0 if sampling.is_greedy else sampling.temperature, sampling.top_p, sampling.min_p
        self.top_k[slot] = min(sampling.top_k, _MAX_INT32)
        self.seeds[slot] = (request.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self.num_prompt[slot] = request.num_prompt_tokens
        scores = (sampling.logprobs, sampling.logprob_token_ids, sampling.prompt_logprobs)
        self.needs_host[slot] = not row.is_plain or any(wanted is not None for wanted in scores)
        count = len(request.token_ids)
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = request.num_computed_tokens
        for group, blocks in enumerate(request.block_ids):
            self.num_blocks[group][slot] = 0
            self._append_blocks(slot, group, blocks)
        return row

    def update(self, request: RunningRequest) -> None:
        """Take in what a plan says of a running request."""
        slot = self.rows[request.request_id].slot
        self.num_computed[slot] = request.num_computed_tokens
        for group, blocks in enumerate(request.new_block_ids):
            if blocks:
                self._append_blocks(slot, group, blocks)

    def remove(self, request_id: str) -> Row | None:
        """Free a row; unknown ids are ignored."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.slot)
        return row

    def append_tokens(self, slot: int, token_ids: list[int]) -> None:
        """Sampled tokens become known."""
        start = int(self.num_tokens[slot])
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.num_tokens[slot] = start + len(token_ids)

    def _append_blocks(self, slot: int, group: int, blocks: list[int]) -> None:
        start = int(self.num_blocks[group][slot])
        self.block_tables[group][slot, start : start + len(blocks)] = blocks
        self.num_blocks[group][slot] = start + len(blocks)
