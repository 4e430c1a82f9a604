"""The environment of child processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["child_environment"]


def child_environment(*first: Path, **variables: str) -> dict[str, str]:
    """This process's variables and ``variables``, with its whole ``sys.path`` behind the directories ``first``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, first), *filter(None, sys.path)]), **variables}
