"""A clock that moves when it is told to, so that deadlines are tested without waiting."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Stands in for ``time.monotonic`` and ``time.sleep``; times in seconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time now."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: If it would run backwards.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self.now_s += seconds

    sleep = advance
