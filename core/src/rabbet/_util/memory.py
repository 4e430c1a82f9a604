"""Tells a lack of memory from other failures, whoever allocated."""

from __future__ import annotations

__all__ = ["lacks_memory"]


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says so: Python's and numpy's own, a device's, or the plain one of torch's host allocator."""
    is_plain = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return is_plain or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
