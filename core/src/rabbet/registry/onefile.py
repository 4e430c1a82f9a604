"""One-file plugins: ``--plugin ./file.py`` loads a module by its path, under a name made from its hash.

Other processes load the same file by path and check the same hash, so that what runs is what was decided.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
import threading
import traceback
from pathlib import Path

from rabbet._util.files import read_bytes
from rabbet.errors import PluginLoadError
from rabbet.registry.tamper import watch

__all__ = ["MODULE_PREFIX", "module_name", "stage_file"]

MODULE_PREFIX = "rabbet_file_"
"""Of modules that are loaded by their file: no import finds them."""


def module_name(path: Path) -> str:
    """Name of the module that a file becomes: stem and content hash."""
    try:
        digest = hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise PluginLoadError(f"--plugin {path} cannot be read: {error.strerror}") from error
    return f"{MODULE_PREFIX}{path.stem}_{digest[:16]}"


def stage_file(path: Path, *, limit_s: float = 300.0) -> str:
    """Import the file once, so that its decorators stage what it registers; returns the module's name.

    It is imported in a thread of its own. One that waits for ever is left there, and ends with the process.

    Args:
        path: The file.
        limit_s: Seconds that its import may take.

    Raises:
        PluginLoadError: If the file cannot be read, fails to import, or takes too long.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # no such user, links in a circle, NUL: reading it tells
        path = path.expanduser().resolve()
    name = module_name(path)
    if name in sys.modules:
        return name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"--plugin {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    ends: list[BaseException | None] = []

    def work() -> None:
        try:
            with watch(str(path), name):
                spec.loader.exec_module(module)  # type: ignore[union-attr]
            ends.append(None)
        except BaseException as error:  # a plugin's code may raise anything
            ends.append(error)

    thread = threading.Thread(target=work, name=f"import {path}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if ends == [None]:
        return name
    sys.modules.pop(name, None)
    if ends:
        raise PluginLoadError(f"--plugin {path} failed to import: {type(ends[0]).__name__}: {ends[0]}") from ends[0]
    told = f"is not imported after {limit_s:g} s{_place(thread, path)}; mend it, or raise --plugin-import-timeout"
    raise PluginLoadError(f"--plugin {path} {told}")


def _place(thread: threading.Thread, path: Path) -> str:
    """Where in the file the thread is."""
    for frame, line in traceback.walk_stack(sys._current_frames().get(thread.ident or 0)):
        if frame.f_code.co_filename == str(path):
            return f", and waits in line {line}"
    return ""
