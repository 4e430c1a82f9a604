"""The life of a server: the port first, the truth at /health, a drain on a signal, a status that says how it went."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_scripted import ScriptedClient, parse_events

from rabbet.config.check import check_conflicts
from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.schema import ServerConfig
from rabbet.contracts.observability import StatLogger
from rabbet.errors import ConfigError, EngineDeadError, WeightsError
from rabbet.front.async_llm import AsyncLLM
from rabbet.server import run as run_module
from rabbet.server.run import EXIT_CONFIG, EXIT_ENGINE_DEAD, EXIT_FAILED, serve

BODY = {"prompt": "x", "max_tokens": 3, "stream": True}


class Life:
    """A server in this process, and what happens to it."""

    def __init__(self, model_dir: Path, path: Path) -> None:
        self.model_dir, self.uds = model_dir, str(path)
        self.llm: AsyncLLM | None = None
        self.engine: ScriptedClient | None = None
        self.may_start = True
        self.start_error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def from_config(self, config: Any, **_options: Any) -> AsyncLLM:
        self.gate = asyncio.Event()
        if self.start_error is not None:
            raise self.start_error
        if not self.may_start:
            await asyncio.Event().wait()
        self.engine = ScriptedClient(self.model_dir)
        self.engine.script = lambda _request: [97, self.gate, 98, 99]
        self.llm = AsyncLLM(config, self.engine)
        return self.llm

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=self.uds), base_url="http://x", timeout=30)


@pytest.fixture
def life(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    found = Life(model_dir, tmp_path / "s")
    monkeypatch.setattr(AsyncLLM, "from_config", found.from_config)
    return found


@pytest.fixture
def live(life: Life, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Serves, and runs a coroutine function beside; returns the exit status."""

    def run(work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]], **options: Any) -> int:
        failures: list[BaseException] = []

        async def beside(*arguments: Any) -> int:
            server = run_module._Server(*arguments)

            async def guarded() -> None:
                async with life.http() as client:
                    try:
                        await work(client)
                    except BaseException as error:
                        failures.append(error)
                        # Not by a signal: the server may have ended, and its handlers with it.
                        server._on_signal()
                        server._on_signal()

            task = asyncio.create_task(guarded())
            status = await server.run()
            async with asyncio.timeout(30):
                await task
            return status

        monkeypatch.setattr(run_module, "_serve", beside)
        timeout_s = options.pop("shutdown_timeout", 0.0)
        config = engine_config_from_kwargs("scripted", shutdown_timeout=timeout_s)
        status = serve(config, ServerConfig(uds=life.uds, **options))
        if failures:
            raise failures[0]
        assert not Path(life.uds).exists()
        return status

    return run


def kill() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.005)


async def running(life: Life, count: int = 1) -> None:
    async with asyncio.timeout(30):
        while life.engine is None or len(life.engine.requests) < count:
            await asyncio.sleep(0.005)


def test_serves_until_a_signal_and_ends_well(
    life: Life, live: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        assert life.gate is not None
        life.gate.set()
        assert parse_events((await client.post("/v1/completions", json=BODY)).text)
        kill()

    with caplog.at_level(logging.INFO):
        assert live(work) == 0
    assert life.engine is not None and life.engine.is_shut
    line = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("ready at"))
    for word in (life.uds, "scripted", "256", "6.2", "/docs", "composition "):
        assert word in line


def test_health_says_starting_before_the_engine_is_there(life: Life, live: Callable[..., int]) -> None:
    life.may_start = False

    async def work(client: httpx.AsyncClient) -> None:
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
        kill()

    assert live(work) == 0


def test_running_requests_end_before_the_limit(life: Life, live: Callable[..., int]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await running(life)
        kill()
        async with asyncio.timeout(30):
            while (answer := await client.get("/health")).status_code == 200:
                await asyncio.sleep(0.001)
        assert answer.json()["error"]["code"] == "draining"
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert life.gate is not None
        life.gate.set()
        chunks = parse_events((await asked).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"

    assert live(work, shutdown_timeout=20.0) == 0


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_at_the_limit_running_requests_are_cut_with_an_error(
    life: Life, live: Callable[..., int], timeout_s: float
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        whole = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": False}))
        await running(life, 2)
        kill()
        chunks = parse_events((await asked).text)
        assert chunks[-1]["error"]["code"] == "shutting_down" and chunks[0]["choices"][0]["text"] == "a"
        assert (await whole).status_code == 503

    assert live(work, shutdown_timeout=timeout_s) == 0


def test_a_second_signal_ends_the_wait(life: Life, live: Callable[..., int]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await running(life)
        kill()
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(httpx.HTTPError):
            # The stream ends with an error event, or with the connection.
            if "shutting_down" in (await asked).text:
                raise httpx.ReadError("")

    assert live(work, shutdown_timeout=3600.0) == 0


def test_the_death_of_the_engine_ends_open_requests_and_the_server(
    life: Life, live: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        whole = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": False}))
        await running(life, 2)
        assert life.engine is not None
        life.engine._die(EngineDeadError("the engine process was killed by signal 9"))
        assert parse_events((await asked).text)[-1]["error"]["code"] == "engine_dead"
        assert (await whole).status_code == 503

    assert live(work, shutdown_timeout=3600.0) == EXIT_ENGINE_DEAD
    assert "killed by signal 9" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(("error", "status"), [(ConfigError("bad"), EXIT_CONFIG), (WeightsError("bad"), EXIT_FAILED)])
def test_a_start_that_fails_says_why_in_one_line(
    life: Life, live: Callable[..., int], caplog: pytest.LogCaptureFixture, error: Exception, status: int
) -> None:
    life.start_error = error

    async def nothing(_client: httpx.AsyncClient) -> None:
        return None

    assert live(nothing) == status
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == ["bad"]


def test_a_port_in_use_is_said_before_anything_loads(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ServerConfig(host="127.0.0.1", port=port)
        assert serve(engine_config_from_kwargs("scripted"), config) == EXIT_FAILED
    assert life.gate is None
    assert len(caplog.records) == 1 and f"127.0.0.1:{port}" in caplog.text and "--port" in caplog.text


def test_a_unix_path_is_taken_only_from_the_dead(life: Life, live: Callable[..., int]) -> None:
    path = Path(life.uds)
    path.write_text("precious")
    engine = engine_config_from_kwargs("scripted")
    assert serve(engine, ServerConfig(uds=life.uds)) == EXIT_CONFIG and path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(life.uds)
        living.listen()
        assert serve(engine, ServerConfig(uds=life.uds)) == EXIT_FAILED and path.exists()

    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        assert path.stat().st_mode & 0o777 == 0o600
        kill()

    assert live(work) == 0


def test_a_template_that_cannot_be_read_is_a_wrong_configuration(tmp_path: Path) -> None:
    config = ServerConfig(chat_template=str(tmp_path / "none.jinja"), uds=str(tmp_path / "s"))
    assert serve(engine_config_from_kwargs("scripted"), config) == EXIT_CONFIG


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_a_wrong_configuration(life: Life, option: str, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(uds=life.uds, **{option: "hremes"})
    assert serve(engine_config_from_kwargs("scripted"), config) == EXIT_CONFIG
    assert "hremes" in caplog.text and life.gate is None


@pytest.mark.parametrize(
    ("template", "line"),
    [("ok\n{% if %}", 2), ("{{ x | no_such_filter }}", 1), ("\n\n{% for x in y %}", 3), ("{{ " + "(" * 9999, None),
     ("{% for x in y %}" * 30 + "{% endfor %}" * 30, None)],
    ids=["syntax", "filter", "open", "deep", "nested"],
)  # fmt: skip
def test_a_template_that_does_not_compile_is_a_wrong_configuration(
    life: Life, tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, line: int | None
) -> None:
    path = tmp_path / "wrong.jinja"
    path.write_text(template)
    for given, shown in ((str(path), str(path)), (template, "--chat-template")):
        caplog.clear()
        status = serve(engine_config_from_kwargs("scripted"), ServerConfig(chat_template=given, uds=life.uds))
        (message,) = [record.getMessage() for record in caplog.records]
        assert status == EXIT_CONFIG and life.gate is None and "--chat-template" in message and shown in message
        assert line is None or f"line {line}" in message


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates with their keys, one key that asks for a password, and what is none."""
    root = tmp_path_factory.mktemp("keys")
    for name in ("a", "b"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
             "-subj", "/CN=localhost", "-keyout", f"{name}.key", "-out", f"{name}.crt"], cwd=root, check=True, capture_output=True,
        )  # fmt: skip
    subprocess.run(
        ["openssl", "pkey", "-in", "a.key", "-aes128", "-passout", "pass:secret", "-out", "locked.key"],
        cwd=root,
        check=True,
    )
    (root / "text.key").write_text("no key")
    return root


@pytest.mark.parametrize(
    ("certificate", "key", "cause"),
    [("none.crt", "a.key", "No such file"), ("a.crt", "none.key", "No such file"), ("text.key", "a.key", ""),
     ("a.crt", "text.key", ""), ("a.crt", "b.key", "KEY_VALUES_MISMATCH"), ("a.crt", "locked.key", ""), (".", "a.key", "directory")],
)  # fmt: skip
def test_a_wrong_certificate_or_key_is_said_before_anything_loads(
    life: Life, keys: Path, caplog: pytest.LogCaptureFixture, certificate: str, key: str, cause: str
) -> None:
    config = ServerConfig(uds=life.uds, ssl_certfile=str(keys / certificate), ssl_keyfile=str(keys / key))
    assert serve(engine_config_from_kwargs("scripted"), config) == EXIT_CONFIG and life.gate is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"--ssl-certfile {keys / certificate}" in message and f"--ssl-keyfile {keys / key}" in message
    assert cause in message


def test_a_good_certificate_serves(life: Life, live: Callable[..., int], keys: Path) -> None:
    async def work(_client: httpx.AsyncClient) -> None:
        transport = httpx.AsyncHTTPTransport(uds=life.uds, verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://x", timeout=30) as client:
            await ready(client)
        kill()

    assert live(work, ssl_certfile=str(keys / "a.crt"), ssl_keyfile=str(keys / "a.key")) == 0


def test_a_server_whose_connections_cannot_be_taken_ends_and_says_why(
    life: Life, live: Callable[..., int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("no more sockets")

    async def nothing(_client: httpx.AsyncClient) -> None:
        return None

    monkeypatch.setattr("uvicorn.Server.serve", broken)
    life.may_start = False
    assert live(nothing) == EXIT_FAILED
    assert "no more sockets" in caplog.records[-1].getMessage()


class Rude(StatLogger):
    """Raises what would end a process, in every callback."""

    def on_stats(self, stats: Any) -> None:
        raise SystemExit(9)

    def on_request(self, record: Any) -> None:
        raise SystemExit(9)

    def close(self) -> None:
        raise KeyboardInterrupt


class Counting(StatLogger):
    """Counts calls."""

    calls: list[str]

    def on_stats(self, stats: Any) -> None:
        self.calls.append("stats")

    def on_request(self, record: Any) -> None:
        self.calls.append("request")

    def close(self) -> None:
        self.calls.append("close")


def test_a_stat_logger_cannot_end_the_server(
    life: Life, live: Callable[..., int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Counting(None)
    calm.calls = []
    loggers = {"rude of Rude 1.0": Rude(None), "later of Rude 1.0": Rude(None), "calm": calm}
    loggers["later of Rude 1.0"].on_request = lambda _record: None  # type: ignore[method-assign]
    loggers["later of Rude 1.0"].on_stats = lambda _stats: None  # type: ignore[method-assign]
    monkeypatch.setattr(run_module, "stat_loggers_of", lambda *_: loggers)

    async def work(client: httpx.AsyncClient) -> None:
        await ready(client)
        assert life.gate is not None
        life.gate.set()
        for _ in range(2):
            assert parse_events((await client.post("/v1/completions", json=BODY)).text)
        text = (await client.get("/metrics")).text
        assert re.search(r'plugin_failures_total{.*plugin="rude of Rude 1.0"} 1.0', text)
        kill()

    assert live(work) == 0
    assert calm.calls.count("request") == 2 and calm.calls[-1] == "close"
    for owner in ("rude of Rude 1.0", "later of Rude 1.0"):
        assert sum(owner in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("option", ["root_path", "host", "response_role"])
@pytest.mark.parametrize("text", ["/a\nb", "/a\x1b[0m", "/a\0"])
def test_texts_of_options_hold_no_control_characters(option: str, text: str) -> None:
    engine = engine_config_from_kwargs("scripted")
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is .* control") as caught:
        check_conflicts(engine, ServerConfig(**{option: text}))
    assert str(caught.value).isprintable()
    check_conflicts(engine, ServerConfig(root_path="/api/v2", chat_template="{{ 1 }}\n"))


@pytest.mark.parametrize("text", ["/a?b", "/a#b", "/a b"])
def test_a_root_path_is_a_path(text: str) -> None:
    with pytest.raises(ConfigError, match="--root-path is"):
        check_conflicts(engine_config_from_kwargs("scripted"), ServerConfig(root_path=text))
