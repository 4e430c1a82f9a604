"""How a plugin says what it can do: a query goes in, a list of refusals comes out (empty: usable)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Refusal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One reason why a plugin cannot serve a query.

    Attributes:
        code: Upper-case word for programs, e.g. ``HEAD_DIM``, ``DTYPE``, ``ARCH``, ``DEVICE``, ``MISSING_LIBRARY``.
            ``DEVICE``, ``ARCH`` and ``NO_DEVICE`` say that it is for other hardware, which ``--plugins-strict`` allows.
        message: The reason for people, with the value and the limit.
        fix: What to do about it; may be empty.
    """

    code: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" (try: {self.fix})" if self.fix else "")
