"""The standard suite: on this machine, where it finds what there is, and on a GPU that the processor plays."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rabbet_sdk.conformance import PlatformConformance
from rabbet_sdk.environment import child_environment
from rabbet_sdk.fakes.dist import write_distribution
from rocm_topology import Node, write_topology

HERE = Path(__file__).parent
MANIFEST = HERE.parent / "src" / "rabbet_hw_rocm" / "rabbet.toml"
SUITE = """
from rabbet_sdk.conformance import PlatformConformance

class TestSimulated(PlatformConformance):
    plugin = "platform/rocm_simulated"
    hidden = {"ROCR_VISIBLE_DEVICES": ""}
    allocation_bytes = 64 << 20
"""


class TestRocmPlatform(PlatformConformance):
    plugin = "platform/rocm"
    hidden = {"ROCR_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_the_suite_passes_on_a_gpu_that_the_processor_plays(tmp_path: Path) -> None:
    """In a process of its own: no other test may see that distribution, nor its ``torch.cuda``."""
    site, package = tmp_path / "site", "rabbet_simulated_rocm"
    write_distribution(
        site,
        "rabbet-simulated-rocm",
        provides={"platform/rocm_simulated": f"{package}.simulated:SimulatedRocm"},
        manifest=MANIFEST.read_text().replace('name = "rocm"', 'name = "rocm_simulated"'),
        modules={"simulated.py": (HERE / "simulated.py").read_text()},
    )
    write_topology(site / package / "sys", Node(unique_id=1), Node(unique_id=2))
    (site / package / "kfd").touch()
    (tmp_path / "test_simulated.py").write_text(SUITE)
    hidden = dict.fromkeys(("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    environment = {name: value for name, value in child_environment(site).items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-q", "test_simulated.py"], cwd=tmp_path, env=environment, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    # What is claimed was run, not left out.
    claims = tomllib.loads(MANIFEST.read_text())["provides"][0]["claims"]
    for feature in claims["features"]:
        assert f"feature {feature}" not in done.stdout
    assert "unavailable" not in done.stdout, done.stdout[-6000:]
