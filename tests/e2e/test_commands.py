"""A guarded server and the commands of a terminal: keys, a full queue, chat, complete, bench, plugins, collect-env."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

KEYS = ("first-secret", "second-secret")
BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def guarded(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the real model with two keys, for one request at once and one that waits."""
    server = start_server(
        tmp_path_factory.mktemp("guarded") / "server.log", "--api-key", KEYS[0], "--api-key", KEYS[1],
        "--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M",
    )  # fmt: skip
    assert server.process.poll() is None, server.log.read_text()
    yield server
    assert server.stop() == 0
    log = server.log.read_text()
    assert not any(key in log for key in KEYS) and "Traceback" not in log


@pytest.fixture
def client(guarded: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=60, headers={"Authorization": f"Bearer {KEYS[0]}"}) as session:
        yield session


def routes() -> list[tuple[str, str]]:
    """Method and path of each route that core registers."""
    from rabbet.config.schema import ServerConfig
    from rabbet.server.app import build_app
    from rabbet.server.state import ServerState

    app = build_app(ServerState(ServerConfig()))
    return sorted((method, route.path) for route in app.routes for method in route.methods)


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"rabbet:{name}{{"))


def shown(table: str) -> list[str]:
    """Names of the figures that a benchmark prints."""
    return [line.split()[0] for line in table.splitlines()]


def test_every_route_but_the_probes_needs_a_key(guarded: Any) -> None:
    from rabbet.server.middleware import PUBLIC_PATHS

    wrong = [None, "", "Bearer", "Bearer wrong", f"Bearer {KEYS[0][:-1]}", f"Bearer {KEYS[0]}x", KEYS[0],
             f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}, {KEYS[1]}", f"Bearer {KEYS[0]} {KEYS[1]}"]  # fmt: skip
    found = routes()
    assert {path for _, path in found} >= {*BODIES, *PUBLIC_PATHS, "/metrics", "/v1/models", "/openapi.json", "/docs"}
    with httpx.Client(base_url=guarded.url, timeout=60) as http:
        for method, path in found:
            path = path.replace("{name:path}", "smollm2")

            def ask(value: str | None, path: str = path, method: str = method) -> httpx.Response:
                headers = {} if value is None else {"Authorization": value}
                return http.request(method, path, json=BODIES.get(path), headers=headers)

            for value in wrong:
                answer = ask(value)
                if path in PUBLIC_PATHS:
                    assert answer.status_code == 200, (method, path, value)
                    continue
                assert answer.status_code == 401, (method, path, value)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            for key in KEYS:
                assert ask(f"Bearer {key}").status_code == 200, (method, path)


def test_no_spelling_of_a_path_goes_round_the_keys(guarded: Any) -> None:
    for path in (
        "//v1//models",
        "/v1/models/",
        "/metrics/",
        "/%761/models",
        "/health/../metrics",
        "/health%2f..%2fmetrics",
    ):
        # By hand: a client would tidy the path.
        answer = httpx.get(httpx.URL(guarded.url, raw_path=path.encode()), timeout=10)
        assert answer.status_code == 401, path
    assert httpx.get(f"{guarded.url}/v1/models?api_key={KEYS[0]}", timeout=10).status_code == 401


def test_a_full_queue_refuses_and_a_client_that_leaves_makes_room(
    guarded: Any, client: httpx.Client, wait_until: Callable[..., None]
) -> None:
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with guarded.stream(key=KEYS[0], max_tokens=1000) as events:
            next(events)
            wait_until(lambda: metric(client, "kv_cache_usage_perc") > 0, "the stream holds blocks")
            waiting = pool.submit(client.post, "/v1/completions", json=body)
            wait_until(lambda: metric(client, "num_requests_waiting") == 1, "one request waits")
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "the limit is 1" in refused.json()["error"]["message"]
            assert metric(client, "admission_rejections_total") >= 1
            assert next(events)["choices"], "the stream goes on"
        # The stream was left with most of its tokens to come.
        assert waiting.result().json()["usage"]["completion_tokens"] == 2
    wait_until(lambda: metric(client, "kv_cache_usage_perc") == 0, "all blocks are free")
    assert metric(client, "num_requests_running") == 0
    assert client.post("/v1/completions", json=body).status_code == 200


def test_complete_and_chat_talk_to_the_server(guarded: Any, rabbet: Callable[..., Any]) -> None:
    once = ("--url", guarded.url, "--temperature", "0", "--max-tokens", "16")
    key = {"RABBET_API_KEY": KEYS[1]}
    done = rabbet("complete", *once, "--api-key", KEYS[0], "-q", "The capital of France is")
    assert done.returncode == 0 and "Paris" in done.stdout, done
    assert "16 tokens" in done.stderr and "tokens/s" in done.stderr
    question = "What is the capital of France?\nAnd of Italy?\n"
    done = rabbet("chat", *once, stdin=question, environment=key)
    assert done.returncode == 0 and "Paris" in done.stdout and "Rome" in done.stdout, done
    assert len(done.stderr.splitlines()) == 2, "a line of speed for each answer"
    done = rabbet("complete", *once, "--model", "smollm2", stdin="One, two, three,\n", environment=key)
    assert done.returncode == 0 and "four" in done.stdout, done
    refused = rabbet("chat", *once, "--api-key", "wrong", "-q", "Hello")
    assert refused.returncode == 1 and "--api-key" in refused.stderr and refused.stderr.count("\n") == 1
    nobody = rabbet("chat", "--url", "http://127.0.0.1:1", "-q", "Hello")
    assert nobody.returncode == 1 and "rabbet serve MODEL" in nobody.stderr and nobody.stderr.count("\n") == 1


def test_bench_serve_measures_the_server(guarded: Any, rabbet: Callable[..., Any], tmp_path: Path) -> None:
    done = rabbet(
        "bench", "serve", "--url", guarded.url, "--api-key", KEYS[0], "--num-clients", "1", "--duration", "0.3",
        "--input-len", "4:8", "--output-len", "4", "--output-json", str(tmp_path / "figures.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert shown(done.stdout) == list(figures)
    assert figures["requests"] > 0 and figures["failed"] == 0 and figures["clients"] == 1, figures
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(4 * figures["requests"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("throughput", "--num-prompts", "3"), {"num_prompts": 3, "output_tokens": 12, "input_tokens": 24}),
        (("latency", "--batch-size", "2"), {"batch_size": 2, "input_len": 8, "output_len": 4}),
    ],
)
def test_offline_benchmarks(
    tiny_model: Path, rabbet: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], expected: dict[str, int]
) -> None:
    file = tmp_path / "figures.json"
    done = rabbet(
        "bench", *words, "--input-len", "8", "--output-len", "4", "--repeat", "1", "--output-json", str(file),
        str(tiny_model), "--kv-cache-memory-bytes", "1M", "--max-model-len", "64",
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    figures = json.loads(file.read_text())
    assert shown(done.stdout) == list(figures)
    assert {key: figures[key] for key in expected} == expected
    assert figures["ready_s"] > 0 and figures["peak_memory_mib"] > 0


def test_plugins_are_listed_and_explained(
    rabbet: Callable[..., Any], broken_plugin: dict[str, str], tiny_model: Path
) -> None:
    def run(*words: str) -> str:
        done = rabbet("plugins", *words, environment=broken_plugin)
        assert done.returncode == 0 and done.stderr == "", done
        return str(done.stdout)

    rows = json.loads(run("list", "--json"))["plugins"]
    by_name = {(row["kind"], row["name"]): row for row in rows}
    assert by_name["attention", "cpu"]["bundled"] and by_name["attention", "broken"]["state"] == "compatible"
    table = run("list")
    assert len(table.splitlines()) == len(rows) + 1 and "broken-plugin" in table
    assert {row["kind"] for row in json.loads(run("list", "--kind", "weights", "--json"))["plugins"]} == {"weights"}
    [info] = json.loads(run("info", "attention/broken", "--json"))
    assert info["entry_point"] == "broken_plugin:Attention" and info["distribution"] == "broken-plugin"
    assert "broken_plugin:Attention" in run("info", "broken")
    assert "fcfs" in run("why", "scheduler")
    # This one does what a start would do: imports, and says so of what it passes over.
    done = rabbet("plugins", "why", "platform", "--model", str(tiny_model), environment=broken_plugin)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    assert "->  cpu" in done.stdout and "99 broken" in done.stdout and "libmissing.so.1" in done.stdout


def test_plugins_doctor_tells_the_well_from_the_broken(
    rabbet: Callable[..., Any], broken_plugin: dict[str, str]
) -> None:
    well = rabbet("plugins", "doctor", "fcfs", "--json")
    assert well.returncode == 0, well
    [row] = json.loads(well.stdout)
    assert row["ok"] and row["seconds"] >= 0 and "ms" in row["detail"]
    for more in ((), ("--json",)):
        broken = rabbet("plugins", "doctor", "broken", *more, environment=broken_plugin)
        assert broken.returncode == 1 and "libmissing.so.1" in broken.stdout and broken.stderr == "", broken
    unknown = rabbet("plugins", "info", "fcsf")
    assert unknown.returncode == 2 and "did you mean fcfs" in unknown.stderr and unknown.stderr.count("\n") == 1


def test_collect_env_has_versions_and_plugins_and_no_secrets(
    rabbet: Callable[..., Any], broken_plugin: dict[str, str]
) -> None:
    done = rabbet("collect-env", environment={**broken_plugin, "RABBET_API_KEY": KEYS[0]})
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    # A hook plugin that fails is left out of the report's extra sections, and that is all.
    assert done.stderr.count("\n") == 1 and "hooks/crashing" in done.stderr, done
    for part in (
        "## System",
        "## Packages",
        "rabbet-core ",
        "torch ",
        "## Plugins",
        "attention/cpu",
        "attention/broken",
    ):
        assert part in done.stdout
    assert KEYS[0] not in done.stdout
