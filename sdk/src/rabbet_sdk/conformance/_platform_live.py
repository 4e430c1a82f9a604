"""What tests of platforms hold in their hands: a platform with its device, and work to capture on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rabbet.contracts.platform import DrawBatch, SupportsGraphs
from rabbet_sdk.conformance.cases import Claims
from rabbet_sdk.conformance.outcome import unavailable, unclaimed

__all__ = ["Live", "Work"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """A platform with its device claimed."""

    platform: Any
    device: torch.device
    claims: Claims
    generator: torch.Generator

    def random(self, dtype: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers on the device."""
        drawn = torch.randn(shape, generator=self.generator, device="cpu") * scale
        return drawn.to(getattr(torch, dtype)).to(self.device)

    def ops(self) -> Any:
        """The small operations; ends the test where there are none."""
        ops, is_claimed = self.platform.layer_ops(), self.claims.has("layer_ops")
        if ops is None:
            (unavailable if is_claimed else unclaimed)("layer_ops() gives None")
        assert is_claimed, "layer_ops() gives kernels, though the feature layer_ops is not claimed"
        return ops

    def able(self, feature: str, ability: type[Any]) -> Any:
        """The platform, if it has an optional ability; ends the test otherwise."""
        is_claimed = self.claims.has(feature)
        if not isinstance(self.platform, ability):
            assert not is_claimed, f"the feature {feature} is claimed, but the class is no {ability.__name__}"
            unclaimed(f"feature {feature}")
        assert is_claimed, f"the class is a {ability.__name__}, but the feature {feature} is not claimed"
        if self.claims.has("layer_ops") and self.platform.layer_ops() is None:
            unavailable("the platform's kernels are not there")
        return self.platform

    def graphs(self) -> Any:
        """The platform, if it captures; ends the test otherwise."""
        return self.able("graphs", SupportsGraphs)

    def rows(self, rows: Sequence[Mapping[str, float]]) -> DrawBatch:
        """What is drawn in each row; what a row leaves out is off."""

        def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([row.get(name, default) for row in rows], dtype=dtype, device=self.device)

        return DrawBatch(
            temperature_B=column("temperature", 1.0, torch.float32), top_k_B=column("top_k", 0, torch.int32),
            top_p_B=column("top_p", 1.0, torch.float32), min_p_B=column("min_p", 0.0, torch.float32),
            seed_B=column("seed", 0, torch.int64), index_B=column("index", 0, torch.int64),
            is_random=any(row.get("temperature", 1.0) > 0 for row in rows),
            is_filtered=any({"top_k", "top_p", "min_p"} & set(row) for row in rows),
        )  # fmt: skip


class Work:
    """A step to capture: whole numbers, so that a sum is exact in any order, and the platform's own operations."""

    def __init__(self, live: Live, rows: int) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64, device=live.device)
        self.table = live.random("float32", 50, 64).mul(4).round()
        self.weight = live.random("float32", 64, 64).mul(4).round()
        self.norm, self.ops = torch.ones(64, device=live.device), live.platform.layer_ops()
        self.outputs: list[torch.Tensor] = []

    def __call__(self) -> None:
        """Leaves its result in ``outputs``."""
        x = F.embedding(self.ids, self.table) @ self.weight
        x = x * 0.5
        x.add_(1)
        if self.ops is not None:
            x, _ = self.ops.add_rms_norm(x, x + 1, self.norm, 1e-5)
            x = self.ops.silu_and_mul(x)
        self.outputs.append(x)

    def plain(self, *ids: int) -> torch.Tensor:
        """What it gives for other ids, without a graph."""
        self.ids.copy_(torch.tensor(ids))
        self()
        return self.outputs.pop().clone()
