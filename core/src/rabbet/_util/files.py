"""Reads files that a user names: nothing waits for a writer, or is read without end. Tells what a disk refuses."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["disk_problem", "read_bytes", "read_text"]

_MIB = 1 << 20


def read_bytes(path: Path | str, *, limit: int = 64 * _MIB) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: If it cannot be read, is a directory, a pipe or a device, or is larger; ``strerror`` says so.
    """
    try:
        # A pipe is opened without waiting for its writer, and then refused.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is a pipe or a device, but must be a file")
            content = handle.read(limit + 1)
    except ValueError:
        raise OSError(errno.EINVAL, "it is no path: it holds a NUL byte or half a character") from None
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit / _MIB:g} MiB")
    return content


def read_text(path: Path | str, *, limit: int = 64 * _MIB) -> str:
    """The same as text.

    Raises:
        OSError: Also if it is no UTF-8.
    """
    try:
        return read_bytes(path, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is no UTF-8 text (byte {error.start})") from error


def disk_problem(error: BaseException, directory: Path | str) -> str | None:
    """Why a download cannot be kept in ``directory``, and what to do; None if the error is none of a file system."""
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError) or error.errno is None:
        return None  # without a number: a library's own kind of OSError
    return f"cannot be kept in {directory}: {error.strerror}; free space there, or name another directory with --download-dir"
