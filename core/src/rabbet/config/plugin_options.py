"""Options of plugins: ``--plugin-config.NAME.key`` against the schema that the plugin's manifest names."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rabbet._util.json_schema import problems
from rabbet.contracts.registration import normalise_name
from rabbet.errors import ConfigError, PluginLoadError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import Entry, State
from rabbet.registry.names import nearest

__all__ = ["check_plugin_options"]


def check_plugin_options(plugin_config: Mapping[str, Mapping[str, Any]], catalog: Catalog) -> dict[str, Any]:
    """Refuse options for plugins that are not there, and options that a plugin's schema does not know.

    Imports no plugin. Where contributions of several kinds share a name, one schema has to accept the options. A
    contribution without a schema takes anything.

    Returns:
        The options by the names that the registry has, however the user spelt them.

    Raises:
        ConfigError: Naming the option, its value and what it must be.
        PluginLoadError: If the schema itself is missing or broken.
    """
    hidden = (State.DENIED, State.INCOMPATIBLE)
    names = {entry.name for entry in catalog.entries if entry.state not in hidden}
    known: dict[str, Mapping[str, Any]] = {}
    for name, options in plugin_config.items():
        entries = [e for e in catalog.entries if e.name == normalise_name(e.kind, name) and e.state not in hidden]
        if not entries:
            hint = " or ".join(nearest(name, names))
            raise ConfigError(
                f"--plugin-config.{name}: no plugin of that name is installed and allowed"
                f"{f'; did you mean {hint}?' if hint else ''}",
                field=f"plugin_config.{name}",
            )
        schemas = [schema for entry in entries if (schema := _schema(entry)) is not None]
        found = [next(problems(dict(options), schema), None) for schema in schemas]
        if found and (first := found[0]) is not None and None not in found:
            path, text, unknown = first
            properties = schemas[0].get("properties", ())
            close = " or ".join(nearest(unknown, properties)) if unknown else ""
            hint = f"; did you mean {close}?" if close else "" if properties else "; it has none"
            option = ".".join(item for item in (f"--plugin-config.{name}", path) if item)
            raise ConfigError(f"{option} {text}{hint}", field=f"plugin_config.{name}")
        known[entries[0].name] = {**known.get(entries[0].name, {}), **options}
    return known


def _schema(entry: Entry) -> Mapping[str, Any] | None:
    """The schema beside the manifest: the package is located, not imported."""
    if entry.provided is None or entry.provided.options is None:
        return None
    spec = importlib.util.find_spec(entry.value.partition(":")[0].partition(".")[0])
    folders = spec.submodule_search_locations if spec is not None else None
    try:
        document = json.loads((Path(next(iter(folders or ()))) / entry.provided.options).read_text(encoding="utf-8"))
    except (OSError, ValueError, StopIteration) as error:
        raise PluginLoadError(
            f"{entry.label} names {entry.provided.options} as the schema of its options, which cannot be read ({error})",
            kind=entry.kind,
            name=entry.name,
        ) from error
    return document if isinstance(document, dict) else None
