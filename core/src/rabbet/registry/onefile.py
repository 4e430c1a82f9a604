"""One-file plugins: ``--plugin ./file.py`` loads a module by its path, under a name made from its hash.

Other processes load the same file by path and check the same hash, so that what runs is what was decided.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import sys
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


def stage_file(path: Path) -> str:
    """Import the file once, so that its decorators stage what it registers; returns the module's name.

    Raises:
        PluginLoadError: If the file cannot be read or fails to import.
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
    try:
        with watch(str(path), name):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a plugin's code may raise anything
        sys.modules.pop(name, None)
        raise PluginLoadError(f"--plugin {path} failed to import: {type(error).__name__}: {error}") from error
    return name
