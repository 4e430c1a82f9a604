"""Which AMD GPUs there are, by the driver's files: no library, no context, no torch.

The kernel driver lists the nodes of its topology in the order in which ROCm's runtime numbers GPUs, and leaves those out
that a container may not use. AMD SMI reads the same files, but numbers GPUs by their place on the bus.

Source: Linux kernel, ``drivers/gpu/drm/amd/amdkfd/kfd_topology.c`` (properties of nodes); ROCm documentation, "GPU isolation
techniques"; what the runtimes make of their variables is described in ``_restrict``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["DEVICE", "TOPOLOGY", "Gpu", "all_gpus", "choose", "restrict"]

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
"""The driver's nodes: processors and GPUs."""
RENDER = Path("/sys/class/drm")
"""Where a node's render device stands, which knows the product's name."""
DEVICE = Path("/dev/kfd")
"""What a process opens to compute."""

_LOCAL_HEAPS = (1, 2)
"""Types of memory banks: a GPU's own memory, visible to the host and not."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one partition of it.

    Attributes:
        index: Its number among those that this process may use, as HIP counts.
        uuid: As ``rocminfo`` prints it, ``GPU-`` and 16 digits; empty where the product has none.
        name: Of the product.
        arch: The instruction set, e.g. ``gfx942``.
        total_memory_bytes: Of the device.
    """

    index: int
    uuid: str
    name: str
    arch: str
    total_memory_bytes: int


def all_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine or container, whatever variables say; none where the driver is not loaded."""
    nodes = [entry for entry in _entries(TOPOLOGY) if entry.name.isdigit()]
    found: list[Gpu] = []
    for node in sorted(nodes, key=lambda entry: int(entry.name)):
        facts = _properties(node / "properties")
        if facts.get("simd_count", 0) > 0 and facts.get("gfx_target_version", 0) > 0:
            found.append(_gpu(len(found), node, facts))
    return tuple(found)


def _gpu(index: int, node: Path, facts: Mapping[str, int]) -> Gpu:
    arch, unique = _arch(facts["gfx_target_version"]), facts.get("unique_id", 0)
    banks = [_properties(bank / "properties") for bank in _entries(node / "mem_banks")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS)
    product = _text(RENDER / f"renderD{facts.get('drm_render_minor', 0)}" / "device" / "product_name").strip()
    return Gpu(index, f"GPU-{unique:016x}" if unique else "", product or f"AMD GPU {arch}", arch, memory)


def _arch(version: int) -> str:
    """``gfx_target_version`` has two decimal digits each for minor and stepping, which the name writes as one of 16."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    """What a file of the driver says; empty where it is not there, or may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _properties(file: Path) -> dict[str, int]:
    """Lines of a name and a whole number; others are left out."""
    pairs = [line.split() for line in _text(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def restrict(gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """What the variables leave, in their order, numbered anew.

    ``ROCR_VISIBLE_DEVICES`` comes first, and an empty one hides everything. HIP chooses from what that leaves, by
    ``HIP_VISIBLE_DEVICES`` or else ``CUDA_VISIBLE_DEVICES``; to it an empty one is one that is not set. Both take numbers and
    UUIDs, and ignore what follows an item that names nothing. HIP passes over a repetition, the runtime stops at it.
    """
    runtime = environment.get("ROCR_VISIBLE_DEVICES")
    if runtime is not None:
        gpus = _named(gpus, runtime, ends_at_repetition=True)
    if hip := environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES"):
        gpus = _named(gpus, hip, ends_at_repetition=False)
    return tuple(gpus)


def _named(gpus: Sequence[Gpu], value: str, *, ends_at_repetition: bool) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for item in value.split(","):
        gpu = _find(gpus, item.strip())
        if gpu is None or (gpu in chosen and ends_at_repetition):
            break
        if gpu not in chosen:
            chosen.append(gpu)
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(chosen))


def _find(gpus: Sequence[Gpu], item: str) -> Gpu | None:
    """The GPU with this number, or the only one whose UUID begins so."""
    if item.isdecimal():
        matching = [gpu for gpu in gpus if gpu.index == int(item)]
    else:
        matching = [gpu for gpu in gpus if len(item) > len("GPU-") and gpu.uuid.lower().startswith(item.lower())]
    return matching[0] if len(matching) == 1 else None


def choose(gpus: Sequence[Gpu], device_ids: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs that ``--device-ids`` names, in its order.

    Args:
        gpus: Those that may be used.
        device_ids: HIP's numbers, or UUIDs, whole or their unique beginnings.

    Raises:
        ValueError: An id that names no GPU, or one twice, or numbers beside UUIDs.
    """
    if len({item.isdecimal() for item in device_ids}) > 1:
        raise ValueError(f"numbers and UUIDs together ({', '.join(device_ids)}); use one or the other")
    chosen: list[Gpu] = []
    for item in device_ids:
        gpu = _find(gpus, item)
        if gpu is None:
            known = ", ".join(f"{gpu.index} = {gpu.uuid or 'without a UUID'} ({gpu.arch})" for gpu in gpus) or "none"
            raise ValueError(f"{item!r} names no GPU that can be used; there are: {known}")
        if gpu in chosen:
            raise ValueError(f"{item!r} is named twice")
        chosen.append(gpu)
    return tuple(chosen)
