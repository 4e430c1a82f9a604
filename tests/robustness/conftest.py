"""One server on the tiny model for all tests of this folder, and neighbours that must never notice them."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

_path = Path(__file__).parents[1] / "e2e/conftest.py"
_spec = importlib.util.spec_from_file_location("robustness_e2e", _path)
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
sys.modules["robustness_e2e"] = _e2e
_spec.loader.exec_module(_e2e)
serve, tiny_model, wait_until, rabbet = _e2e.serve, _e2e.tiny_model, _e2e.wait_until, _e2e.rabbet

PROMPTS = ([1, 2, 3], [40, 50], [7] * 30, [200, 100, 50, 25])
GREEDY = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Any]:
    """Eight requests at once and a context of 512 tokens, in a cache of 1024: long ones preempt one another."""
    log = tmp_path_factory.mktemp("robustness") / "server.log"
    options = ("--max-model-len", "512", "--dtype", "float32", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "1M")
    running = _e2e.start(log, *options, model=str(tiny_model))
    assert running.process.poll() is None, log.read_text()
    yield running
    assert running.stop() == 0, log.read_text()


@pytest.fixture
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as session:
        yield session


def metrics(client: httpx.Client) -> dict[str, float]:
    """Numbers by name, summed over labels."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("rabbet:")
            found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.fixture
def idle(client: httpx.Client, wait_until: Callable[..., None]) -> Callable[[], None]:
    """Waits until nothing runs or waits and every block is free."""

    def is_idle() -> bool:
        now = metrics(client)
        return now["num_requests_running"] == now["num_requests_waiting"] == now["kv_cache_usage_perc"] == 0

    return lambda: wait_until(is_idle, "no request is left and all blocks are free")


@pytest.fixture
def neighbours(server: Any) -> Callable[[], Any]:
    """``with neighbours():`` greedy requests run all the time; each must give the tokens that it gives alone."""

    def ask(session: httpx.Client, prompt: list[int]) -> list[int]:
        answer = session.post("/v1/completions", json={"prompt": prompt, **GREEDY})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    @contextmanager
    def running() -> Iterator[None]:
        with httpx.Client(base_url=server.url, timeout=60) as session:
            alone = [ask(session, prompt) for prompt in PROMPTS]
            stop, wrong, counts = threading.Event(), [], [0] * len(PROMPTS)

            def repeat(number: int) -> None:
                try:
                    with httpx.Client(base_url=server.url, timeout=60) as mine:
                        while not (stop.is_set() and counts[number]):
                            got = ask(mine, PROMPTS[number])
                            counts[number] += 1
                            if got != alone[number]:
                                wrong.append((number, got))
                except BaseException as error:  # told by the test
                    wrong.append((number, error))

            threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(PROMPTS))]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
            assert not wrong and all(counts), (wrong[:2], counts)

    return running
