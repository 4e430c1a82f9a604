"""Real servers: the real model, real processes, real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

START_S = 90


@dataclass
class Server:
    """A running ``rabbet serve``."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def engine_pid(self) -> int:
        """The engine process, found as the child that runs it."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(status[1]) == self.process.pid and b"rabbet.engine.process" in command:
                return int(entry.name)
        raise AssertionError("the server has no engine process")

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(log: Path, *options: str, model: str = "smollm2", environment: dict[str, str] | None = None) -> Server:
    """Start a server and wait until it is ready, or until it ends."""
    port = free_port()
    command = [sys.executable, "-m", "rabbet", "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
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
