"""The plugin under test, found as a user finds it: through its entry point and manifest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rabbet.errors import PluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import Entry, State
from rabbet.registry.loader import load_entry
from rabbet.registry.policy import PluginPolicy
from rabbet_sdk.conformance.cases import Claims
from rabbet_sdk.conformance.forkserver import start
from rabbet_sdk.environment import child_environment

__all__ = ["ImportFacts", "Subject", "find_entry", "import_facts", "load_subject"]

_TIMEOUT_S = 120
_MARK = "rabbet-import-facts "
"""What the answer begins with: a plugin may print at its end too."""
_PROBE = """
import json, sys, threading
sys.stdout.reconfigure(line_buffering=True)
from rabbet.registry.catalog import Catalog
from rabbet.registry.loader import load_entry
from rabbet.registry.tamper import evidence
from rabbet_sdk.strict.host import strict_host
kind, name, owner = sys.argv[1:4]
entry = next(e for e in Catalog.scan().entries if (e.kind, e.name, e.distribution) == (kind, name, owner))
from importlib import import_module
from rabbet.contracts.kinds import KINDS
import_module(KINDS[kind].base.partition(":")[0])
def ops():
    if "torch" not in sys.modules:
        return set()
    import torch
    return {n for n in torch._C._dispatch_get_all_op_names()}
modules, threads = set(sys.modules), {t.ident for t in threading.enumerate()}
roles = entry.provided.roles if entry.provided else ("worker",)
if "front" not in roles:
    import torch, rabbet.layers
old_ops = ops()
package, outside = entry.value.partition(":")[0].partition(".")[0], []
with strict_host("" if package == "rabbet" else package, outside):
    load_entry(entry)
print("rabbet-import-facts " + json.dumps({
    "modules": sorted(set(sys.modules) - modules),
    "threads": sorted(t.name for t in threading.enumerate() if t.ident not in threads),
    "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
    "patched": [place for _, place in evidence()], "roles": list(roles), "outside": outside,
    "ops": sorted(ops() - old_ops) if "front" not in roles else []}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is tested: the catalog's entry, the class behind it, and its claims."""

    entry: Entry
    plugin_class: type[Any]
    claims: Claims


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportFacts:
    """What the import of a plugin did in a fresh process.

    Attributes:
        error: Last line of what it wrote if it failed or died; empty otherwise.
        modules: Modules that came in with it.
        threads: Names of threads that were left running.
        has_cuda: A CUDA context was made.
        patched: Callables of ``rabbet`` that are not what they were.
        ops: torch operators that it registered.
        roles: Its roles.
        outside: Imports of what of ``rabbet`` is not public.
    """

    error: str = ""
    modules: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    has_cuda: bool = False
    patched: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


def find_entry(plugin: str) -> Entry:
    """The catalog's entry for ``kind/name`` or ``kind/distribution:name``; imports nothing.

    Raises:
        PluginError: If nothing is installed under that name, or its manifest has no table for it.
    """
    kind, _, name = plugin.partition("/")
    entry = Catalog.scan(PluginPolicy(auto="any")).find(kind, name)
    if entry.state is not State.COMPATIBLE or entry.provided is None:
        raise PluginError(f"{plugin} cannot be tested: {entry.state.value}: {entry.reason}", kind=kind, name=entry.name)
    return entry


@cache
def load_subject(plugin: str) -> Subject:
    """Find and import a plugin; under ``RABBET_CHECK_PLUGINS=1`` in its checked form, as in an engine."""
    entry = replace(find_entry(plugin), is_checked=os.environ.get("RABBET_CHECK_PLUGINS", "") not in ("", "0", "false"))
    assert entry.provided is not None
    return Subject(entry=entry, plugin_class=load_entry(entry), claims=Claims(entry.provided.claims))


@cache
def import_facts(plugin: str) -> ImportFacts:
    """Import the plugin in a process of its own and report what that did; done once a plugin."""
    entry = find_entry(plugin)
    words = ["-c", _PROBE, entry.kind, entry.name, entry.distribution]
    # What the probe loads before it imports the plugin may be there already; a plugin of the front end has no torch.
    has_torch = "torch" in sys.modules and entry.provided is not None and "front" not in entry.provided.roles
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        process = start(words, env=child_environment(), cwd=Path.cwd(), output=output, has_torch=has_torch)
        try:
            code = process.wait(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ImportFacts(error=f"the import did not end within {_TIMEOUT_S} s")
        finally:
            process.kill()
            process.wait()
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code < 0:
        return ImportFacts(error=f"the import killed the process (signal {-code})")
    told = next((line for line in reversed(lines) if line.startswith(_MARK)), None)
    if code or told is None:
        return ImportFacts(error=(lines or [f"exit code {code}"])[-1])
    facts = json.loads(told.removeprefix(_MARK))
    return ImportFacts(
        modules=tuple(facts["modules"]),
        threads=tuple(facts["threads"]),
        has_cuda=facts["cuda"],
        patched=tuple(facts["patched"]),
        ops=tuple(facts["ops"]),
        roles=tuple(facts["roles"]),
        outside=tuple(facts["outside"]),
    )
