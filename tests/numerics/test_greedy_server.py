"""Through ``rabbet serve``, its processes and sockets, the tokens are those of transformers too."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

START_S = 120


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of the float32 model at its defaults."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "rabbet", "serve", str(model_dir), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--served-model-name", "reference", "--kv-cache-memory-bytes", "256M", "--max-model-len", "512",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as made:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not is_ready(made):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            yield made
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_completions_of_all_prompts_at_once(
    client: httpx.Client, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    body = {"prompt": prompts, "max_tokens": 64, "temperature": 0, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected


def test_streamed_chats_side_by_side(client: httpx.Client, questions: list[str], expected: list[list[int]]) -> None:
    def chat(question: str) -> list[int]:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        tokens: list[int] = []
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
        return tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(chat, questions)) == expected
