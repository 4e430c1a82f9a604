"""The wheels work without the checkout: built, installed into a new environment, a token generated."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import rabbet
from rabbet import LLM, SamplingParams
from rabbet_hw_cpu import native

if __name__ == "__main__":
    assert not rabbet.__file__.startswith(sys.argv[1]), rabbet.__file__
    with LLM("smollm2", max_model_len=64, kv_cache_memory_bytes="16M") as llm:
        output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
        print(repr(output.outputs[0].text), llm.model_info.names[0], native.library() is not None)
"""


@pytest.mark.slow
def test_wheels_generate_a_token_in_a_new_environment(tmp_path: Path) -> None:
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"

    def run(*command: str, **options: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "", **options}
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    built = run("bash", str(ROOT / "scripts" / "wheels.sh"), str(wheels), PYTHON=sys.executable)
    names = {Path(line).name.split("-")[0] for line in built.split()}
    assert names == {"rabbet", "rabbet_catalog", "rabbet_core", "rabbet_sdk"} | {f"rabbet_{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml")}
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    # What others publish comes from the environment of the tests, without the editable installs of this checkout.
    others = tmp_path / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "rabbet" not in entry.name and not entry.name.endswith(".pth"):
            (others / entry.name).symlink_to(entry)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "others.pth").write_text(f"{others}\n")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *(str(path) for path in sorted(wheels.glob("*.whl"))))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert run(python, str(program), str(ROOT)).strip() == "' Paris' smollm2 True"
    listed = run(str(environment / "bin" / "rabbet"), "plugins", "list")
    assert "rabbet-hw-cpu" in listed and "installed twice" not in listed
