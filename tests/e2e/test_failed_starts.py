"""Starts that fail: each ends soon, with a status, and with one line that says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

EXIT_FAILED, EXIT_CONFIG = 1, 2


@dataclass(frozen=True)
class Failure:
    """A start that fails.

    Attributes:
        words: What follows ``rabbet serve``; ``{tiny}`` and the other names of ``places`` are filled in.
        status: The exit status.
        said: What the one line says.
        is_broken_installed: The plugin whose import fails is installed.
    """

    words: tuple[str, ...]
    status: int
    said: tuple[str, ...] = field(default=())
    is_broken_installed: bool = False


FAILURES = {
    "port in use": Failure(("{tiny}", "--port", "{port}"), EXIT_FAILED, ("127.0.0.1:{port}", "in use", "--port")),
    "no model given": Failure((), EXIT_CONFIG, ("rabbet serve MODEL",)),
    "missing model": Failure(("{root}/none",), EXIT_FAILED, ("'{root}/none'", "check the path")),
    "mistyped short name": Failure(("smolm2", "--offline"), EXIT_FAILED, ("smolm2", "hub cache", "did you mean 'smollm2'?")),
    "flag without dashes": Failure(("{tiny}", "max-model-len", "64"), EXIT_CONFIG, ("stands alone", "did you mean --max-model-len?")),
    "unknown backend": Failure(
        ("{tiny}", "--attention-backend", "cpuu"), EXIT_CONFIG, ("--attention-backend", "'cpuu'", "did you mean cpu?")
    ),
    "unknown scheduler": Failure(
        ("{tiny}", "--scheduling-policy", "fcsf"), EXIT_CONFIG, ("--scheduling-policy", "did you mean fcfs?")
    ),
    "unknown plugin allowed": Failure(("{tiny}", "--plugins-allow", "nothing"), EXIT_CONFIG, ("'nothing'", "matches no")),
    "plugin whose import hangs": Failure(
        ("{tiny}", "--plugin", "{root}/hanging.py", "--plugin-import-timeout", "0.1"), EXIT_CONFIG,
        ("--plugin {root}/hanging.py is not imported after 0.1 s, and waits in line 2", "--plugin-import-timeout"),
    ),
    "missing plugin file": Failure(("{tiny}", "--plugin", "{root}/none.py"), EXIT_CONFIG, ("{root}/none.py", "No such file")),
    "unknown flag": Failure(("{tiny}", "--max-modellen", "5"), EXIT_CONFIG, ("--max-modellen", "did you mean max-model-len?")),
    "bad value": Failure(("{tiny}", "--max-model-len", "0"), EXIT_CONFIG, ("--max-model-len is 0", "must be positive")),
    "small KV cache": Failure(
        ("{tiny}", "--kv-cache-memory-bytes", "100K", "--max-model-len", "4096"), EXIT_CONFIG,
        ("has 0.098 MiB", "4096 tokens needs 2.016 MiB", "largest --max-model-len that fits is", "--kv-cache-memory-bytes (now 102400)"),
    ),
    "pipe as a file of options": Failure(
        ("{tiny}", "--config", "{root}/pipe"), EXIT_CONFIG, ("--config {root}/pipe cannot be read: it is a pipe or a device",)
    ),
    "absurd override": Failure(
        ("{tiny}", "--hf-overrides.vocab_size=x"), EXIT_CONFIG, ("config.json: vocab_size is 'x', but must be an integer from 1",)
    ),
    "absurd number of requests": Failure(
        ("{tiny}", "--max-num-seqs", "1t"), EXIT_CONFIG, ("a step needs at least", "--max-num-seqs (now 1000000000000)")
    ),
    "KV cache larger than the machine": Failure(
        ("{tiny}", "--num-gpu-blocks-override", "1t"), EXIT_CONFIG,
        ("memory ran out while allocating the KV cache", "--num-gpu-blocks-override"),
    ),
    "sampling defaults that are not there": Failure(
        ("{tiny}", "--generation-config", "{root}/none"), EXIT_CONFIG, ("--generation-config {root}/none", "cannot be read"),
    ),
    "truncated weights": Failure(("{truncated}",), EXIT_FAILED, ("model.safetensors", "truncated or corrupt")),
    "broken config": Failure(("{broken}",), EXIT_FAILED, ("config.json",)),
    "stat logger that fails": Failure(
        ("{tiny}", "--plugin", "{root}/loud.py", "--stat-loggers", "loud"), EXIT_CONFIG,
        ("--stat-loggers loud", "RuntimeError: no collector"),
    ),
    "no tokenizer": Failure(("{mute}",), EXIT_CONFIG, ("{mute} has no tokenizer", "--tokenizer", "--skip-tokenizer-init")),
    "broken tokenizer": Failure(("{garbled}",), EXIT_CONFIG, ("the tokenizer in {garbled} cannot be read",)),
    "unknown tokenizer": Failure(("{tiny}", "--tokenizer", "{root}/none"), EXIT_CONFIG, ("--tokenizer", "{root}/none", "check the path")),
    "unknown architecture": Failure(("{mystery}",), EXIT_CONFIG, ("MysteryForCausalLM", "plugin")),
    "plugin that does not import": Failure(
        ("{tiny}", "--attention-backend", "broken"), EXIT_CONFIG,
        ("attention/broken of broken-plugin 1.0", "ImportError: libmissing.so.1 is not there", "rabbet plugins doctor"),
        is_broken_installed=True,
    ),
}  # fmt: skip


FAILING_STAT_LOGGER = """
from rabbet.contracts import register_stat_logger
from rabbet.contracts.observability import StatLogger

@register_stat_logger("loud")
class Loud(StatLogger):
    def __init__(self, config):
        raise RuntimeError("no collector")

    def on_request(self, record):
        pass

    def on_stats(self, stats):
        pass
"""


@pytest.fixture(scope="module")
def places(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Models that cannot be served, and a port that is taken."""
    root = tmp_path_factory.mktemp("bad")
    names = ("truncated", "broken", "mystery", "mute", "garbled")
    for name in names:
        shutil.copytree(tiny_model, root / name)
    for path in (root / "mute").glob("*token*"):
        path.unlink()
    (root / "garbled/tokenizer.json").write_text("{")
    weights = root / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (root / "broken/config.json").write_text('{"architectures": ["LlamaForCausalLM"')
    config = json.loads((root / "mystery/config.json").read_text())
    (root / "mystery/config.json").write_text(
        json.dumps(config | {"architectures": ["MysteryForCausalLM"], "model_type": "mystery"})
    )
    (root / "loud.py").write_text(FAILING_STAT_LOGGER)
    (root / "hanging.py").write_text("import threading\nthreading.Event().wait()\n")
    os.mkfifo(root / "pipe")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        yield {"tiny": str(tiny_model), "root": str(root), "port": port} | {name: str(root / name) for name in names}


@pytest.fixture(scope="module")
def starts(
    places: dict[str, str], broken_plugin: dict[str, str], rabbet: Callable[..., Any]
) -> Iterator[dict[str, Future[Any]]]:
    """All of them, two at a time."""
    with ThreadPoolExecutor(2) as pool:

        def start(failure: Failure) -> Future[Any]:
            words = [word.format_map(places) for word in failure.words]
            port = [] if "--port" in words else ["--port", "0"]
            environment = broken_plugin if failure.is_broken_installed else None
            return pool.submit(rabbet, "serve", *words, "--host", "127.0.0.1", *port, environment=environment)

        yield {name: start(failure) for name, failure in FAILURES.items()}


def complaints(text: str) -> list[str]:
    """Lines that are errors."""
    return [line for line in text.splitlines() if re.search(r"\berror: |\bERROR ", line)]


@pytest.mark.parametrize("name", FAILURES)
def test_a_start_that_fails_says_why_in_one_line(
    starts: dict[str, Future[Any]], places: dict[str, str], name: str
) -> None:
    failure, done = FAILURES[name], starts[name].result()
    assert done.returncode == failure.status, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    lines = complaints(done.stderr)
    assert len(lines) == 1, done.stderr
    for part in failure.said:
        assert part.format_map(places) in lines[0]


def test_what_does_not_depend_on_the_model_is_looked_at_before_anything_is_started(starts: dict[str, Future[Any]]) -> None:
    for name in ("unknown tokenizer", "sampling defaults that are not there"):
        log = starts[name].result().stderr
        assert "choosing plugins" not in log and "loading the model" not in log


def test_the_context_that_is_said_to_fit_fits(
    starts: dict[str, Future[Any]], tiny_model: Path, rabbet: Callable[..., Any]
) -> None:
    line = complaints(starts["small KV cache"].result().stderr)[0]
    fits = re.findall(r"that fits is (\d+)", line)[0]
    done = rabbet(
        "bench", "latency", str(tiny_model), "--kv-cache-memory-bytes", "100K", "--max-model-len", fits,
        "--input-len", "8", "--output-len", str(int(fits) - 8), "--repeat", "1",
    )  # fmt: skip
    # It checks itself that all tokens came.
    assert done.returncode == 0 and f"output_len {int(fits) - 8}" in re.sub(" +", " ", done.stdout), done


def test_plugins_that_fail_without_being_chosen_are_passed_over_with_one_warning_each(
    serve: Callable[..., Any], tiny_model: Path, broken_plugin: dict[str, str]
) -> None:
    options = ("--kv-cache-memory-bytes", "1M")
    server = serve(*options, model=str(tiny_model), environment=broken_plugin)
    assert server.process.poll() is None, server.log.read_text()
    with server.stream(max_tokens=8) as events:
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.stop() == 0
    log = server.log.read_text()
    warnings = [line for line in log.splitlines() if "WARNING" in line]
    assert len(warnings) == 3 and "Traceback" not in log and not complaints(log), log
    assert "hooks/crashing of broken-plugin 1.0" in warnings[0] and "no license server" in warnings[0]
    for kind, warning in zip(("platform", "weights"), warnings[1:], strict=True):
        assert f"{kind}/broken" in warning and "broken-plugin 1.0" in warning and "libmissing.so.1" in warning
