"""Bad input to every command: one line that names it, a status, no trace of the inside, and nothing is started for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbet.server.run import EXIT_CONFIG, EXIT_FAILED

Run = Callable[..., tuple[int, str, str]]
LONG = "x" * 100_000
NOBODY = "http://127.0.0.1:9"


def check(result: tuple[int, str, str], status: int, words: str) -> None:
    actual, out, error = result
    assert actual == status, error
    assert out == "" and words in error
    assert "Traceback" not in error and "is a fault of Rabbet" not in error and "0x7" not in error
    assert len(error) < 3000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "m", "--seed", "9" * 30], "--seed is 999999999999999999999999999999, but must lie between"),
        (["serve", "m", "--port", "65536"], "server.port is 65536: input should be less than or equal to 65535"),
        (["serve", "m", "--host", ""], "--host is empty"),
        (["serve", "m", "--max-model-len", "\u0663"], "must be an integer"),
        (["serve", "m", "--plugins-allow", ","], "--plugins-allow is empty"),
        (["serve", "m", "--served-model-name", "a\nb"], "--served-model-name is 'a\\nb', but must hold no control characters"),
        (["serve", "m", "--config", "/dev/zero"], "--config /dev/zero cannot be read: it is a pipe or a device"),
        (["serve", "m", "--cudagraph-capture-sizes", "4,0"], "cudagraph_capture_sizes is 0"),
        (["serve", "m", "--cudagraph-capture-sizes", "-1"], "cudagraph_capture_sizes is -1"),
        (["serve", "m", "--block-size", "0"], "block_size is 0: input should be greater than 0"),
        (["serve", "a\0b"], "MODEL is 'a\\x00b', but text holds no NUL"),
        (["serve", "\udcff"], "MODEL is '\\udcff', but text holds"),
        (["serve", LONG, LONG], "stands alone"),
        (["serve", "m", f"--{LONG}", "1"], "there is no option --xxx"),
        (["serve", "m", "--hf-overrides", f'{{"{LONG}": 1e999}}'], "--hf-overrides holds inf under"),
        (["bench", "latency", "m", "--batch-size", "9" * 30], "more than 100000000; lower"),
        (["bench", "latency", "m", "--input-len", "9" * 30], "more than 100000000; lower"),
        (["bench", "throughput", "m", "--num-prompts", "1000000"], "more than 100000000; lower"),
        (["bench", "throughput", "m", "--seed-x", "1"], "there is no option --seed-x"),
        (["bench", "serve", "--url", NOBODY, "--api-key", "\xe9"], "--api-key goes into a header"),
        (["complete", "x", "--url", NOBODY, "--api-key", "a\nb"], "--api-key goes into a header"),
        (["chat", "--url", NOBODY, "--api-key", "a\u2028"], "--api-key goes into a header"),
        (["plugins", "list", "--plugin", "/dev/zero"], "--plugin /dev/zero cannot be read: it is a pipe or a device"),
        (["plugins", "list", "--plugins-locked", "/dev/zero"], "the lock file /dev/zero cannot be read (it is a pipe or a device"),
        (["plugins", "list", "--config", "/dev/zero"], "--config /dev/zero cannot be read"),
        (["plugins", "info", LONG], "no installed plugin is named"),
        (["plugins", "verify", "/dev/zero"], "the lock file /dev/zero cannot be read"),
    ],
    ids=lambda item: " ".join(item)[:40] if isinstance(item, list) else "",
)  # fmt: skip
def test_wrong_options_end_with_status_2(rabbet: Run, words: list[str], said: str) -> None:
    check(rabbet(*words), EXIT_CONFIG, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["complete", "x", "--url", ""], "no server answers at /v1"),
        (["complete", "x", "--url", "ftp://x"], "unsupported protocol"),
        (["complete", "x", "--url", f"http://{LONG}"], "no server answers at http://xxx"),
        (["complete", LONG, "--url", NOBODY], "no server answers"),
        (["complete", "\udcff", "--url", NOBODY], "no server answers"),
        (["bench", "serve", "--url", NOBODY, "--duration", "1000000"], "no server answers"),
        (["plugins", "lock", "/dev/full"], "the lock file /dev/full cannot be written: [Errno 28] No space left"),
        (["plugins", "lock", "/nowhere/x.lock"], "the lock file /nowhere/x.lock cannot be written"),
    ],
    ids=lambda item: " ".join(item)[:40] if isinstance(item, list) else "",
)
def test_what_is_not_there_ends_with_status_1(rabbet: Run, words: list[str], said: str) -> None:
    check(rabbet(*words), EXIT_FAILED, said)


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "throughput", "m", "--input-len", "9" * 5000],
        ["bench", "throughput", "m", "--input-len", "9" * 30],
        ["bench", "throughput", "m", "--input-len", "1:1e30"],
        ["bench", "throughput", "m", "--output-len", "0"],
        ["bench", "throughput", "m", "--num-prompts", "-1"],
        ["bench", "serve", "--url", NOBODY, "--num-clients", "9" * 30],
        ["bench", "serve", "--url", NOBODY, "--duration", "nan"],
        ["bench", "serve", "--url", NOBODY, "--duration", "inf"],
        ["complete", "x", "--url", NOBODY, "--temperature", "nan"],
        ["complete", "x", "--url", NOBODY, "--temperature", "-1"],
        ["complete", "x", "--url", NOBODY, "--max-tokens", "0"],
    ],
    ids=lambda words: " ".join(words)[:40].strip() or "blank",
)
def test_wrong_usage_ends_with_status_2(rabbet: Run, words: list[str]) -> None:
    status, out, error = rabbet(*words)
    assert (status, out) == (EXIT_CONFIG, "") and "Error" in error and "Traceback" not in error


def test_a_pipe_without_a_writer_is_not_waited_for(rabbet: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for option in ("--config", "--plugin", "--plugins-locked"):
        check(rabbet("plugins", "list", option, str(pipe)), EXIT_CONFIG, "it is a pipe or a device, but must be a file")


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--host", "256.1.1.1"], EXIT_FAILED, "cannot listen on 256.1.1.1:0"),
        (["--host", "nope.invalid"], EXIT_FAILED, "cannot listen on nope.invalid:0"),
        (["--host", "\xe9.."], EXIT_FAILED, "cannot listen on"),
        (["--host", "[::1]"], EXIT_FAILED, "cannot listen on [::1]:0"),
        (["--host", "http://x"], EXIT_FAILED, "cannot listen on http://x:0"),
        (["--uds", "/nowhere/x.sock"], EXIT_FAILED, "cannot listen on /nowhere/x.sock"),
        (["--uds", "y" * 5000], EXIT_FAILED, "cannot listen on yyy"),
        (["--uds", "/dev/null"], EXIT_CONFIG, "--uds /dev/null exists and is no socket"),
        (["--chat-template", "/dev/zero"], EXIT_CONFIG, "--chat-template /dev/zero cannot be read: it is a pipe or a device"),
        (["--ssl-certfile", "/dev/zero", "--ssl-keyfile", "/dev/zero"], EXIT_CONFIG, "it is a pipe or a device"),
    ],
    ids=lambda item: " ".join(item)[:40] if isinstance(item, list) else "",
)  # fmt: skip
def test_an_address_that_cannot_be_had_is_named(rabbet: Run, options: list[str], status: int, said: str) -> None:
    check(rabbet("serve", "m", "--port", "0", *options), status, said)


def test_a_port_in_use_is_named(rabbet: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        check(rabbet("serve", "m", "--host", "127.0.0.1", "--port", port), EXIT_FAILED, f"127.0.0.1:{port}")


def test_options_of_a_plugin_may_be_written_with_dots(tmp_path: Path) -> None:
    from rabbet.config import parse_configs

    for words in (
        ["--plugin-config", "acme.depth=3"],
        ["--plugin-config.acme.depth=3"],
        ["--plugin-config.acme.depth", "3"],
    ):
        assert parse_configs(["m", *words], environment={})[0].plugin_config == {"acme": {"depth": 3}}
    two = ["--plugin-config", "acme.a=1", "--plugin-config", "acme.b=x"]
    assert parse_configs(["m", *two], environment={})[0].plugin_config == {"acme": {"a": 1, "b": "x"}}
    assert parse_configs(["m", "--hf-overrides", "a.b=1"], environment={})[0].model.hf_overrides == {"a.b": 1}
