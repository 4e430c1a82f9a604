"""The processor as a device that runs ahead of the host: what is launched is done, but nobody may look before he waits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rabbet_hw_cpu.platform import CpuPlatform

from rabbet.contracts import register_platform
from rabbet.contracts.platform import DrawBatch, SupportsAsyncSteps


@register_platform("ahead")
class AheadPlatform(CpuPlatform, SupportsAsyncSteps):
    """Draws by noise from each row's own seed and index, so that company changes nothing."""

    def mark(self) -> Callable[[], None]:
        """Nothing is ever under way."""
        return lambda: None

    def draw(self, logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
        """Gumbel noise where there is a temperature; top-k alone of the filters."""
        scores = logits_BV.float()
        is_bad = ~torch.isfinite(scores.amax(-1))
        if batch.is_random:
            ids = torch.arange(scores.shape[1], dtype=torch.int64)
            state = (batch.seed_B * 0x9E3779B1 + batch.index_B * 0x85EBCA6B).unsqueeze(1) + ids * 0x27D4EB2F
            state = (state ^ (state >> 29)) * 0x165667B19E3779F9
            uniform = (((state ^ (state >> 32)) & 0xFFFFFFFF).double() + 0.5) / 2.0**32
            temperature = batch.temperature_B.unsqueeze(1)
            if batch.is_filtered:
                top_k = batch.top_k_B.long().unsqueeze(1)
                lowest = scores.sort(-1, descending=True).values.gather(1, top_k.clamp_min(1) - 1)
                scores = scores.masked_fill((top_k > 0) & (scores < lowest), float("-inf"))
            noisy = scores.double() / temperature.clamp_min(1e-6) - (-uniform.log()).log()
            scores = torch.where(temperature > 0, noisy, scores.double())
        return scores.argmax(-1).masked_fill(is_bad, -1)
