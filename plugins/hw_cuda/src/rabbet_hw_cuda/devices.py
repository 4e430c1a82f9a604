"""Which NVIDIA GPUs there are, by NVML: no context, no torch, nothing that a fork could not survive.

Source: NVML API reference, "Device Queries".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Gpu", "choose", "visible_gpus"]

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_SUCCESS = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: Its number among those that this process may use, as CUDA counts.
        uuid: As ``nvidia-smi -L`` prints it.
        name: Of the product.
        arch: ``sm_`` and the compute capability.
        total_memory_bytes: Of the device.
    """

    index: int
    uuid: str
    name: str
    arch: str
    total_memory_bytes: int


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, all if it is not set; none where there is no driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if library.nvmlInit_v2() != _SUCCESS:
        return ()
    try:
        return _restrict(_all_gpus(library), os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        library.nvmlShutdown()


def _all_gpus(library: ctypes.CDLL) -> list[Gpu]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return []
    found = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        name, uuid = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_NAME_BYTES)
        major, minor = ctypes.c_int(), ctypes.c_int()
        calls = (
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
            library.nvmlDeviceGetName(handle, name, _NAME_BYTES),
            library.nvmlDeviceGetUUID(handle, uuid, _NAME_BYTES),
            library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
            library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
        )
        if all(code == _SUCCESS for code in calls):
            arch = f"sm_{major.value}{minor.value}"
            found.append(Gpu(index, uuid.value.decode(), name.value.decode(), arch, memory.total))
    return found


def _restrict(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """What the variable names, in its order, numbered anew; as CUDA does, what follows a name without a GPU is ignored."""
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for item in visible.split(","):
        gpu = _find(gpus, item.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(Gpu(index, gpu.uuid, gpu.name, gpu.arch, gpu.total_memory_bytes) for index, gpu in enumerate(chosen))


def _find(gpus: Sequence[Gpu], item: str) -> Gpu | None:
    if item.isdigit():
        return gpus[int(item)] if int(item) < len(gpus) else None
    matching = [gpu for gpu in gpus if item and gpu.uuid.lower().startswith(item.lower())]
    return matching[0] if len(matching) == 1 else None


def choose(gpus: Sequence[Gpu], device_ids: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs that ``--device-ids`` names, in its order.

    Args:
        gpus: Those that are visible.
        device_ids: Numbers among them, or UUIDs, whole or their unique beginnings.

    Raises:
        ValueError: An id that names no GPU, or one twice, or numbers beside UUIDs.
    """
    known = ", ".join(f"{gpu.index} = {gpu.uuid}" for gpu in gpus) or "none"
    if len({item.isdigit() for item in device_ids}) > 1:
        raise ValueError("numbers and UUIDs together; use one or the other")
    chosen: list[Gpu] = []
    for item in device_ids:
        gpu = _find(gpus, item)
        if gpu is None:
            raise ValueError(f"{item!r} names no GPU; there are: {known}")
        if gpu in chosen:
            raise ValueError(f"{item!r} is named twice")
        chosen.append(gpu)
    return tuple(chosen)
