"""The table of flags, made from the schema: each field has one flag, one environment variable, one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from rabbet._util.text import kinds_of
from rabbet.config import schema

__all__ = ["ALIASES", "PREFIX", "SHORT", "Flag", "fields", "flags", "sections", "variable_of"]

PREFIX = "RABBET_"

_NESTED_ONLY = ("attention", "speculative", "kv_transfer", "kv_events", "structured_outputs", "compilation", "plugins")
"""Sections whose fields have no flag of their own, only ``--NAME-config.field``."""

ALIASES = {
    "attention-backend": "attention.backend",
    "plugins": "plugins.mode",
    "plugins-allow": "plugins.allow",
    "plugins-deny": "plugins.deny",
    "plugins-strict": "plugins.strict",
    "plugins-auto": "plugins.auto",
    "certificates": "plugins.certificates",
    "plugins-locked": "plugins.locked",
    "check-plugins": "plugins.check",
    "plugin-prefer": "plugins.prefer",
    "plugin-override": "plugins.override",
    "plugin": "plugins.files",
    "plugin-import-timeout": "plugins.import_timeout_s",
    "spec-method": "speculative.method",
    "spec-model": "speculative.model",
    "spec-tokens": "speculative.num_speculative_tokens",
    "cudagraph-capture-sizes": "compilation.cudagraph_capture_sizes",
    "max-cudagraph-capture-size": "compilation.max_cudagraph_capture_size",
    "compilation-config.compile-ranges-endpoints": "compilation.compile_ranges",
    "device-memory-utilization": "cache.gpu_memory_utilization",
    "policy": "scheduler.scheduling_policy",
    "offline": "load.is_offline",
    "scheduler-cls": "scheduler.scheduling_policy",
}
"""Further spellings of single fields."""

SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-O": "optimization-level",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One field.

    Attributes:
        name: Flag without dashes.
        path: ``section.field`` (or ``server.field``).
        annotation: The field's type.
        default: The field's default.
        description: The help text.
        group: Heading under which help lists it.
    """

    name: str
    path: str
    annotation: Any
    default: Any
    description: str
    group: str

    @property
    def place(self) -> tuple[str, ...]:
        """The path in parts."""
        return tuple(self.path.split("."))

    @property
    def environment(self) -> str:
        """Name of the variable that sets it."""
        return variable_of(self.name)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value: ``--x`` and ``--no-x``."""
        return bool in kinds_of(self.annotation)


def variable_of(name: str) -> str:
    """Name of the environment variable for a flag's name: a dash is an underscore, a dot is two."""
    return PREFIX + name.upper().replace("-", "_").replace(".", "__")


@cache
def sections() -> dict[str, type]:
    """The class of each section by its name, the server's included: ``--NAME-config`` takes one as JSON."""
    found: dict[str, type] = {"server": schema.ServerConfig}
    for name, annotation in get_type_hints(schema.EngineConfig).items():
        for kind in kinds_of(annotation):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[name] = kind
    return found


@cache
def flags() -> dict[str, Flag]:
    """Every flag by name, aliases included."""
    table = {flag.name: flag for flag in fields().values()}
    for alias, path in ALIASES.items():
        table[alias] = dataclasses.replace(fields()[tuple(path.split("."))], name=alias)
    return table


@cache
def fields() -> dict[tuple[str, ...], Flag]:
    """Every field of the schema by its place, each under its first name."""
    return {flag.place: flag for flag in _from_schema()}


def _from_schema() -> Iterator[Flag]:
    for section, cls in sections().items():
        for flag in _fields(cls, section, (cls.__doc__ or section).strip().rstrip(".")):
            if section in _NESTED_ONLY:
                flag = dataclasses.replace(flag, name=f"{section.replace('_', '-')}-config.{flag.name}")
            yield flag
    for flag in _fields(schema.EngineConfig, "", "Everything else"):
        if flag.path not in sections():
            yield flag


def _fields(cls: type, section: str, title: str) -> Iterator[Flag]:
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        default: Any = field.default
        description = getattr(default, "description", None) or ""
        if hasattr(default, "get_default"):
            default = default.get_default(call_default_factory=True)
        yield Flag(
            name=field.name.replace("_", "-"),
            path=f"{section}.{field.name}" if section else field.name,
            annotation=hints[field.name],
            default=default,
            description=description,
            group=title,
        )
