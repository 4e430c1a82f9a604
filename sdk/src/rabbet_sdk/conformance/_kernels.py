"""What the suites of linear and of expert kernels share: poisoned views, and what a packed weight holds on to."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

from rabbet_sdk.conformance.cases import Claims

__all__ = ["DTYPES", "SENTINEL", "claimed_dtype", "held_bytes", "inside", "is_same", "tensors_of", "unnamed"]

DTYPES = ("float32", "bfloat16", "float16")
"""Types that a model computes in."""
SENTINEL = 777.0
_OPAQUE = (type, types.ModuleType, torch.dtype, torch.device)


def claimed_dtype(claims: Claims) -> str:
    """The first type of a model that is claimed."""
    return next((name for name in DTYPES if claims.allows("dtype", name)), DTYPES[0])


def unnamed(claims: Claims, **facts: str) -> str:
    """What of ``facts`` the claims do not name: for facts whose usual value needs no claim, while others do."""
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value not in claims.values(key))


def inside(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    """The same numbers as a view into a larger tensor, full of ``fill`` in front of, behind and between its rows."""
    shape = [size + 2 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 3]
    whole = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    view = whole[(*(slice(1, -1) for _ in shape[:-1]), slice(1, -2))]
    return view.copy_(tensor)


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equal, NaN included."""
    return torch.equal(*(tensor.contiguous().view(torch.uint8).cpu() for tensor in (left, right)))


def tensors_of(packed: Any) -> Iterator[torch.Tensor]:
    """Every tensor that an opaque object leads to, through attributes, slots, containers and closures."""
    seen, left = set(), [packed]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
            left += vars(value).values()
        elif isinstance(value, types.FunctionType):
            left += [cell.cell_contents for cell in value.__closure__ or ()]
        else:
            left += gc.get_referents(value)


def held_bytes(packed: Any) -> int:
    """Bytes of all tensors that it leads to, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(packed)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
