"""Tells a lack of memory from other failures, whoever allocated."""

from __future__ import annotations

__all__ = ["lacks_memory"]

_SIGNS = ("MemoryError", "OutOfMemoryError", "allocate memory")


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says so: Python's own, a device's, torch's of the host; also where another process tells of it."""
    told = f"{type(error).__mro__} {error}"
    return any(sign in told for sign in _SIGNS)
