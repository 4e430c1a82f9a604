"""Directories for unix sockets that only this user can enter, and the end of those whose owner was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from rabbet.errors import ConfigError

__all__ = ["SocketDirectory"]

_PREFIX = "rabbet-"
_LOCK = "rabbet-sockets.lock"
# The kernel's limit on a unix socket's path is 107 bytes.
_MAX_PATH_BYTES = 107
_LONGEST_NAME = "from-engine"
_ROOM_BYTES = 4096


class SocketDirectory:
    """A private directory (0700) for sockets; removed by ``close``.

    A killed owner cannot remove it. So the owner holds a lock on a file in it, which the kernel frees with the process,
    and whoever makes the next directory removes those of this user whose lock is free.

    Attributes:
        path: Where it is.

    Raises:
        ConfigError: If none can be made.
    """

    def __init__(self) -> None:
        made: Path | None = None
        try:
            _sweep({Path(tempfile.gettempdir()), Path("/tmp")})
            made = Path(tempfile.mkdtemp(prefix=_PREFIX))
            if len(bytes(made / _LONGEST_NAME)) > _MAX_PATH_BYTES:
                made.rmdir()
                made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
            self._lock: int | None = _locked(made)
        except OSError as error:
            at = "" if made is None else f" in {made.parent}"
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            raise ConfigError(
                f"no directory for the engine's sockets can be made{at}: {error}; free space there, or set TMPDIR to another "
                "directory"
            ) from error
        self.path = made

    def address(self, name: str) -> str:
        """The address of a socket in it."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove it; idempotent. Connections stay."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int:
    """Lock a new directory; returns what holds the lock, which no program that we start inherits."""
    draft = directory / ".lock"
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # A full disk takes names still. Several ranks write where they meet, and would fail there without a word of it.
        with open(descriptor, "wb", closefd=False) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError:
        os.close(descriptor)
        raise
    # A file system without locks: it is not swept then.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Locked before it has its name: nobody sees it free.
        draft.rename(directory / _LOCK)
    return descriptor


def _sweep(places: set[Path]) -> None:
    for lock in (lock for place in places for lock in place.glob(f"{_PREFIX}*/{_LOCK}")):
        # It is held, or another sweeps it at this moment, or it is another user's.
        with contextlib.suppress(OSError):
            directory = lock.parent.lstat()
            if not stat.S_ISDIR(directory.st_mode) or directory.st_uid != os.geteuid() or not lock.is_file():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
