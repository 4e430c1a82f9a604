"""A private directory for what is derived from a GGUF file: its header as JSON, and its tokenizer.

Reading the token lists takes a second and converting the tokenizer several, so both are kept. The key holds path,
size and modification time; the directory belongs to this user alone and is written in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rabbet.errors import WeightsError
from rabbet_weights_gguf.header import GGUFHeader, GGUFTensor, read_header

__all__ = ["derived_directory", "load_header"]

_HEADER = "gguf-header.json"
_FORMAT = "2"
_CONVERT_TIMEOUT_S = 600


def derived_directory(path: Path, download_dir: str | None) -> Path:
    """The directory for ``path``, made if it is not there yet."""
    root = Path(download_dir) if download_dir else Path.home() / ".cache" / "rabbet"
    directory = root / "gguf" / _key(path)
    if _is_trusted(directory) and (directory / _HEADER).is_file():
        return directory
    header = read_header(path)
    try:
        _make(directory, path, header)
    except OSError as error:
        raise WeightsError(
            f"what is derived from {path.name} cannot be kept in {directory.parent}: {error.strerror or error}; free space "
            "there, or name another directory with --download-dir",
            file=str(path),
        ) from error
    return directory


def _make(directory: Path, path: Path, header: GGUFHeader) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix=".making-", dir=directory.parent))
    try:
        if header.num_tokens:
            _convert_tokenizer(path, work, header)
        document = {
            "fields": header.fields,
            "tensors": [asdict(t) for t in header.tensors],
            "num_tokens": header.num_tokens,
        }
        (work / _HEADER).write_text(json.dumps(document), encoding="utf-8")
        if directory.exists():
            shutil.rmtree(directory)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_header(directory: Path) -> GGUFHeader:
    """The header as ``derived_directory`` wrote it."""
    document: dict[str, Any] = json.loads((directory / _HEADER).read_text(encoding="utf-8"))
    tensors = tuple(GGUFTensor(**(tensor | {"shape": tuple(tensor["shape"])})) for tensor in document["tensors"])
    return GGUFHeader(fields=document["fields"], tensors=tensors, num_tokens=document["num_tokens"])


def _key(path: Path) -> str:
    status = path.stat()
    identity = f"{_FORMAT}\0{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return f"{path.stem[:48]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _is_trusted(directory: Path) -> bool:
    """Whether the directory is ours: what another user could write is not read."""
    if not directory.is_dir():
        return False
    status = directory.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _convert_tokenizer(path: Path, directory: Path, header: GGUFHeader) -> None:
    architecture = header.fields.get("general.architecture", "")
    command = [
        *(sys.executable, "-m", "rabbet_weights_gguf.tokenizer", str(path), str(directory)),
        str(header.fields.get("tokenizer.ggml.pre", "")),
        str(header.fields.get(f"{architecture}.context_length", 2048)),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(
            f"the tokenizer of {path.name} was not converted within {_CONVERT_TIMEOUT_S} s", file=str(path)
        ) from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines()[-1:] or ["no message"])[0]
        # Its writer knows a full disk only as a text.
        if (system := re.search(r"(?:\w+: )?(.*) \(os error (\d+)\)", reason)) is not None:
            raise OSError(int(system[2]), system[1])
        raise WeightsError(f"the tokenizer of {path.name} cannot be converted: {reason}", file=str(path))
