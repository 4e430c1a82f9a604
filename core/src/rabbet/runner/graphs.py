"""Graphs of decode steps: one captured run a batch size, over inputs whose addresses never change.

Shapes: S largest batch size, M blocks a request at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rabbet.config.resolved import ResolvedConfig
from rabbet.contracts.attention import AttentionBackend, GraphSupport
from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.platform import CaptureError, GraphSession, Platform, SupportsAsyncSteps, SupportsGraphs
from rabbet.runner.inputs import StepInputs
from rabbet.runner.slots import Slots

__all__ = ["DecodeGraphs", "capture_sizes", "capture_token_sizes"]

logger = logging.getLogger(__name__)
_LARGEST = 64
"""Larger batches compute for so long that the host's work beside them does not show."""
_LARGEST_PADDED = 512
_PADDED = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384)
"""Where steps are launched ahead, a batch is filled up to the next of these sizes: each takes its time at the start."""
_TOKENS = (64, 128, 256, 512, 1024, 2048)
_MOST_WORK = 3 << 40
"""Tokens times bytes of weights. More takes a fast GPU 5 ms or longer, in which the host launches such a step operation by
operation; attention then knows the step's shape, and nothing is computed for tokens that are not there."""

Compute = Callable[[torch.Tensor, torch.Tensor, list[AttentionBatch]], torch.Tensor]
"""Token ids, positions and one batch a cache group to logits."""


def capture_sizes(resolved: ResolvedConfig, platform: Platform, backends: Sequence[AttentionBackend]) -> frozenset[int]:
    """Batch sizes to capture; none where the platform, an attention backend or the configuration does not allow it."""
    config = resolved.config
    if config.model.enforce_eager or config.compilation.cudagraph_mode == "NONE" or config.optimization_level == 0:
        return frozenset()
    if not isinstance(platform, SupportsGraphs) or resolved.world_size > 1:
        return frozenset()
    if any(backend.graph_support() is GraphSupport.NEVER for backend in backends):
        return frozenset()
    is_padded = isinstance(platform, SupportsAsyncSteps)
    most = config.compilation.max_cudagraph_capture_size or (_LARGEST_PADDED if is_padded else _LARGEST)
    most = min(most, resolved.max_num_seqs)
    default = {*(size for size in _PADDED if size < most), most} if is_padded else range(1, most + 1)
    return frozenset(size for size in config.compilation.cudagraph_capture_sizes or default if 0 < size <= most)


def capture_token_sizes(
    resolved: ResolvedConfig, backends: Sequence[AttentionBackend], weights_bytes: int
) -> tuple[int, ...]:
    """Numbers of tokens to capture for steps that are not decodes, where ``capture_sizes`` allows graphs at all."""
    if resolved.config.compilation.cudagraph_mode == "FULL_DECODE_ONLY":
        return ()
    if any(backend.graph_support() is not GraphSupport.RAGGED for backend in backends):
        return ()
    most = min(resolved.max_num_batched_tokens, _MOST_WORK // max(weights_bytes, 1))
    return tuple(size for size in _TOKENS if size <= most)


@dataclass(frozen=True, slots=True)
class _Captured:
    """One batch size."""

    session: GraphSession
    logits: torch.Tensor


class DecodeGraphs:
    """Runs steps in which each request has one new token and samples; captures a batch size when it is first seen.

    Attributes:
        sizes: Batch sizes that are captured; none once a capture has failed.
    """

    def __init__(
        self, platform: SupportsGraphs, slots: Slots, compute: Compute, sizes: frozenset[int], max_model_len: int
    ) -> None:
        """Allocate the inputs.

        Args:
            platform: What captures.
            slots: The persistent batch: number of groups and width of their tables.
            compute: The work.
            sizes: Batch sizes to capture.
            max_model_len: Bound of every request's length.
        """
        self._platform = platform
        self._compute = compute
        self.sizes = sizes
        self._max_model_len = max_model_len
        self._captured: dict[int, _Captured] = {}
        size, groups = max(sizes), len(slots.block_tables)
        # On the host: platforms that compute elsewhere launch steps ahead, and ``Launcher`` keeps their graphs.
        self._input_ids = torch.zeros(size, dtype=torch.int64)
        self._positions = torch.zeros(size, dtype=torch.int64)
        self._seq_lens = torch.ones(size, dtype=torch.int32)
        self._query_start = torch.arange(size + 1, dtype=torch.int32)
        self._tables = [torch.zeros((size, slots.max_blocks), dtype=torch.int32) for _ in range(groups)]
        self._slots = [torch.full((size,), -1, dtype=torch.int64) for _ in range(groups)]

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits of a decode step, [B, V], which hold until the next run; None for any other step."""
        count = len(inputs.rows)
        batch = inputs.batches[0]
        is_decode = batch.num_tokens == count == len(inputs.sample_rows) == len(inputs.num_sampled)
        if not is_decode or count not in self.sizes:
            return None
        if any(row.sampling.prompt_logprobs is not None for row in inputs.rows):
            return None
        self._input_ids[:count] = inputs.input_ids
        self._positions[:count] = inputs.positions
        self._seq_lens[:count] = batch.seq_lens
        for table, slots, one in zip(self._tables, self._slots, inputs.batches, strict=True):
            table[:count, : one.block_table.shape[1]] = one.block_table
            slots[:count] = one.slot_mapping
        captured = self._captured.get(count)
        if captured is None:
            return self._capture(count)
        captured.session.replay()
        return captured.logits

    def _capture(self, count: int) -> torch.Tensor | None:
        batches = [
            AttentionBatch(
                num_requests=count,
                num_tokens=count,
                max_query_len=1,
                max_seq_len=self._max_model_len,
                query_start=self._query_start[: count + 1],
                query_start_cpu=self._query_start[: count + 1],
                seq_lens=self._seq_lens[:count],
                seq_lens_cpu=self._seq_lens[:count],
                positions=self._positions[:count],
                block_table=table[:count],
                slot_mapping=slots[:count],
            )
            for table, slots in zip(self._tables, self._slots, strict=True)
        ]
        out: list[torch.Tensor] = []

        def work() -> None:
            out.append(self._compute(self._input_ids[:count], self._positions[:count], batches))

        try:
            session = self._platform.capture(work)
        except CaptureError as error:
            logger.info("steps are not captured: %s", error)
            self.sizes = frozenset()
            return None
        self._captured[count] = _Captured(session, out[-1])
        return out[-1]
