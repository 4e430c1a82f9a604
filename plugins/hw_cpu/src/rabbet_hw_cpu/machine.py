"""What the operating system lets this process use: cores and memory, of the machine or of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

__all__ = ["MemoryUse", "are_cores_whole", "cores", "memory_limit_bytes"]

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def _folders(controller: str) -> list[Path]:
    """The control groups of this process, the innermost first; version 2, or version 1 with a folder a controller."""
    folders: list[Path] = []
    for line in _read(_MEMBERSHIP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        # Inside a container the path may be the host's; then the root is the container's own group.
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
    return [folder for folder in dict.fromkeys([*folders, _CGROUPS]) if folder.is_dir()]


def _read(path: Path) -> str:
    """The text of a small file, or nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _allowed_cores() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return list(range(os.cpu_count() or 1))


def _share_of_cores() -> int | None:
    """Processor time that the groups of this process allow, in cores, rounded up; None is all there is."""
    shares = []
    for folder in _folders("cpu"):
        quota, period = [*_read(folder / "cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            shares.append(math.ceil(int(quota) / int(period)))
    return min(shares, default=None)


def cores() -> list[int]:
    """The cores that this process may run on; no more of them than its share of processor time is worth."""
    allowed = _allowed_cores()
    return allowed[: max(1, _share_of_cores() or len(allowed))]


def are_cores_whole() -> bool:
    """Whether threads may be bound to ``cores()``; a share of the time is no reason to crowd onto the first ones."""
    return len(cores()) == len(_allowed_cores())


class MemoryUse:
    """Limits and use of memory, read once.

    Attributes:
        limit_bytes: The machine's memory, or the least limit of a group that holds this process.
        used_bytes: What is used of it, without what the system could drop at once.
    """

    def __init__(self) -> None:
        machine = psutil.virtual_memory()
        self.limit_bytes = int(machine.total)
        self.used_bytes = int(machine.total - machine.available)
        for folder in _folders("memory"):
            limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
            if limit is None or used is None or limit >= machine.total:
                continue
            statistics = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if " " in line)
            droppable = int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)
            used = max(0, used - droppable)
            if limit - used < self.free_bytes:
                self.limit_bytes, self.used_bytes = limit, used

    @property
    def free_bytes(self) -> int:
        """What is left."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limit_bytes() -> int:
    """The machine's memory, or the container's limit where that is less."""
    limits = [int(psutil.virtual_memory().total)]
    for folder in _folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None:
            limits.append(limit)
    return min(limits)
