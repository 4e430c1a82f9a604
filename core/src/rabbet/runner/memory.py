"""Divides a device's memory: what the weights and a step take, and what is left for the KV cache."""

from __future__ import annotations

from rabbet.contracts.executor import MemoryReport
from rabbet.contracts.platform import MemoryInfo

__all__ = ["kv_budget"]


def kv_budget(
    now: MemoryInfo,
    *,
    fraction: float,
    weights_bytes: int,
    activation_bytes: int,
    fixed_bytes: int | None,
    ceiling_bytes: int | None,
) -> MemoryReport:
    """What the KV cache may take.

    Args:
        now: Memory after loading.
        fraction: Share of the device that everything together may take.
        weights_bytes: Of the model.
        activation_bytes: Of the largest step.
        fixed_bytes: The size that the user set, if any.
        ceiling_bytes: The platform's ceiling where the user set none.
    """
    used = now.total_bytes - now.free_bytes
    available = int(now.total_bytes * fraction) - used - activation_bytes
    available = min(available, now.free_bytes - activation_bytes)
    if ceiling_bytes is not None:
        available = min(available, ceiling_bytes)
    if fixed_bytes is not None:
        available = fixed_bytes
    return MemoryReport(
        total_bytes=now.total_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        available_kv_bytes=max(0, available),
    )
