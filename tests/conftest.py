"""What several folders of tests need: an environment of wheels, away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class WheelEnvironment:
    """A virtual environment that holds the built wheels and nothing of the checkout.

    Attributes:
        directory: An empty directory to work in.
        wheels: Directory of the wheels of every distribution.
        bin: Directory of its commands.
    """

    directory: Path
    wheels: Path
    bin: Path

    def run(self, *command: str, code: int = 0, **options: str) -> str:
        """Run a command there; returns what it wrote to its standard output."""
        environment = {**os.environ, "PYTHONPATH": "", **options}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.directory, env=environment, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *wheels: Path) -> None:
        """Install wheels, without their dependencies and without a network."""
        self.run(str(self.bin / "python"), "-m", "pip", "install", "-q", "--no-index", "--no-deps", *map(str, wheels))


@pytest.fixture(scope="session")
def wheel_environment(tmp_path_factory: pytest.TempPathFactory) -> WheelEnvironment:
    """Wheels of every distribution, built and installed into a new environment."""
    base = tmp_path_factory.mktemp("wheels")
    made = WheelEnvironment(directory=base, wheels=base / "wheels", bin=base / "environment" / "bin")
    made.run("bash", str(ROOT / "scripts" / "wheels.sh"), str(made.wheels), PYTHON=sys.executable)
    made.run(sys.executable, "-m", "venv", str(made.bin.parent))
    # What others publish comes from the environment of the tests, without the editable installs of this checkout.
    others = base / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "rabbet" not in entry.name and not entry.name.endswith(".pth"):
            (others / entry.name).symlink_to(entry)
    site = made.run(str(made.bin / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "others.pth").write_text(f"{others}\n")
    made.install(*sorted(made.wheels.glob("*.whl")))
    return made
