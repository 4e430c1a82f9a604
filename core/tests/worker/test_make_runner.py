"""Core's runner for executors of others, in a process that they started themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.contracts import registration
from rabbet.registry.onefile import MODULE_PREFIX
from rabbet.worker.uni import UniExecutor

CHILD = """
import sys
from rabbet.contracts.executor import Executor, ModelRunner
runner = Executor.make_runner(sys.stdin.buffer.read())
assert isinstance(runner, ModelRunner)
runner.load()
print(sorted(runner.kv_cache_specs()))
runner.close()
"""


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UniExecutor]:
    # The file registers what others register, too: nothing of it may stay in this process.
    monkeypatch.setattr(registration, "_staged", {})
    before = set(sys.modules)
    shutil.copy(Path(__file__).parent / "faulty_plugins.py", tmp_path / "own_faulty_plugins.py")
    values = {
        "architectures": ["FaultyForCausalLM"], "vocab_size": 32, "hidden_size": 4, "num_attention_heads": 1,
        "max_position_embeddings": 64, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = engine_config_from_kwargs(
        str(tmp_path), device="faulty", attention_backend="faulty", load_format="dummy", linear_backend="torch",
        plugin=[str(tmp_path / "own_faulty_plugins.py")],
    )  # fmt: skip
    made = UniExecutor(resolve(config, is_server=False))
    yield made
    made.shutdown()
    for name in set(sys.modules) - before:
        if name.startswith(MODULE_PREFIX):
            del sys.modules[name]


def child(data: bytes) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", CHILD], input=data, capture_output=True, check=False, timeout=60, env=environment
    )


def test_bytes_of_the_configuration_make_a_runner_in_another_process(executor: UniExecutor) -> None:
    made = executor.make_runner(executor.config)
    made.load()
    specs = sorted(made.kv_cache_specs())
    made.close()
    done = child(executor.config_bytes())
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == str(specs) and specs


def test_a_process_with_other_plugins_is_refused(executor: UniExecutor) -> None:
    digest = next(part[3] for part in executor.config.composition.parts if part[0] == "linear/torch")
    done = child(executor.config_bytes().replace(digest.encode(), b"0" * len(digest)))
    told = done.stderr.decode()
    assert done.returncode == 1 and "CompositionMismatchError" in told and "linear/torch: decided" in told
