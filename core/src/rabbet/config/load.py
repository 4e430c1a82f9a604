"""Puts the configuration together: flags over environment over a YAML file over defaults.

The only module that reads environment variables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rabbet.config.check import check_conflicts
from rabbet.config.flags import SHORT, Flag, flags, sections
from rabbet.config.removed import NO_EFFECT, REMOVED, REMOVED_VALUES
from rabbet.config.schema import EngineConfig, ServerConfig
from rabbet.config.values import json_with_sizes, parse_text
from rabbet.errors import ConfigError, RemovedOptionError, shorten
from rabbet.registry.names import nearest

__all__ = ["engine_config_from_kwargs", "environment_flag", "parse_configs"]

logger = logging.getLogger(__name__)
_PREFIX = "RABBET_"
_NOT_OPTIONS = ("RABBET_CHECK_PLUGINS", "RABBET_VENV")


@dataclass(slots=True)
class _Source:
    """Values of one source: path to value, and the spelling that set it."""

    title: str
    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)

    def set(self, path: str, value: Any, spelling: str, *, append: bool = False) -> None:
        """Set one field. Two spellings of one field are a contradiction; lists collect."""
        known = self.spellings.get(path)
        if known is not None and known != spelling:
            raise ConfigError(f"{known} and {spelling} set the same option; keep one of them", field=path)
        if known is not None and isinstance(value, list) and isinstance(self.values[path], list):
            value = [*self.values[path], *value]
        elif known is not None and isinstance(value, dict) and isinstance(self.values[path], dict):
            value = {**self.values[path], **value}
        elif known is not None:
            logger.warning("%s is given more than once; the last value counts", spelling)
        if append and not isinstance(value, list):
            value = [value]
        self.values[path] = value
        self.spellings[path] = spelling


def parse_configs(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """The configuration for a command line.

    Args:
        arguments: Flags, and at most one positional: the model.
        environment: Variables; the process's own by default.

    Raises:
        ConfigError: For the first thing that is wrong, with what to do.
    """
    from_flags, file = _from_flags(arguments)
    sources = [from_flags, _from_environment(os.environ if environment is None else environment)]
    if file is not None:
        sources.append(_from_file(Path(file)))
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merged |= source.values
    return _build(merged)


def engine_config_from_kwargs(model: str, **options: Any) -> EngineConfig:
    """The configuration for keyword arguments: flat names, or ``NAME_config={...}`` for sections.

    Raises:
        ConfigError: As ``parse_configs``.
    """
    source = _Source("arguments")
    source.set("model.model", model, "model")
    for key, value in options.items():
        _set_keyword(source, key, value)
    engine, _ = _build(source.values)
    return engine


def environment_flag(name: str, default: bool = False) -> bool:
    """Whether a variable outside the schema (``RABBET_CHECK_PLUGINS``, ``HF_HUB_OFFLINE``) is switched on."""
    value = os.environ.get(name)
    return default if value is None else value.strip().casefold() in ("1", "true", "yes", "on")


def _set_keyword(source: _Source, key: str, value: Any) -> None:
    name = key.replace("_", "-")
    _refuse_removed(name, key)
    flag = flags().get(name)
    if flag is not None:
        if isinstance(value, str) and not flag.path.startswith("model.model"):
            value = parse_text(value, flag.annotation, field=key)
        source.set(flag.path, value, key)
    elif (section := _section_of(name)) is not None and isinstance(value, Mapping):
        for inner, item in value.items():
            _set_in_section(source, section, inner, item, f"{key}[{inner!r}]")
    else:
        raise _unknown(name, key)


def _section_of(name: str) -> str | None:
    """The section that ``NAME-config`` means, or the open mapping of that name."""
    if name in ("plugin-config", "additional-config"):
        return name.replace("-", "_")
    bare = name.removesuffix("-config").replace("-", "_")
    return bare if name.endswith("-config") and bare in sections() else None


def _set_in_section(source: _Source, section: str, key: str, value: Any, spelling: str) -> None:
    """Set ``section.key`` from a JSON object, a dotted flag or a keyword."""
    if section in ("plugin_config", "additional_config"):
        source.values.setdefault(section, {})
        _merge(source.values[section], key.split("."), value)
        return
    path = f"{section}.{key.replace('-', '_')}"
    known = {flag.path: flag for flag in _all_flags()}
    flag = known.get(path)
    if flag is None and "." in key:
        head, _, rest = key.partition(".")
        flag = known.get(f"{section}.{head.replace('-', '_')}")
        if flag is not None:
            source.set(flag.path, {rest: value}, spelling)
            return
    if flag is None:
        names = [item.path.partition(".")[2] for item in known.values() if item.path.startswith(f"{section}.")]
        raise ConfigError(f"{spelling}: {section} has no option {key!r}{_did_you_mean(key, names)}", field=path)
    if isinstance(value, str):
        value = parse_text(value, flag.annotation, field=spelling)
    source.set(path, value, spelling)


def _all_flags() -> Iterable[Flag]:
    from rabbet.config.flags import _from_schema

    return _from_schema()


def _merge(target: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    if isinstance(value, Mapping) and isinstance(target.get(keys[-1]), dict):
        target[keys[-1]].update(value)
    else:
        target[keys[-1]] = value


def _from_flags(arguments: Sequence[str]) -> tuple[_Source, str | None]:
    source = _Source("flags")
    file: str | None = None
    position = 0
    while position < len(arguments):
        token = arguments[position]
        position += 1
        if not token.startswith("-") or token == "-":
            source.set("model.model", token, "MODEL")
            continue
        name, equals, value = token.partition("=")
        name, value, equals = _long(name, value, equals)
        rest = arguments[position] if position < len(arguments) else None
        if name == "config":
            file, position = (value, position) if equals else (_needs_value(name, rest), position + 1)
            continue
        position += _one_flag(source, name, value if equals else None, rest)
    return source, file


def _long(name: str, value: str, equals: str) -> tuple[str, str, str]:
    """The long form of a flag, without dashes; ``-O3`` and ``-tp2`` carry their value."""
    if name.startswith("--"):
        head, dot, tail = name[2:].partition(".")
        return head.replace("_", "-") + dot + tail, value, equals
    if name in SHORT:
        return SHORT[name], value, equals
    for short, long in SHORT.items():
        if name.startswith(short) and name[len(short) :].isdigit():
            return long, name[len(short) :], "="
    raise ConfigError(f"there is no option {name}{_did_you_mean(name, SHORT)}")


def _one_flag(source: _Source, name: str, value: str | None, rest: str | None) -> int:
    """Set one flag; returns how many further arguments it took."""
    spelling = f"--{name}"
    head = name.partition(".")[0]
    _refuse_removed(head, spelling)
    if name in NO_EFFECT:
        logger.warning("%s has no effect: %s", spelling, NO_EFFECT[name])
        return int(value is None and rest is not None and not rest.startswith("-"))
    if name.removeprefix("no-") in NO_EFFECT:
        logger.warning("%s has no effect: %s", spelling, NO_EFFECT[name.removeprefix("no-")])
        return 0
    table = flags()
    flag = table.get(name)
    if flag is not None and flag.is_switch:
        if value is None and rest is not None and rest.casefold() in ("true", "false"):
            source.set(flag.path, rest.casefold() == "true", spelling)
            return 1
        source.set(flag.path, True if value is None else parse_text(value, flag.annotation, field=spelling), spelling)
        return 0
    negated = table.get(name.removeprefix("no-")) if name.startswith("no-") else None
    if negated is not None and negated.is_switch and value is None:
        source.set(negated.path, False, f"--{negated.name}")
        return 0
    if flag is None and _section_of(head.removesuffix("+")) is None:
        raise _unknown(head, spelling)
    taken = int(value is None)
    text = value if value is not None else _needs_value(name, rest)
    if flag is not None:
        if (gone := REMOVED_VALUES.get((name, text))) is not None:
            raise RemovedOptionError(f"{spelling} {text} is gone: {gone}", field=flag.path)
        source.set(flag.path, parse_text(text, flag.annotation, field=spelling), spelling)
        return taken
    _section_flag(source, name, text)
    return taken


def _section_flag(source: _Source, name: str, text: str) -> None:
    """``--NAME-config JSON``, ``--NAME-config.key value`` or ``--NAME-config.key+ value``."""
    head, dot, key = name.partition(".")
    section = _section_of(head)
    assert section is not None
    spelling = f"--{name}"
    if not dot:
        document = json_with_sizes(text, field=spelling)
        if not isinstance(document, dict):
            raise ConfigError(f"{spelling} must be a JSON object, not {shorten(text)}", field=section)
        for inner, value in document.items():
            _set_in_section(source, section, inner, value, spelling)
    elif key.endswith("+"):
        _set_in_section(source, section, key[:-1], [_scalar(text, spelling)], spelling)
    else:
        is_open = section in ("plugin_config", "additional_config")
        _set_in_section(source, section, key, _scalar(text, spelling) if is_open else text, spelling)


def _scalar(text: str, spelling: str) -> Any:
    """A JSON value where the text is one, the text itself otherwise."""
    try:
        return json_with_sizes(text, field=spelling)
    except ConfigError:
        return text


def _needs_value(name: str, rest: str | None) -> str:
    if rest is None or (rest.startswith("--") and len(rest) > 2):
        raise ConfigError(f"--{name} needs a value", field=name)
    return rest


def _from_environment(environment: Mapping[str, str]) -> _Source:
    source = _Source("environment")
    by_variable = {flag.environment: flag for flag in flags().values()}
    for variable, text in environment.items():
        if variable == "HF_HUB_OFFLINE" and text.strip().casefold() in ("1", "true", "yes", "on"):
            source.set("load.is_offline", True, variable)
        if not variable.startswith(_PREFIX) or variable in _NOT_OPTIONS:
            continue
        flag = by_variable.get(variable)
        if flag is None:
            # A container may carry variables of other tools under this prefix, so this is no error.
            logger.warning("%s is no option of Rabbet%s", variable, _did_you_mean(variable, by_variable))
            continue
        source.set(flag.path, parse_text(text, flag.annotation, field=variable), variable)
    return source


def _from_file(path: Path) -> _Source:
    source = _Source(str(path))
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}", field="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is no valid YAML: {error}", field="config") from error
    if not isinstance(document, dict):
        raise ConfigError(f"--config {path} must hold a mapping of options", field="config")
    for key, value in document.items():
        _set_keyword(source, str(key).replace("-", "_"), value)
    return source


def _refuse_removed(name: str, spelling: str) -> None:
    instead = REMOVED.get(name)
    if instead is not None:
        raise RemovedOptionError(f"{spelling} is gone: {instead}", field=name)


def _unknown(name: str, spelling: str) -> ConfigError:
    known = [*flags(), *(f"{section.replace('_', '-')}-config" for section in sections())]
    return ConfigError(
        f"there is no option {spelling}{_did_you_mean(name, known)}; see rabbet serve --help", field=name
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _build(values: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    nested: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for path, value in values.items():
        section, dot, name = path.partition(".")
        if section == "server":
            server[name] = value
        elif dot:
            nested.setdefault(section, {})[name] = value
        else:
            nested[section] = value
    try:
        engine, http = EngineConfig(**nested), ServerConfig(**server)
    except ValidationError as error:
        raise _first_problem(error) from None
    check_conflicts(engine, http)
    return engine, http


def _first_problem(error: ValidationError) -> ConfigError:
    problem = error.errors()[0]
    place = [
        str(item) for item in problem["loc"] if not str(item).startswith(("literal[", "constrained-", "function-"))
    ]
    path = ".".join(item for item in place if item not in ("int", "str", "float", "bool", "none"))
    return ConfigError(f"{path} is {shorten(problem.get('input'))}: {problem['msg'].lower()}", field=path)
