"""Code that lies beside a model, kernels that hang, fail or crash: what is started, what is said, and what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from robustness_e2e import processes

KERNELS = """
import os, signal, time
from rabbet.contracts import register_linear_backend
from rabbet.layers.reference import TorchLinearBackend

@register_linear_backend("faulty-kernels")
class Faulty(TorchLinearBackend):
    def pack(self, weight_OI):
        if os.path.exists(os.environ["HANG"]):
            while True:
                signal.pause()
        return super().pack(weight_OI)

    def apply(self, x_TI, packed, bias_O=None):
        if x_TI.shape[0] == 111:
            raise MemoryError("no block of this size")
        if x_TI.shape[0] == 113:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().apply(x_TI, packed, bias_O)
"""


@pytest.fixture
def kernels(tmp_path: Path) -> tuple[str, ...]:
    """Options that choose kernels with faults; ``hang`` in the directory makes them hang while weights are packed."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    return ("--plugin", str(tmp_path / "kernels.py"), "--linear-backend", "faulty-kernels", "--dtype", "float32")


def below(root: int) -> set[int]:
    """The processes below one."""
    found = {root}
    for pid, parent, _ in sorted(processes()):
        if parent in found:
            found.add(pid)
    return found - {root}


def test_a_server_that_hangs_while_it_loads_says_so_and_can_be_stopped(
    kernels: tuple[str, ...], tiny_model: Path, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    from robustness_e2e import COMMAND, free_port

    (tmp_path / "hang").touch()
    port, log = free_port(), tmp_path / "log"
    command = [COMMAND, "serve", str(tiny_model), "--host", "127.0.0.1", "--port", str(port), *kernels]
    with log.open("wb") as handle:
        process = subprocess.Popen(
            command, stdout=handle, stderr=handle, env={**os.environ, "HANG": str(tmp_path / "hang")}
        )
    try:
        wait_until(lambda: "loading the model" in log.read_text(), "the phase is named", 60)
        assert f"importing {tmp_path / 'kernels.py'}" in log.read_text()
        answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
        assert answer.status_code == 503 and "Retry-After" in answer.headers
        children = below(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0, log.read_text()
        wait_until(lambda: not children & {pid for pid, _, _ in processes()}, "the engine is gone")
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


def test_a_log_on_a_full_disk_keeps_nobody_from_being_served(tiny_model: Path) -> None:
    from robustness_e2e import start

    server = start(Path("/dev/full"), "--max-model-len", "64", "--kv-cache-memory-bytes", "1M", model=str(tiny_model))
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] in (1, 2)
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_kernels_that_run_out_of_memory_fail_a_request_and_those_that_crash_end_the_server(
    serve: Callable[..., Any], kernels: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    server = serve(*kernels, model=str(tiny_model), environment={"HANG": str(tmp_path / "hang")})
    assert server.process.poll() is None, server.log.read_text()
    body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(prompt: list[int]) -> httpx.Response:
            return client.post("/v1/completions", json={**body, "prompt": prompt})

        before = ask([1, 2, 3]).json()["choices"][0]["token_ids"]
        failed = ask([5] * 111)
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
        assert "no block of this size" not in failed.text and "kernels.py" not in failed.text
        assert ask([1, 2, 3]).json()["choices"][0]["token_ids"] == before
        assert client.get("/health").status_code == 200
        crashed = ask([6] * 113)
        assert crashed.status_code in (500, 503) and "error" in crashed.json()
    assert server.process.wait(timeout=20) == 3
    assert "signal 11" in server.log.read_text().splitlines()[-1]


CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import {base}
class Own({base}):
    model_type = "own"
"""
GENERATE = """
import json, sys
from rabbet import LLM, SamplingParams
from rabbet.errors import RabbetError

found = {}
for directory in sys.argv[1:]:
    try:
        with LLM(directory, max_model_len=64, dtype="float32", engine_process=False) as llm:
            made = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
            found[directory] = str(len(made[0].outputs[0].token_ids))
    except RabbetError as error:
        found[directory] = str(error)
print(json.dumps(found))
"""


class _Touch:
    """What a pickle can do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def write_traps(root: Path, tiny_model: Path) -> dict[str, tuple[Path, str]]:
    """Model directories with code or pickles in them, each with what comes of it: tokens, or words of an error."""
    import pickle

    marker = str(root / "ran")
    names = ("known", "unknown", "tokenizer", "pickled")
    for name in names:
        shutil.copytree(tiny_model, root / name)
        (root / name / "own.py").write_text(CODE.format(marker=marker, base="PreTrainedConfig"))
        (root / name / "tok.py").write_text(CODE.format(marker=marker, base="PreTrainedTokenizerFast"))

    def change(name: str, file: str, **values: Any) -> None:
        path = root / name / file
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | values))

    code = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["tok.Own", "tok.Own"]}
    for name in ("known", "unknown"):
        change(name, "config.json", auto_map=code, trust_remote_code=True)
        change(name, "generation_config.json", auto_map=code, custom_generate="own.py")
        change(name, "tokenizer_config.json", auto_map=code, tokenizer_class="Own")
        change(name, "preprocessor_config.json", auto_map={"AutoProcessor": "own.Own"})
    change("unknown", "config.json", model_type="own", architectures=["OwnForCausalLM"])
    change("tokenizer", "tokenizer_config.json", auto_map=code, tokenizer_class="Own")
    (root / "tokenizer/tokenizer.json").unlink()
    (root / "pickled/model.safetensors").unlink()
    (root / "pickled/pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Touch(marker)}))
    said = {"known": "2", "unknown": "auto_map", "tokenizer": "--trust-remote-code", "pickled": "pickled weights"}
    return {name: (root / name, said[name]) for name in names}


def test_code_and_pickles_beside_a_model_never_run(tiny_model: Path, tmp_path: Path) -> None:
    """From a local path, in every file that may name code, with assertions compiled away; the model cannot allow it itself."""
    traps = write_traps(tmp_path, tiny_model)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONOPTIMIZE": "1"}
    command = [sys.executable, "-O", "-c", GENERATE, *(str(directory) for directory, _ in traps.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, (directory, words) in traps.items():
        assert words in found[str(directory)], (name, found)
    assert not (tmp_path / "ran").exists()
