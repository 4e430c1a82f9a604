"""Detection and placement, on a driver that the tests make up."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest
from rabbet_hw_cuda import devices
from rabbet_hw_cuda.devices import Gpu, choose, visible_gpus
from rabbet_hw_cuda.platform import CudaPlatform

from rabbet.contracts.platform import PlatformQuery

GIB = 1 << 30


class Driver:
    """NVML with GPUs of a given memory and capability."""

    def __init__(self, *gpus: tuple[int, int], fails: str = "") -> None:
        self._gpus, self._fails = gpus, fails
        self.num_open = 0

    def __getattr__(self, name: str) -> Any:
        if name == self._fails:
            return lambda *_: 999
        return {
            "nvmlInit_v2": self._open, "nvmlShutdown": self._close, "nvmlDeviceGetCount_v2": self._count,
            "nvmlDeviceGetHandleByIndex_v2": self._handle, "nvmlDeviceGetName": self._name, "nvmlDeviceGetUUID": self._uuid,
            "nvmlDeviceGetMemoryInfo": self._memory, "nvmlDeviceGetCudaComputeCapability": self._capability,
        }[name]  # fmt: skip

    def _open(self) -> int:
        self.num_open += 1
        return 0

    def _close(self) -> int:
        self.num_open -= 1
        return 0

    def _count(self, out: Any) -> int:
        out._obj.value = len(self._gpus)
        return 0

    def _handle(self, index: int, out: Any) -> int:
        # A handle is a pointer, and none of them is null.
        out._obj.value = index + 1
        return 0

    def _name(self, handle: ctypes.c_void_p, out: Any, size: int) -> int:
        out.value = b"NVIDIA Example"
        return 0

    def _uuid(self, handle: Any, out: Any, size: int) -> int:
        out.value = f"GPU-{handle.value - 1}a-{handle.value - 1}".encode()
        return 0

    def _memory(self, handle: Any, out: Any) -> int:
        out._obj.total = self._gpus[handle.value - 1][0] * GIB
        return 0

    def _capability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = divmod(self._gpus[handle.value - 1][1], 10)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus: tuple[int, int], **options: Any) -> Driver:
        made = Driver(*gpus, **options)
        monkeypatch.setattr(devices.ctypes, "CDLL", lambda _name: made)
        return made

    return install


def test_gpus_are_told_with_their_facts_and_the_driver_is_left(driver: Any) -> None:
    made = driver((141, 90), (80, 80), (16, 75))
    assert [(gpu.index, gpu.uuid, gpu.arch, gpu.total_memory_bytes) for gpu in visible_gpus()] == [
        (0, "GPU-0a-0", "sm_90", 141 * GIB),
        (1, "GPU-1a-1", "sm_80", 80 * GIB),
        (2, "GPU-2a-2", "sm_75", 16 * GIB),
    ]
    assert made.num_open == 0
    assert [device.arch for device in CudaPlatform.detect()] == ["sm_90", "sm_80"], "kernels need 8.0"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", ["GPU-1a-1"]),
        ("2,0", ["GPU-2a-2", "GPU-0a-0"]),
        ("GPU-1a,GPU-0", ["GPU-1a-1", "GPU-0a-0"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["GPU-0a-0"]),
        ("0,0", ["GPU-0a-0"]),
        ("GPU-", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(
    visible: str, expected: list[str], driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver((141, 90), (141, 90), (141, 90))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = visible_gpus()
    assert [gpu.uuid for gpu in found] == expected
    assert [gpu.index for gpu in found] == list(range(len(expected)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_no_driver_and_a_broken_one_mean_no_gpus(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in ("nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetUUID"):
        driver((141, 90), fails=broken)
        assert visible_gpus() == ()

    def missing(_name: str) -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    assert visible_gpus() == () and CudaPlatform.detect() == ()
    assert CudaPlatform.supports(PlatformQuery(dtype="bfloat16"))[0].code == "NO_DEVICE"


GPUS = tuple(Gpu(index, f"GPU-{index}a-{index}", "x", "sm_90", GIB) for index in range(3))


def test_ids_choose_by_number_or_by_uuid() -> None:
    assert [gpu.index for gpu in choose(GPUS, ("2", "0"))] == [2, 0]
    assert [gpu.index for gpu in choose(GPUS, ("gpu-1A-1", "GPU-0"))] == [1, 0]
    assert choose(GPUS, ()) == ()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (("3",), "'3' names no GPU; there are: 0 = GPU-0a-0"),
        (("GPU-",), "names no GPU"),
        (("1", "1"), "'1' is named twice"),
        (("0", "GPU-1a"), "numbers and UUIDs together"),
        (("-1",), "'-1' names no GPU"),
    ],
)
def test_wrong_ids_are_told(ids: tuple[str, ...], said: str, driver: Any) -> None:
    with pytest.raises(ValueError, match=said):
        choose(GPUS, ids)
    driver((141, 90), (141, 90), (141, 90))
    refusals = CudaPlatform.supports(PlatformQuery(dtype="bfloat16", device_ids=ids))
    assert [item.code for item in refusals] == ["DEVICE_IDS"] and said.split(";")[0] in refusals[0].message


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
def test_dtypes_that_no_kernel_has_are_refused(dtype: str, driver: Any) -> None:
    driver((141, 90))
    (refusal,) = CudaPlatform.supports(PlatformQuery(dtype=dtype))
    assert refusal.code == "DTYPE" and dtype in refusal.message


def test_ranks_need_gpus(driver: Any) -> None:
    driver((141, 90), (141, 90))
    assert not CudaPlatform.supports(PlatformQuery(dtype="bfloat16", num_local_ranks=2))
    for query in (
        PlatformQuery(dtype="bfloat16", num_local_ranks=3),
        PlatformQuery(dtype="bfloat16", num_local_ranks=2, device_ids=("1",)),
    ):
        (refusal,) = CudaPlatform.supports(query)
        assert refusal.code == "RANKS" and "GPUs" in refusal.message


@pytest.mark.parametrize(
    ("memory", "is_server", "tokens", "seqs"),
    [(180, True, 16384, 1024), (141, True, 8192, 1024), (80, False, 16384, 1024), (24, True, 2048, 256), (24, False, 8192, 256)],
)
def test_budgets_follow_the_memory_of_the_smallest_gpu(
    memory: int, is_server: bool, tokens: int, seqs: int, driver: Any
) -> None:
    driver((190, 90), (memory, 90))
    defaults = CudaPlatform.batch_defaults(is_server=is_server, world_size=1)
    assert (defaults.max_num_batched_tokens, defaults.max_num_seqs, defaults.memory_fraction) == (tokens, seqs, 0.92)


def test_detection_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from rabbet_hw_cuda.platform import CudaPlatform; CudaPlatform.detect(); "
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
