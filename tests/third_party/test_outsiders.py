"""Plugins as outsiders write them: wheels beside Rabbet's wheels in a new environment, used through flags alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
OUTSIDERS = sorted(path.parent.name for path in HERE.glob("*/pyproject.toml"))
START_S = 90


@pytest.fixture(scope="session")
def environment(wheel_environment):
    """The environment of wheels, with the outsiders' wheels in it."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", "--no-build-isolation")
    wheels = wheel_environment.directory / "outsiders"
    for name in OUTSIDERS:
        # A copy: building leaves folders beside the sources.
        source = shutil.copytree(HERE / name, wheel_environment.directory / "sources" / name)
        wheel_environment.run(*pip, "-w", str(wheels), str(source))
    wheel_environment.install(*sorted(wheels.glob("*.whl")))
    return wheel_environment


@pytest.fixture
def serve(environment, tmp_path: Path) -> Callable[..., object]:
    """Serve the embedded model in that environment; gives a client."""

    @contextmanager
    def run(*options: str) -> Iterator[httpx.Client]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = tmp_path / "log"
        command = [str(environment.bin / "rabbet"), "serve", "smollm2", "--host", "127.0.0.1", "--port", str(port), *options]
        command += ["--max-model-len", "128", "--dtype", "float32"]
        with log.open("wb") as handle:
            process = subprocess.Popen(
                command, cwd=environment.directory, stdout=handle, stderr=handle, env={**os.environ, "PYTHONPATH": ""}
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                deadline = time.monotonic() + START_S
                while not _is_ready(client):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
                yield client
        finally:
            process.terminate()
            process.wait(timeout=30)

    return run


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def answer(client: httpx.Client) -> str:
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    got = client.post("/v1/completions", json=body)
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]["text"]


def test_outsiders_are_listed_and_never_taken_by_auto(environment) -> None:
    rows = json.loads(environment.run(str(environment.bin / "rabbet"), "plugins", "list", "--json"))["plugins"]
    found = {row["name"]: row for row in rows if row["distribution"].startswith("acme-")}
    assert set(found) == set(OUTSIDERS)
    assert all(row["state"] == "compatible" and not row["bundled"] and row["priority"] <= 49 for row in found.values())
    why = environment.run(str(environment.bin / "rabbet"), "plugins", "why", "platform")
    assert "->  cpu" in why and "acme_chip" in why


def test_a_quantisation_method_and_a_platform_serve_together(serve) -> None:
    with serve("--quantization", "acme_round8", "--device", "acme_chip") as client:
        assert answer(client) == " Paris"
        metrics = client.get("/metrics").text
        assert "acme" in json.dumps(client.get("/version").json()) or "rabbet" in metrics


def test_a_hook_plugin_adds_a_command_and_only_by_permission_a_route(environment, serve) -> None:
    out = environment.run(str(environment.bin / "rabbet"), "acme-greet", "--name", "Ada", RABBET_PLUGINS_ALLOW="*,acme_greeter")
    assert out.strip() == "acme greets Ada"
    with serve("--plugins-allow", "*,acme_greeter") as client:
        assert client.get("/acme/greet").json() == {"acme": "greets you"}
        assert answer(client) == " Paris"
    with serve() as client:
        assert client.get("/acme/greet").status_code == 404


def test_a_proposer_passes_its_suite_and_is_refused_by_its_class_path_in_words_of_its_own(environment) -> None:
    """Speculation is not run yet: what can be proved is proved, and the server says what it cannot do."""
    python = str(environment.bin / "python")
    out = environment.run(python, "-m", "rabbet_sdk", "check", "proposer/acme_bigram")
    assert " pass, 0 fail" in out and "unavailable" not in out, out
    choice = {"method": "custom_class", "model": "acme_bigram:Bigram", "num_speculative_tokens": 3}
    command = [str(environment.bin / "rabbet"), "serve", "smollm2", "--speculative-config"]
    for model, said in (("acme_bigram:Bigram", "this release runs no proposer plugins yet"), ("acme_bigram", "class path")):
        done = subprocess.run(
            [*command, json.dumps(choice | {"model": model})], cwd=environment.directory, env={**os.environ, "PYTHONPATH": ""},
            capture_output=True, text=True, check=False, timeout=START_S,
        )  # fmt: skip
        assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
