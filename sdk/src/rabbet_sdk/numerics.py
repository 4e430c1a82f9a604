"""The bound that numeric results are held to: relative to a plain computation in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ErrorBound", "assert_within", "poison"]

_FACTOR = 2.0
_SMALLEST = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBound:
    """Errors against float64.

    Attributes:
        got: Largest error of the plugin.
        plain: Largest error of the plain computation.
        limit: ``2 * plain + epsilon``: epsilon is a few roundings of the dtype at the oracle's largest magnitude.
    """

    got: float
    plain: float
    limit: float


def assert_within(
    got: torch.Tensor,
    *,
    plain: torch.Tensor,
    oracle: torch.Tensor,
    factor: float = _FACTOR,
    record: Any = None,
) -> ErrorBound:
    """Check ``err(got) <= factor * err(plain) + epsilon``, both against ``oracle``; NaN fails.

    Args:
        got: The plugin's result.
        plain: The same computed plainly in the same dtype (torch, no tricks).
        oracle: The same in float64 from the same inputs.
        factor: How many times the plain error is allowed.
        record: pytest's ``record_property``; keeps the share of the bound that was used, for the certificate.

    Raises:
        AssertionError: With both errors, the limit and the worst place.
    """
    dtype = got.dtype
    exact = oracle.double().cpu()
    mine = (got.double().cpu() - exact).abs()
    theirs = (plain.double().cpu() - exact).abs()
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    limit = factor * (float(theirs.max()) if theirs.numel() else 0.0) + _SMALLEST.get(dtype, 1e-6) * max(scale, 1.0)
    worst = float(mine.nan_to_num(nan=float("inf")).max()) if mine.numel() else 0.0
    bound = ErrorBound(got=worst, plain=float(theirs.max()) if theirs.numel() else 0.0, limit=limit)
    if record is not None:
        record("rabbet_error", (str(dtype).removeprefix("torch."), worst / limit if limit else 0.0))
    if not worst <= limit:
        place = tuple(int(i) for i in torch.unravel_index(mine.nan_to_num(nan=float("inf")).argmax(), mine.shape))
        raise AssertionError(
            f"error {worst:.3g} against float64 is above {limit:.3g} (plain {dtype}: {bound.plain:.3g}); worst at "
            f"{place}: got {float(got.double().cpu()[place]):.6g}, exact {float(exact[place]):.6g}"
        )
    return bound


def poison(tensor: torch.Tensor, sentinel: float = float("nan")) -> torch.Tensor:
    """Fill ``tensor`` in place with NaN, or with ``sentinel``; integer tensors with their largest value."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(sentinel)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)
