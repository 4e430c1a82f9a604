"""The wheels work without the checkout: built, installed into a new environment, a token generated."""

from __future__ import annotations

from pathlib import Path

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


def test_wheels_generate_a_token_in_a_new_environment(wheel_environment, tmp_path: Path) -> None:
    parts = {
        f"rabbet_{path.parent.name}"
        for folder in ("libs", "plugins")
        for path in ROOT.glob(f"{folder}/*/pyproject.toml")
    }
    built = {path.name.split("-")[0] for path in wheel_environment.wheels.glob("*.whl")}
    assert built == {"rabbet", "rabbet_catalog", "rabbet_core", "rabbet_sdk"} | parts
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = wheel_environment.run(str(wheel_environment.bin / "python"), str(program), str(ROOT))
    assert out.strip() == "' Paris' smollm2 True"
    listed = wheel_environment.run(str(wheel_environment.bin / "rabbet"), "plugins", "list")
    assert "rabbet-hw-cpu" in listed and "installed twice" not in listed
