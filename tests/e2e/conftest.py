"""Real servers: the real model, real processes, real sockets."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

START_S = 90
WAIT_S = 30
COMMAND = str(Path(sys.executable).with_name("rabbet"))
Run = subprocess.CompletedProcess[str]


@dataclass
class Server:
    """A running ``rabbet serve``."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def engine_pid(self) -> int:
        """The engine process, found as the child that runs it."""
        for pid, parent, command in processes():
            if parent == self.process.pid and "rabbet.engine.process" in command:
                return pid
        raise AssertionError("the server has no engine process")

    def worker_pids(self) -> list[int]:
        """The processes of ranks, children of the engine."""
        engine = self.engine_pid()
        return [pid for pid, parent, command in processes() if parent == engine and "rabbet.worker" in command]

    @contextmanager
    def stream(self, *, key: str | None = None, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Open a streamed completion; gives its events up to [DONE]. A silent stream is an error after ``WAIT_S``."""
        whole = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "stream": True, **body}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with (
            httpx.Client(base_url=self.url, timeout=WAIT_S, headers=headers) as client,
            client.stream("POST", "/v1/completions", json=whole) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            yield (json.loads(line) for line in lines if line != "[DONE]")

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent's id and command line of each process that is alive."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX":
            yield int(entry.name), int(parent), command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(log: Path, *options: str, model: str = "smollm2", environment: dict[str, str] | None = None) -> Server:
    """Start a server and wait until it is ready, or until it ends."""
    port = free_port()
    command = [COMMAND, "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("wb") as handle:
        process = subprocess.Popen(command, stdout=handle, stderr=handle, env={**os.environ, **(environment or {})})
    server = Server(process, f"http://127.0.0.1:{port}", log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                return server
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    return server


@pytest.fixture(scope="session")
def start_server() -> Callable[..., Server]:
    """``start``, for fixtures that keep a server for longer than a test."""
    return start


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """``wait_until(condition, what, limit_s)`` polls a condition; fails with ``what`` when the time is over."""

    def wait(is_so: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that is ready in the time of the imports, with a context of 32768 tokens."""
    spec = importlib.util.spec_from_file_location("e2e_tiny_model", Path(__file__).with_name("tiny_model.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def rabbet() -> Callable[..., Run]:
    """Runs ``rabbet WORDS`` to its end; gives status, output and errors as text."""

    def run(*words: str, stdin: str = "", environment: dict[str, str] | None = None) -> Run:
        return subprocess.run(
            [COMMAND, *words], input=stdin, capture_output=True, text=True, timeout=START_S, check=False,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    return run


BROKEN_MODULES = {
    "broken_plugin": "raise ImportError('libmissing.so.1 is not there')",
    "crashing_hooks": """
from rabbet.contracts import register_hooks
from rabbet.contracts.hooks import Hooks

@register_hooks("crashing")
class Crashing(Hooks):
    def __init__(self):
        raise RuntimeError("no license server")
""",
}
BROKEN_POINTS = """[rabbet.attention]
broken = broken_plugin:Attention
[rabbet.platform]
broken = broken_plugin:Platform
[rabbet.weights]
broken = broken_plugin:Weights
[rabbet.hooks]
crashing = crashing_hooks:Crashing
[rabbet.manifest]
broken-plugin = broken_plugin:rabbet.toml
"""


@pytest.fixture(scope="session")
def broken_plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a bad distribution: attention, platform and weights do not import, hooks cannot be made.

    It says that it is one of the project's own, so that "auto" tries its plugins before all others.
    """
    site = tmp_path_factory.mktemp("site")
    for name, code in BROKEN_MODULES.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(code)
    provided = (("attention", "broken"), ("platform", "broken"), ("weights", "broken"), ("hooks", "crashing"))
    tables = [
        f'[[provides]]\nkind = "{kind}"\nname = "{name}"\ncontract = ">=1.0,<2"\npriority = 99\n'
        for kind, name in provided
    ]
    (site / "broken_plugin/rabbet.toml").write_text("\n".join(["schema = 1", *tables]))
    info = site / "broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(BROKEN_POINTS)
    catalog = site / "rabbet_catalog-99.dist-info"
    catalog.mkdir()
    (catalog / "METADATA").write_text("Metadata-Version: 2.1\nName: rabbet-catalog\nVersion: 99\n")
    (catalog / "entry_points.txt").write_text("[rabbet.catalog]\nmore = broken_plugin:catalog.toml\n")
    trusted = '[[distribution]]\nname = "broken-plugin"\nfirst_party = true\nprovides = []\n'
    (site / "broken_plugin/catalog.toml").write_text("schema = 1\n" + trusted)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that are gone after the test."""
    servers: list[Server] = []

    def run(*options: str, **more: object) -> Server:
        servers.append(start(tmp_path / f"server-{len(servers)}.log", *options, **more))  # type: ignore[arg-type]
        return servers[-1]

    yield run
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it alone."""
    running = start(tmp_path_factory.mktemp("e2e") / "server.log", "--max-model-len", "512", "--dtype", "float32")
    assert running.process.poll() is None, running.log.read_text()
    yield running
    assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """An HTTP client of the shared server."""
    with httpx.Client(base_url=server.url, timeout=60) as session:
        yield session
