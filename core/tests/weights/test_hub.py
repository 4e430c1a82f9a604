"""Hub names: what is asked of the hub, and what is said when it has no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from rabbet.contracts.weights import ResolveQuery
from rabbet.errors import WeightsError
from rabbet.weights.dummy import DummyFormat
from rabbet.weights.safetensors import SafetensorsFormat


class Hub:
    """Stands for ``snapshot_download``: keeps what was asked, answers with a directory or an error."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}

    def __call__(self, name: str, **options: Any) -> str:
        self.asked = {"name": name, **options}
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))


def test_download_passes_revision_cache_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    save_file({"t": torch.ones(1)}, tmp_path / "model.safetensors")
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    query = ResolveQuery(model="org/name", revision="abc", download_dir="/cache", is_offline=True)
    files = SafetensorsFormat.resolve(query)
    assert (files.name, files.weight_files) == ("org/name", (tmp_path / "model.safetensors",))
    asked = hub.asked
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/name", "abc", "/cache")
    assert asked["local_files_only"] is True
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [item for item in asked["allow_patterns"] if item.endswith((".py", ".bin", "*"))]
    DummyFormat.resolve(query)
    assert "*.safetensors" not in hub.asked["allow_patterns"]


def test_config_alone_is_fetched_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert SafetensorsFormat.peek(ResolveQuery(model="org/name", revision="abc")) == {"architectures": ["X"]}
    assert (hub.asked["allow_patterns"], hub.asked["revision"]) == (["config.json"], "abc")
    hub.asked = {}
    assert SafetensorsFormat.peek(ResolveQuery(model=str(tmp_path))) == {"architectures": ["X"]} and not hub.asked


@pytest.mark.parametrize(
    ("error", "is_offline", "words"),
    [
        (errors.LocalEntryNotFoundError("x"), True, "offline mode is on"),
        (errors.LocalEntryNotFoundError("x"), False, "the hub cannot be reached"),
        (errors.GatedRepoError("x", response=response(403)), False, "gated: accept its licence"),
        (errors.RepositoryNotFoundError("x", response=response(404)), False, "neither a directory nor on the hub"),
        (errors.RevisionNotFoundError("x", response=response(404)), False, "neither a directory nor on the hub"),
        (errors.HfHubHTTPError("x", response=response(500)), False, "cannot be downloaded"),
        (httpx.ConnectError("x"), False, "cannot be downloaded"),
        (OSError("disk full"), False, "cannot be downloaded"),
    ],
)
def test_every_failure_of_the_hub_is_explained(
    error: Exception, is_offline: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(error))
    with pytest.raises(WeightsError, match=words) as caught:
        SafetensorsFormat.resolve(ResolveQuery(model="org/name", revision="v9", is_offline=is_offline))
    assert "org/name (revision 'v9')" in str(caught.value)


class _Hub(BaseHTTPRequestHandler):
    """A hub with one model of one file."""

    def reply(self) -> None:
        headers: dict[str, str] = {}
        if "/tree/" in self.path:
            answer: Any = [{"type": "file", "oid": "b" * 40, "size": 5000, "path": "config.json"}]
        elif self.path.startswith("/api/"):
            answer = {"id": "org/name", "sha": "a" * 40, "siblings": [{"rfilename": "config.json"}]}
        else:
            answer, headers = {"x": "x" * 4992}, {"ETag": f'"{"b" * 40}"', "X-Repo-Commit": "a" * 40}
        content = json.dumps(answer).encode()
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_GET = do_HEAD = reply

    def log_message(self, *_arguments: Any) -> None:
        pass


NO_ROOM = """
import json, resource, sys
from rabbet.contracts.weights import ResolveQuery
from rabbet.errors import RabbetError
from rabbet.front.tokenizer import tokenizer_directory
from rabbet.weights.dummy import DummyFormat

found = []
for directory in (*sys.argv[2:], sys.argv[1]):
    if directory == sys.argv[1]:
        # As on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        DummyFormat.resolve(ResolveQuery(model="org/name", download_dir=directory))
    except RabbetError as error:
        found.append([directory, str(error)])
    try:
        tokenizer_directory("org/name", download_dir=directory)
    except RabbetError as error:
        found.append([directory, str(error)])
print(json.dumps(found))
"""


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    """With a hub that answers: no directory that can be made, though by root, and one without room."""
    hub = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", NO_ROOM, str(tmp_path / "cache"), "/dev/null/cache", "/proc/none"],
            capture_output=True, text=True, check=False, timeout=60,
            env={**os.environ, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **environment},
        )  # fmt: skip
    finally:
        hub.shutdown()
        hub.server_close()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    reasons = ["Not a directory"] * 2 + ["No such file or directory"] * 2 + ["File too large"] * 2
    for (directory, message), reason, what in zip(found, reasons, ["the model", "--tokenizer"] * 3, strict=True):
        assert message == (
            f"{what} org/name cannot be kept in {directory}: {reason}; free space there, or name another directory with "
            "--download-dir"
        )


def test_offline_without_a_cached_copy_makes_no_call(tmp_path: Path) -> None:
    query = ResolveQuery(model="org/never-downloaded", download_dir=str(tmp_path), is_offline=True)
    with pytest.raises(WeightsError, match="offline mode is on"):
        SafetensorsFormat.resolve(query)


@pytest.mark.parametrize("model", ["/no/such/directory", "a/b/c", "../up", "x" * 5000, "a\0b", "~nobody-here/x"])
def test_what_is_no_name_and_no_directory_is_refused_shortly(model: str) -> None:
    with pytest.raises(WeightsError, match="neither a directory nor a hub name") as caught:
        SafetensorsFormat.resolve(ResolveQuery(model=model))
    assert len(str(caught.value)) < 200
