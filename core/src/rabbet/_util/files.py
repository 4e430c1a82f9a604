"""Reads files that a user names. Nothing that is named waits for a writer, or is read without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_bytes", "read_text"]

_MIB = 1 << 20


def read_bytes(path: Path | str, *, limit: int = 64 * _MIB) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: If it cannot be read, is a directory, a pipe or a device, or is larger; ``strerror`` says so.
    """
    try:
        # A pipe is opened without waiting for its writer, and then refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "it is no path: it holds a NUL byte or half a character") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise OSError(errno.EINVAL, f"it is {what}, but must be a file")
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            content = handle.read(limit + 1)
    finally:
        os.close(descriptor)
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
