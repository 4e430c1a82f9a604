"""Files that a user names: what is no file ends at once with its reason, whichever option names it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rabbet._util.files import read_bytes, read_text
from rabbet.config import parse_configs
from rabbet.config.schema import ModelConfig, ServerConfig
from rabbet.errors import ConfigError, PluginError, PluginPolicyError, RabbetError, WeightsError
from rabbet.front.defaults import sampling_defaults
from rabbet.front.tokenizer import load_tokenizer
from rabbet.registry.lock import read_lock
from rabbet.registry.onefile import stage_file
from rabbet.server.listen import check_tls
from rabbet.server.run import _read_template
from rabbet.weights.hub import read_json

NO_FILES = {
    "missing": "No such file or directory",
    "directory": "Is a directory",
    "pipe": "it is a pipe or a device, but must be a file",
    "device": "it is a pipe or a device, but must be a file",
    "socket": "No such device or address",
    "circle": "Too many levels of symbolic links",
    "NUL": "it is no path: it holds a NUL byte",
    "half a character": "it is no path: it holds",
    "long name": "File name too long",
    "large": "it is larger than ",
    "binary": "it is no UTF-8 text (byte 1)",
}


@pytest.fixture(scope="module")
def bad_paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A path for each key of ``NO_FILES``; the pipe has no writer, the device no end."""
    root = tmp_path_factory.mktemp("bad")
    paths = {name: str(root / name.replace(" ", "-")) for name in NO_FILES}
    paths |= {"device": "/dev/zero", "NUL": "a\0b", "half a character": "\ud800", "long name": "a" * 5000}
    Path(paths["directory"]).mkdir()
    os.mkfifo(paths["pipe"])
    Path(paths["circle"]).symlink_to(paths["circle"])
    Path(paths["binary"]).write_bytes(b"a\xff")
    with Path(paths["large"]).open("wb") as handle:
        handle.truncate(1 << 40)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(paths["socket"])
        yield paths


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_text_file_is_an_error_with_its_reason(bad_paths: dict[str, str], kind: str) -> None:
    with pytest.raises(OSError) as caught:
        read_text(bad_paths[kind], limit=1 << 20)
    assert NO_FILES[kind] in str(caught.value.strerror)


def test_a_file_of_just_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xc3\xa9" * 4)
    assert read_bytes(tmp_path / "x", limit=8) == b"\xc3\xa9" * 4
    assert read_text(tmp_path / "x", limit=8) == "\xe9" * 4
    with pytest.raises(OSError, match="larger"):
        read_bytes(tmp_path / "x", limit=7)


def tls(path: str) -> None:
    check_tls(ServerConfig(ssl_certfile=path, ssl_keyfile=path))


def template(path: str) -> None:
    _read_template(ServerConfig(chat_template=path))


READERS = {
    "--config": (lambda path: parse_configs(["m", "--config", path], environment={}), ConfigError),
    "--plugin": (lambda path: stage_file(Path(path)), PluginError),
    "the lock file": (lambda path: read_lock(Path(path)), PluginPolicyError),
    "--chat-template": (template, ConfigError),
    "--ssl-certfile": (tls, ConfigError),
    "": (lambda path: read_json(Path(path)), WeightsError),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [kind for kind in NO_FILES if kind != "binary"])
def test_each_option_that_names_a_file_refuses_what_is_none(bad_paths: dict[str, str], kind: str, reader: str) -> None:
    read, error = READERS[reader]
    with pytest.raises(error) as caught:
        read(bad_paths[kind])
    assert reader in str(caught.value) and len(str(caught.value)) < 12_000
    assert NO_FILES[kind] in str(caught.value) or kind in ("NUL", "half a character")


@pytest.mark.parametrize("reader", ["--config", "the lock file", "--chat-template", ""])
def test_each_option_that_names_a_text_refuses_binary_files(bad_paths: dict[str, str], reader: str) -> None:
    with pytest.raises(RabbetError, match="UTF-8"):
        READERS[reader][0](bad_paths["binary"])


@pytest.mark.parametrize("content", [b"[1]", b"3", b"\xff", b"{", b"[" * 100_000])
def test_a_directory_of_sampling_defaults_holds_a_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a JSON object"):
        sampling_defaults(ModelConfig(generation_config=str(tmp_path)), {})


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 100_000])
def test_the_settings_of_a_tokenizer_are_named_if_they_are_not_readable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="tokenizer_config.json is no readable JSON file"):
        load_tokenizer(tmp_path)
