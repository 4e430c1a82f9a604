"""Writes what the driver of AMD GPUs would show of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Node:
    """A GPU as the driver tells of it. ``heaps``: type and GiB of each memory bank."""

    version: int = 90402
    unique_id: int = 0
    heaps: Sequence[tuple[int, int]] = ((1, 192),)
    product: str = ""
    is_readable: bool = True


def write_topology(root: Path, *nodes: Node, num_processors: int = 1) -> tuple[Path, Path]:
    """Directories of nodes and of render devices; processors are the first nodes."""
    topology, render = root / "nodes", root / "drm"
    topology.mkdir(parents=True)
    render.mkdir()
    for number in range(num_processors):
        _write(topology / str(number), ["cpu_cores_count 64", "simd_count 0", "gfx_target_version 0"], [(0, 512)])
    for number, node in enumerate(nodes, num_processors):
        minor = 128 + number - num_processors
        lines = [
            "cpu_cores_count 0", "simd_count 1216", "wave_front_size 64", f"gfx_target_version {node.version}",
            f"drm_render_minor {minor}", f"unique_id {node.unique_id}",
        ]  # fmt: skip
        # A container sees nodes of GPUs that it may not use, and nothing in them.
        _write(topology / str(number), lines if node.is_readable else [], node.heaps)
        if node.product:
            (render / f"renderD{minor}" / "device").mkdir(parents=True)
            (render / f"renderD{minor}" / "device" / "product_name").write_text(f"{node.product}\n")
    return topology, render


def _write(directory: Path, lines: Sequence[str], heaps: Sequence[tuple[int, int]]) -> None:
    directory.mkdir()
    (directory / "properties").write_text("".join(f"{line}\n" for line in lines))
    for number, (kind, gib) in enumerate(heaps):
        bank = directory / "mem_banks" / str(number)
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type {kind}\nsize_in_bytes {gib * GIB}\nflags 0\n")
