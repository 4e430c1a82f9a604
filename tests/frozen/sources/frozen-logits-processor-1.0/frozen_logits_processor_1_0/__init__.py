"""Logits processor 1.0: three arguments; forbids the token that came last."""

from rabbet.contracts import register_logits_processor
from rabbet.contracts.logits_processor import LogitsProcessor


@register_logits_processor("frozen_block")
class FrozenBlock(LogitsProcessor):
    def __init__(self, context):
        super().__init__(context)
        self.slots = set()

    def add(self, slot, sampling, prompt_token_ids):
        self.slots.add(slot)

    def remove(self, slot):
        self.slots.discard(slot)

    def apply(self, logits_BV, slots, output_token_ids):
        for row, (slot, ids) in enumerate(zip(slots, output_token_ids, strict=True)):
            if slot in self.slots and ids:
                logits_BV[row, ids[-1]] = float("-inf")
        return logits_BV
