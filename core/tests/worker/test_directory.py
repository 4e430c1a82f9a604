"""Directories of sockets: private, gone with their owner, and swept where the owner could not do it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from rabbet.errors import ConfigError
from rabbet.worker.directory import SocketDirectory

OWNER = """
import os, sys, tempfile
from rabbet.worker.directory import SocketDirectory
tempfile.tempdir = sys.argv[1]
print(SocketDirectory().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, with a path that is short enough for sockets."""
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_directories_are_private_and_go_away(scratch: Path) -> None:
    directory = SocketDirectory()
    assert directory.path.parent == scratch and stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.close()
    directory.close()
    assert list(scratch.iterdir()) == []


def test_a_long_temporary_directory_does_not_break_the_socket(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = scratch / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory, context = SocketDirectory(), zmq.Context()
    context.socket(zmq.PULL).bind(directory.address("from-engine"))
    context.destroy(linger=0)
    directory.close()
    assert list(long.iterdir()) == []


def test_where_no_directory_can_be_made_the_remedy_is_named(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / "none"))
    with pytest.raises(ConfigError, match=r"No such file or directory.*set TMPDIR"):
        SocketDirectory()


FULL = """
import resource, sys
from rabbet.errors import ConfigError
from rabbet.worker.directory import SocketDirectory

for limit in (64, 0):
    # As on a full disk: names can be made, bytes cannot be written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        SocketDirectory()
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("is_known", [True, False])
def test_a_disk_without_room_is_named_with_the_remedy(scratch: Path, is_known: bool) -> None:
    """Also where Python finds no directory for temporary files at all, which it tells once, at its first question."""
    code = FULL if is_known else FULL.replace("(64, 0)", "(0, 64)")
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    first, second = done.stdout.splitlines()
    for line in (first, second):
        assert line.startswith("no directory for the engine's sockets can be made") and str(scratch) in line, line
        assert "free space there, or set TMPDIR" in line
    assert ("File too large" in first) == is_known
    assert list(scratch.iterdir()) == [], "what was half made is gone"


def test_what_a_killed_process_left_is_swept_and_nothing_else(scratch: Path) -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, scratch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = []
    for owner in owners:
        assert owner.stdout is not None
        paths.append(Path(owner.stdout.readline().strip()))
    own = SocketDirectory()
    lock = next(own.path.iterdir()).name
    # Not ours, though named like it; half made; and a link to what holds such a file.
    for name in ("rabbet-notes", "rabbet-made", "elsewhere"):
        (scratch / name).mkdir()
    for place in ("rabbet-notes/lock", f"elsewhere/{lock}"):
        (scratch / place).touch()
    (scratch / "rabbet-link").symlink_to(scratch / "elsewhere")
    os.mkfifo(scratch / "rabbet-made" / lock)
    bystanders = {scratch / name for name in ("rabbet-notes", "elsewhere", "rabbet-link", "rabbet-made")}
    assert set(scratch.iterdir()) == {*bystanders, *paths, own.path}, "living owners keep theirs"

    owners[0].kill()
    owners[0].wait()
    new = SocketDirectory()
    assert set(scratch.iterdir()) == {*bystanders, paths[1], own.path, new.path}
    owners[1].communicate("")
    own.close()
    new.close()
    SocketDirectory().close()
    assert set(scratch.iterdir()) == bystanders


def test_a_program_that_the_owner_starts_does_not_hold_its_directory(scratch: Path) -> None:
    directory = SocketDirectory()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        links = [str(link.readlink()) for link in Path(f"/proc/{child.pid}/fd").iterdir()]
    assert not [link for link in links if link.startswith(str(directory.path))]
    directory.close()
