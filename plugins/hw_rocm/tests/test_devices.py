"""Detection and placement, on machines that the tests make up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rabbet_hw_rocm import devices, platform
from rabbet_hw_rocm.devices import Gpu, all_gpus, choose, restrict
from rabbet_hw_rocm.platform import RocmPlatform, torch_build
from rocm_topology import GIB, Node, write_topology

from rabbet.contracts.platform import PlatformQuery

VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
BF16 = PlatformQuery(dtype="bfloat16")
Install = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes this process see GPUs, a device file and a torch for ROCm."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "kfd"
    file.touch()
    monkeypatch.setattr(devices, "DEVICE", file)
    monkeypatch.setattr(platform, "torch_build", lambda: ("2.9.0+rocm6.4", "6.4.4"))
    monkeypatch.setattr(devices, "TOPOLOGY", tmp_path / "absent")

    def install(*nodes: Node, **options: int) -> None:
        topology, render = write_topology(tmp_path / "sys", *nodes, **options)
        monkeypatch.setattr(devices, "TOPOLOGY", topology)
        monkeypatch.setattr(devices, "RENDER", render)

    return install


def code_of(query: PlatformQuery) -> list[str]:
    return [item.code for item in RocmPlatform.supports(query)]


def test_gpus_are_told_with_their_facts(machine: Install) -> None:
    machine(
        Node(unique_id=0xABC, product="AMD Instinct MI300X"),
        Node(version=90010, unique_id=1 << 63, heaps=((1, 16), (2, 48), (4, 1))),
        Node(version=110000, heaps=((1, 24),)),
        num_processors=2,
    )
    assert all_gpus() == (
        Gpu(0, "GPU-0000000000000abc", "AMD Instinct MI300X", "gfx942", 192 * GIB),
        Gpu(1, "GPU-8000000000000000", "AMD GPU gfx90a", "gfx90a", 64 * GIB),
        Gpu(2, "", "AMD GPU gfx1100", "gfx1100", 24 * GIB),
    )
    assert [(item.index, item.arch) for item in RocmPlatform.detect()] == [(0, "gfx942"), (1, "gfx90a"), (2, "gfx1100")]


def test_nodes_are_numbered_as_numbers(machine: Install) -> None:
    machine(*(Node(unique_id=n + 1) for n in range(12)))
    assert [gpu.uuid for gpu in all_gpus()] == [f"GPU-{n + 1:016x}" for n in range(12)]


def test_what_a_container_may_not_use_is_not_counted(machine: Install) -> None:
    machine(Node(unique_id=1, is_readable=False), Node(unique_id=2))
    assert [(gpu.index, gpu.uuid) for gpu in all_gpus()] == [(0, "GPU-0000000000000002")]


@pytest.mark.parametrize(
    ("version", "arch"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110501, "gfx1151"), (120001, "gfx1201")],
)
def test_names_of_architectures(version: int, arch: str, machine: Install) -> None:
    machine(Node(version=version))
    assert all_gpus()[0].arch == arch


UUIDS = ("a000000000000001", "a000000000000002", "b000000000000003")


@pytest.mark.parametrize(
    ("rocr", "hip", "cuda", "expected"),
    [
        (None, None, None, "012"),
        ("", None, None, ""),
        ("2,0", None, None, "20"),
        ("GPU-B, gpu-a000000000000002", None, None, "21"),
        ("GPU-A,0", None, None, ""),
        ("GPU-", None, None, ""),
        ("0,7,1", None, None, "0"),
        ("0,0,1", None, None, "0"),
        ("-1", None, None, ""),
        (None, "1", None, "1"),
        (None, "", None, "012"),
        (None, "", "2", "2"),
        (None, None, "2,1", "21"),
        (None, "0", "2", "0"),
        (None, "0,0,1", None, "01"),
        (None, "-1", None, ""),
        (None, "GPU-b000000000000003,0", None, "20"),
        ("2,1", "1", None, "1"),
        ("2,1", "2", None, ""),
        ("2", None, "0", "2"),
    ],
)
def test_variables_are_read_as_the_runtimes_read_them(
    rocr: str | None,
    hip: str | None,
    cuda: str | None,
    expected: str,
    machine: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(*(Node(unique_id=int(uuid, 16)) for uuid in UUIDS))
    for name, value in zip(VARIABLES, (rocr, hip, cuda), strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    before = dict(os.environ)
    found = restrict(all_gpus())
    assert [gpu.uuid for gpu in found] == [f"GPU-{UUIDS[int(number)]}" for number in expected]
    assert [gpu.index for gpu in found] == list(range(len(expected)))
    assert dict(os.environ) == before


def test_a_machine_without_the_driver_is_passed_over_with_its_reason(machine: Install) -> None:
    assert all_gpus() == () and RocmPlatform.detect() == ()
    (refusal,) = RocmPlatform.supports(BF16)
    assert refusal.code == "NO_DEVICE" and "the amdgpu driver is not loaded" in refusal.message


@pytest.mark.parametrize(
    ("nodes", "variable", "said"),
    [
        ((), None, "lists none"),
        ((Node(is_readable=False),), None, "lists none"),
        ((Node(), Node()), ("HIP_VISIBLE_DEVICES", "-1"), "2 GPUs, all hidden by HIP_VISIBLE_DEVICES=-1"),
        ((Node(), Node()), ("ROCR_VISIBLE_DEVICES", ""), "2 GPUs, all hidden by ROCR_VISIBLE_DEVICES="),
        ((Node(version=90008),), None, "gfx908 is not supported"),
    ],
)
def test_why_there_is_no_gpu(
    nodes: tuple[Node, ...],
    variable: tuple[str, str] | None,
    said: str,
    machine: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(*nodes)
    if variable is not None:
        monkeypatch.setenv(*variable)
    (refusal,) = RocmPlatform.supports(BF16)
    assert refusal.code == "NO_DEVICE" and said in refusal.message
    assert RocmPlatform.detect() == ()


def test_a_torch_for_something_else_is_refused(machine: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(Node())
    assert not RocmPlatform.supports(BF16)
    monkeypatch.setattr(platform, "torch_build", lambda: ("2.9.0+cpu", ""))
    (refusal,) = RocmPlatform.supports(BF16)
    assert refusal.code == "MISSING_LIBRARY" and "torch 2.9.0+cpu is not built for ROCm" in refusal.message
    monkeypatch.setattr(platform, "torch_build", lambda: ("", ""))
    assert "torch is not installed" in RocmPlatform.supports(BF16)[0].message


def test_a_device_file_that_cannot_be_opened_is_told(machine: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(Node())
    devices.DEVICE.unlink()
    (refusal,) = RocmPlatform.supports(BF16)
    assert refusal.code == "ABSENT" and "cannot be opened" in refusal.message and "render" in refusal.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.43484'\n",
            ("2.9.0+rocm6.4", "6.4.43484"),
        ),
        ("__version__ = '2.4.0'\ncuda = None\nhip = '6.1.4'\n", ("2.4.0", "6.1.4")),
        ("__version__ = '2.13.0+cpu'\nhip: Optional[str] = None\nrocm: Optional[str] = None\n", ("2.13.0+cpu", "")),
        ("", ("", "")),
    ],
)
def test_torch_says_without_an_import_what_it_was_built_for(
    text: str, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(platform, "find_spec", lambda _name: spec)
    assert torch_build() == expected


def test_the_torch_that_is_here_is_understood() -> None:
    import torch

    assert torch_build() == (torch.__version__, torch.version.hip or "")


GPUS = (Gpu(0, "GPU-a1", "x", "gfx942", GIB), Gpu(2, "GPU-a2", "x", "gfx942", GIB), Gpu(3, "", "x", "gfx1100", GIB))


def test_ids_choose_by_hips_number_or_by_uuid() -> None:
    assert [gpu.index for gpu in choose(GPUS, ("2", "0"))] == [2, 0]
    assert [gpu.index for gpu in choose(GPUS, ("gpu-A2", "GPU-a1"))] == [2, 0]
    assert choose(GPUS, ()) == ()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (
            ("1",),
            "'1' names no GPU that can be used; there are: 0 = GPU-a1 (gfx942), 2 = GPU-a2 (gfx942), 3 = without a UUID",
        ),
        (("GPU-",), "names no GPU"),
        (("GPU-a",), "names no GPU"),
        (("",), "names no GPU"),
        (("2", "2"), "'2' is named twice"),
        (("0", "GPU-a2"), "numbers and UUIDs together (0, GPU-a2)"),
        (("-1",), "'-1' names no GPU"),
    ],
)
def test_wrong_ids_are_told(ids: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError) as told:
        choose(GPUS, ids)
    assert said in str(told.value)


def test_ids_and_ranks_are_checked(machine: Install) -> None:
    machine(Node(unique_id=1), Node(unique_id=2))
    assert code_of(PlatformQuery(dtype="bfloat16", num_local_ranks=2)) == []
    assert code_of(PlatformQuery(dtype="bfloat16", num_local_ranks=3)) == ["RANKS"]
    assert code_of(PlatformQuery(dtype="bfloat16", num_local_ranks=2, device_ids=("1",))) == ["RANKS"]
    assert code_of(PlatformQuery(dtype="bfloat16", device_ids=("7",))) == ["DEVICE_IDS"]
    assert code_of(PlatformQuery(dtype="float64")) == ["DTYPE"]


def test_a_gpu_that_kernels_do_not_run_on_keeps_its_number_and_is_passed_over(machine: Install) -> None:
    """As the small GPU in many processors."""
    machine(Node(version=100306), Node(unique_id=2))
    assert [(item.index, item.arch) for item in RocmPlatform.detect()] == [(1, "gfx942")]
    assert code_of(PlatformQuery(dtype="bfloat16", device_ids=("1",))) == []
    assert code_of(PlatformQuery(dtype="bfloat16", device_ids=("0",))) == ["DEVICE_IDS"]
    assert code_of(PlatformQuery(dtype="bfloat16", num_local_ranks=2)) == ["RANKS"]


def test_kernels_are_chosen_for_one_architecture(machine: Install) -> None:
    machine(Node(), Node(version=110000))
    assert code_of(PlatformQuery(dtype="bfloat16")) == []
    assert code_of(PlatformQuery(dtype="bfloat16", num_local_ranks=2)) == ["ARCH"]
    assert code_of(PlatformQuery(dtype="bfloat16", device_ids=("1",))) == ["ARCH"]


@pytest.mark.parametrize(
    ("memory", "is_server", "tokens", "seqs"),
    [(192, True, 8192, 1024), (64, True, 2048, 256), (64, False, 8192, 256), (192, False, 16384, 1024)],
)
def test_budgets_follow_the_memory_of_the_smallest_gpu(
    memory: int, is_server: bool, tokens: int, seqs: int, machine: Install
) -> None:
    machine(Node(heaps=((1, 256),)), Node(heaps=((1, memory),)))
    defaults = RocmPlatform.batch_defaults(is_server=is_server, world_size=1)
    assert (defaults.max_num_batched_tokens, defaults.max_num_seqs, defaults.memory_fraction) == (tokens, seqs, 0.92)


def test_detection_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from rabbet_hw_rocm.platform import RocmPlatform as P; P.detect(); P.batch_defaults(is_server=True, "
        "world_size=1); from rabbet.contracts.platform import PlatformQuery; P.supports(PlatformQuery(dtype='auto')); "
        "print(sorted({'torch', 'triton', 'numpy', 'amdsmi'} & set(sys.modules)))"
    )
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env)
    assert done.stdout.strip() == "[]"
