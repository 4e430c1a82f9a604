"""What a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from rabbet.config.load import parse_configs
from rabbet.config.policy import policy_of
from rabbet.registry import Catalog, HookBus
from rabbet.registry.describe import list_plugins

__all__ = ["report"]

_PACKAGES = (
    "rabbet-core", "torch", "transformers", "tokenizers", "safetensors", "triton", "numpy", "pydantic", "fastapi",
    "uvicorn", "msgspec", "pyzmq", "stevedore", "pluggy",
)  # fmt: skip


def report() -> str:
    """Versions, hardware, plugins, and what hook plugins add. Variables and paths of the user are left out."""
    policy = policy_of(parse_configs([])[0])
    catalog = Catalog.scan(policy)
    lines = [
        "## System",
        f"python {sys.version.split()[0]} on {platform.platform()}",
        f"cores {len(os.sched_getaffinity(0))}",
    ]
    lines += ["", "## Packages", *(f"{name} {_version(name)}" for name in _PACKAGES)]
    lines += ["", "## Plugins"]
    for row in list_plugins(catalog):
        lines.append(
            f"{row['kind']}/{row['name']} {row['distribution']} {row['version']} {row['state']} {row['reason']}".rstrip()
        )
    lines += [f"problem: {problem}" for problem in catalog.problems]
    for sections in HookBus.load(catalog, policy).call("bug_report_sections"):
        for title, text in sections.items():
            lines += ["", f"## {title}", text]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
