"""The logits processors of one rank: told of requests as they come and go, applied to the rows of each step.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from rabbet.config.resolved import ResolvedConfig
from rabbet.contracts.logits_processor import LogitsBatch, LogitsProcessor, LogitsProcessorContext
from rabbet.errors import PluginError
from rabbet.runner.inputs import SampleRow
from rabbet.runner.slots import Row, Slots

__all__ = ["Processors"]

logger = logging.getLogger(__name__)


class Processors:
    """Those that the operator named, in his order. One that raises for a request fails that request alone."""

    def __init__(self, resolved: ResolvedConfig, device: torch.device) -> None:
        self._made: list[tuple[str, LogitsProcessor]] = []
        self._failed: dict[int, str] = {}
        self._refused: set[tuple[str, int]] = set()
        for decision in resolved.composition.decisions:
            if decision.kind == "logits_processor":
                context = LogitsProcessorContext(
                    device=device,
                    max_num_requests=resolved.max_num_seqs,
                    vocab_size=resolved.vocab_size,
                    options=resolved.options.get(decision.name, {}),
                )
                made: Any = resolved.composition.build("logits_processor", context, scope=decision.scope)
                self._made.append((decision.name, made))

    def __bool__(self) -> bool:
        return bool(self._made)

    def add(self, row: Row, slots: Slots) -> None:
        """A request takes a slot."""
        prompt = slots.token_ids[row.slot, : row.num_prompt_tokens].tolist() if self._made else []
        for name, processor in self._made:
            try:
                processor.add(row.slot, row.sampling, prompt)
            except (Exception, SystemExit) as error:
                logger.error("logits processor %s failed to take a request", name, exc_info=error)
                self._refused.add((name, row.slot))
                self._failed[row.slot] = f"the logits processor {name} failed: {type(error).__name__}"

    def remove(self, row: Row | None) -> None:
        """Its request is gone."""
        if row is None:
            return
        self._failed.pop(row.slot, None)
        for name, processor in self._made:
            try:
                processor.remove(row.slot)
            except (Exception, SystemExit) as error:
                # One that failed to take the request may have nothing to give back, or only a part.
                if (name, row.slot) not in self._refused:
                    raise PluginError(f"the logits processor {name} failed in remove()") from error
                logger.info("logits processor %s gave up a request that it had refused: %r", name, error)
            self._refused.discard((name, row.slot))

    def apply(self, logits_BV: torch.Tensor, rows: list[SampleRow], slots: Slots) -> dict[int, str]:
        """Change logits in place; rows that are greedy are left out where the likeliest token stays what it is.

        Returns:
            What is wrong with a row, by its index: nothing can be drawn from it.
        """
        problems = {i: told for i, item in enumerate(rows) if (told := self._failed.get(item.row.slot))}
        for name, processor in self._made:
            wanted = [
                i
                for i, item in enumerate(rows)
                if i not in problems and not (processor.is_argmax_invariant and item.row.sampling.is_greedy)
            ]
            if not wanted:
                continue
            part = logits_BV if len(wanted) == len(rows) else logits_BV[wanted]
            batch = LogitsBatch(
                logits_BV=part,
                slots=[rows[i].row.slot for i in wanted],
                output_token_ids=[_output(rows[i], slots) for i in wanted],
            )
            try:
                result = processor.apply(batch)
                if getattr(result, "shape", None) != part.shape:
                    raise TypeError("apply() returned no tensor of the shape of its logits")
                if result is not logits_BV:
                    logits_BV[wanted] = result.to(logits_BV.dtype)
            except (Exception, SystemExit) as error:
                logger.error("logits processor %s failed in apply()", name, exc_info=error)
                problems |= dict.fromkeys(wanted, f"the logits processor {name} failed: {type(error).__name__}")
                continue
            bad = (~torch.isfinite(logits_BV[wanted].amax(dim=-1))).tolist()
            problems |= {
                i: f"the logits processor {name} left no token to choose"
                for i, is_bad in zip(wanted, bad, strict=True)
                if is_bad
            }
        return problems


def _output(item: SampleRow, slots: Slots) -> list[int]:
    return slots.token_ids[item.row.slot, item.row.num_prompt_tokens : item.history].tolist()  # type: ignore[no-any-return]
