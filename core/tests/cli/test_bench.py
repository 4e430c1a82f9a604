"""The benches count right, check the work that was done, and say why it was not."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rabbet.cli.bench_offline import BenchError, Shape, _check
from rabbet.cli.bench_server import _percentiles
from rabbet.front.outputs import CompletionOutput, RequestOutput
from rabbet.types.sampling import SamplingParams

Run = Callable[..., tuple[int, str, str]]
TESTS = Path(__file__).parents[1]


# ---- against a server


def test_load_of_a_server_is_measured(rabbet: Run, server: Any, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    status, out, error = rabbet(
        "bench", "serve", "--url", server.url, "--num-clients", "3", "--duration", "0.3", "--input-len", "4:6",
        "--output-len", "3", "--vocab-size", "50", "--output-json", str(path),
    )  # fmt: skip
    assert status == 0, error
    figures = json.loads(path.read_text())
    bodies = [body for _, body in server.requests if body]
    assert figures["requests"] == len(bodies) >= 3 and figures["failed"] == 0
    assert figures["output_tokens_per_s"] == pytest.approx(3 * figures["requests_per_s"])
    assert 4 <= figures["input_tokens_per_s"] / figures["requests_per_s"] <= 6
    assert all(body["ignore_eos"] and body["stream"] and body["max_tokens"] == 3 for body in bodies)
    assert all(4 <= len(body["prompt"]) <= 6 and all(10 <= token < 50 for token in body["prompt"]) for body in bodies)
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert 0 <= figures[f"{name}_p50_ms"] <= figures[f"{name}_p95_ms"] <= figures[f"{name}_p99_ms"]
    shown = dict(line.split(None, 1) for line in out.splitlines())
    assert shown["requests_per_s"] == f"{figures['requests_per_s']:.4g}" and shown["clients"] == "3"


def test_the_first_prompts_follow_from_the_seed(rabbet: Run, server: Any) -> None:
    firsts = []
    for seed in ("1", "1", "2"):
        server.requests.clear()
        assert (
            rabbet("bench", "serve", "--url", server.url, "--num-clients", "1", "--duration", "0.05", "--seed", seed)[0]
            == 0
        )
        firsts.append(next(body["prompt"] for _, body in server.requests if body))
    assert firsts[0] == firsts[1] != firsts[2]


@pytest.mark.parametrize(
    ("failure", "message"),
    [((400, {"error": {"message": "token id 9000 is outside the vocabulary"}}), "400 token id 9000 is outside"), ((503, "busy"), "503 busy")],
)  # fmt: skip
def test_a_server_that_refuses_everything_is_left_alone(rabbet: Run, server: Any, failure: Any, message: str) -> None:
    server.failure = failure
    status, _, error = rabbet("bench", "serve", "--url", server.url, "--num-clients", "2", "--duration", "600")
    assert status == 1
    assert "none of 6 requests succeeded" in error and message in error


def test_answers_that_are_too_short_or_break_do_not_count(rabbet: Run, server: Any) -> None:
    server.lost = 1
    status, _, error = rabbet(
        "bench", "serve", "--url", server.url, "--num-clients", "1", "--duration", "600", "--output-len", "4"
    )
    assert status == 1 and "3 tokens came, not 4" in error
    server.lost, server.stream_failure = 0, "the engine died"
    status, _, error = rabbet(
        "bench", "serve", "--url", server.url, "--num-clients", "1", "--duration", "600", "--output-len", "4"
    )
    assert status == 1 and "the engine died" in error


def test_what_is_measured_is_said_before_and_no_bar_is_drawn_into_a_file(rabbet: Run, server: Any) -> None:
    status, _, error = rabbet("bench", "serve", "--url", server.url, "--num-clients", "2", "--duration", "0.05")
    assert (status, error) == (0, f"measuring tiny at {server.url}: 2 clients for 0.05 s\n")


def test_a_terminal_shows_a_bar(rabbet: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", screen)
    assert rabbet("bench", "serve", "--url", server.url, "--num-clients", "1", "--duration", "0.6")[0] == 0
    assert re.search(r"measuring tiny .*\n.*\r.* of 1 s \|.*\|, \d+ requests, 0 failed", screen.getvalue(), re.DOTALL)


def test_percentiles_of_few_values() -> None:
    assert _percentiles("x", []) == {}
    one = _percentiles("x", [0.5])
    assert set(one.values()) == {500.0}
    many = _percentiles("x", [number / 1000 for number in range(101)])
    assert (many["x_p50_ms"], many["x_p95_ms"], many["x_p99_ms"]) == (50.0, 95.0, 99.0)


# ---- shapes


def test_prompts_follow_from_the_seed_and_differ_between_repetitions() -> None:
    shape = Shape(num_prompts=20, input_len=(3, 9), output_len=(2, 5), prefix_len=4, seed=1)
    prompts, params = shape.draw(1000, 0)
    again, _ = shape.draw(1000, 0)
    other, same = shape.draw(1000, 1)
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    assert prompts == again
    assert [len(item["prompt_token_ids"]) for item in other] == [len(item) for item in ids]
    assert [item.max_tokens for item in same] == [item.max_tokens for item in params]
    assert len({tuple(item[:4]) for item in ids}) == 1
    assert not {tuple(item) for item in ids} & {tuple(item["prompt_token_ids"]) for item in other}
    assert all(7 <= len(item) <= 13 and all(0 <= token < 1000 for token in item) for item in ids)
    assert all(2 <= item.max_tokens <= 5 and item.ignore_eos and item.temperature == 0 for item in params)


@pytest.mark.parametrize("vocab_size", [1, 2, 64, 300, 401, 49152])
def test_prompts_stay_within_any_vocabulary(vocab_size: int) -> None:
    shape = Shape(num_prompts=5, input_len=(8, 8), output_len=(1, 1), prefix_len=0, seed=0)
    for repetition in range(3):
        prompts, _ = shape.draw(vocab_size, repetition)
        assert all(0 <= token < vocab_size for prompt in prompts for token in prompt["prompt_token_ids"])


def output(*, tokens: int, error: str | None = None) -> RequestOutput:
    completion = CompletionOutput(index=0, token_ids=[1] * tokens, error=error)
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1], outputs=[completion], finished=True)


def test_work_that_was_not_done_is_an_error() -> None:
    params = [SamplingParams(max_tokens=3)]
    assert _check([output(tokens=3)], params) == 3
    with pytest.raises(BenchError, match="request 0 gave 2 tokens, not 3"):
        _check([output(tokens=2)], params)
    with pytest.raises(BenchError, match="request 0 failed: NaN in the logits"):
        _check([output(tokens=3, error="NaN in the logits")], params)


# ---- offline, on a device that computes nothing


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words that start an engine on the null device."""
    spec = importlib.util.spec_from_file_location("byte_tokenizer", TESTS / "front/byte_tokenizer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("model")
    module.write_byte_level(directory)
    return [
        str(directory), "--device", "hollow", "--load-format", "hollow", "--attention-backend", "hollow", "--linear-backend",
        "hollow", "--distributed-executor-backend", "hollow", "--max-model-len", "128", "--plugin", str(TESTS / "engine/null_plugins.py"),
    ]  # fmt: skip


def test_throughput_counts_tokens_and_requests(rabbet: Run, engine: list[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    status, out, error = rabbet(
        "bench", "throughput", *engine, "--num-prompts", "6", "--input-len", "5", "--output-len", "3:4", "--prefix-len", "2",
        "--repeat", "3", "--output-json", str(path),
    )  # fmt: skip
    assert status == 0, error
    figures = json.loads(path.read_text())
    assert figures["input_tokens"] == 6 * 7 and 18 <= figures["output_tokens"] <= 24
    assert figures["tokens_per_s"] == pytest.approx((42 + figures["output_tokens"]) / figures["seconds"])
    assert figures["requests_per_s"] == pytest.approx(6 / figures["seconds"])
    assert figures["seconds_min"] <= figures["seconds"]
    assert (figures["input_len"], figures["output_len"], figures["repeat"]) == ("5:5", "3:4", 3)
    assert "tokens_per_s" in out


def test_latency_gives_time_to_first_token_and_time_a_token(rabbet: Run, engine: list[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    status, _, error = rabbet(
        "bench", "latency", *engine, "--batch-size", "2", "--input-len", "6", "--output-len", "5", "--repeat", "2",
        "--output-json", str(path),
    )  # fmt: skip
    assert status == 0, error
    figures = json.loads(path.read_text())
    assert figures["time_to_first_token_ms"] > 0
    assert 0 <= figures["time_per_token_min_ms"] <= figures["time_per_token_ms"]
    assert (figures["batch_size"], figures["input_len"], figures["output_len"]) == (2, 6, 5)


def test_a_shape_that_does_not_fit_says_the_limit(rabbet: Run, engine: list[str]) -> None:
    status, _, error = rabbet("bench", "latency", *engine, "--input-len", "200", "--output-len", "5")
    assert status == 1
    assert "200" in error and "128" in error and error.count("\n") == 1


def test_a_shape_whose_output_does_not_fit_is_not_measured(rabbet: Run, engine: list[str]) -> None:
    status, _, error = rabbet("bench", "latency", *engine, "--input-len", "120", "--output-len", "50")
    assert status == 1 and "not 50; raise --max-model-len" in error


def test_a_file_that_cannot_be_written_is_named(rabbet: Run, server: Any) -> None:
    status, _, error = rabbet(
        "bench", "serve", "--url", server.url, "--duration", "0.01", "--output-json", "/nowhere/f.json"
    )
    assert status == 1 and "--output-json /nowhere/f.json cannot be written" in error
