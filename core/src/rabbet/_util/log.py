"""One form of log lines for every process: time, level, message, on standard error."""

from __future__ import annotations

import logging
import sys

__all__ = ["log_to_stderr"]


def log_to_stderr(level: str, *, who: str = "") -> None:
    """Send this process's log to standard error, whatever handled it before.

    Args:
        level: Name of the least severe level that is logged.
        who: Stands before each message.
    """
    form = f"%(asctime)s %(levelname)s {who}%(message)s"
    logging.basicConfig(level=level.upper(), format=form, datefmt="%H:%M:%S", stream=sys.stderr, force=True)
