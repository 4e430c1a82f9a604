"""Puts the configuration together: flags over environment over a YAML file over defaults.

The only module that reads environment variables. A name is spelt with dashes or underscores; a dot leads into a
section or into a mapping. In a variable, a dash is one underscore and a dot is two:
``--attention-config.flash_attn_version`` is ``RABBET_ATTENTION_CONFIG__FLASH_ATTN_VERSION``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rabbet._util.files import read_text
from rabbet._util.text import check_plain, json_with_sizes, kinds_of, parse_text, scalar
from rabbet._util.yaml import parse_yaml
from rabbet.config.check import check_conflicts
from rabbet.config.flags import PREFIX, SHORT, Flag, fields, flags, sections, variable_of
from rabbet.config.removed import NO_EFFECT, NOT_YET, REMOVED, REMOVED_VALUES
from rabbet.config.schema import EngineConfig, ServerConfig
from rabbet.config.source import Place, Setting, Source, merge, nest
from rabbet.errors import ConfigError, RemovedOptionError, shorten

__all__ = ["engine_config_from_kwargs", "is_debug", "parse_configs"]

logger = logging.getLogger(__name__)
_NOT_OPTIONS = {"RABBET_TEST_VENV", "RABBET_VENV"}
_TRUE = ("1", "true", "yes", "on")
_MAY_BE_EMPTY = ("model.model", "server.root_path")
_MAX_FILE_BYTES = 1 << 18  # what the parser reads in a few seconds


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
    variables = os.environ if environment is None else environment
    from_flags, file = _from_flags(arguments)
    sources = [from_flags, _from_environment(variables)]
    # An empty flag is a file that is not there; an empty variable is none.
    if (file := variables.get("RABBET_CONFIG") or None if file is None else file) is not None:
        sources.append(_from_file(file))
    return _build(merge(sources))


def engine_config_from_kwargs(model: str, **options: Any) -> EngineConfig:
    """The configuration for keyword arguments, over the environment: flat names, or ``NAME_config={...}`` for sections.

    Raises:
        ConfigError: As ``parse_configs``.
    """
    source = Source()
    for key, value in {"model": model, **options}.items():
        _assign(source, key, value, key)
    if (server := next((place for place in source.settings if place[0] == "server"), None)) is not None:
        raise ConfigError(f"{server[1]} is an option of the server; leave it out", field=".".join(server))
    return _build(merge([source, _from_environment(os.environ)]))[0]


def is_debug(arguments: Sequence[str]) -> bool:
    """Whether errors show where they come from; works on a command line that is wrong otherwise."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    pairs = pairwise(words)
    wanted = [value for name, value in pairs if name.replace("_", "-") == "--log-level"]
    return (wanted or [os.environ.get("RABBET_LOG_LEVEL", "")])[-1].casefold() == "debug"


def _assign(source: Source, name: str, value: Any, spelling: str, *, is_append: bool = False, inside: str = "") -> None:
    """Set what ``name`` means: a field, a key inside a mapping, or each field of a section.

    Args:
        source: Where it goes.
        name: A flag's name without dashes in front; dashes and underscores are the same.
        value: Text is parsed for the field's type; anything else is taken as it is.
        spelling: What the user wrote, for messages.
        is_append: The value is one more item of a list.
        inside: Where in ``spelling`` the value stood.
    """
    normal = name.replace("_", "-")
    if normal in NO_EFFECT:
        logger.warning("%s has no effect: %s", spelling, NO_EFFECT[normal])
        return
    place, flag = _find(name, spelling)
    if flag is None:
        _assign_section(source, name, value, spelling)
        return
    if (instead := REMOVED_VALUES.get((flag.name, str(value)))) is not None:
        raise RemovedOptionError(f"{spelling} {value} is gone: {instead}", field=flag.path)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_inner = len(place) > len(flag.place)
    if isinstance(value, str) and not value.strip(" ,\t") and not is_inner and flag.path not in _MAY_BE_EMPTY:
        # --api-key "$KEY" without the variable would open the server to everybody, --plugins-allow "$NAMES" to all plugins.
        raise ConfigError(f"{spelling}{inside} is empty; give a value or leave the option out", field=flag.path)
    try:
        if isinstance(value, str):
            value = scalar(value) if is_inner else parse_text(value, flag.annotation)
        elif isinstance(value, bool) and not is_inner and bool not in kinds_of(flag.annotation):
            raise ValueError(f"is {str(value).lower()}, but is no switch; give a value, text in quotes")
        check_plain(value)
    except ValueError as error:
        raise ConfigError(f"{spelling}{inside} {error}", field=flag.path) from None
    if is_append and not isinstance(value, list):
        if not is_inner:
            raise ConfigError(f"{spelling}: {flag.path} is no list, so nothing can be appended", field=flag.path)
        value = [value]
    source.set(place, value, spelling, is_append=is_append)


def _assign_section(source: Source, name: str, value: Any, spelling: str) -> None:
    try:
        document = json_with_sizes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{spelling} {error}", field=_section(name)) from None
    if document is None:
        return
    if not isinstance(document, Mapping):
        raise ConfigError(f"{spelling} must be a JSON object, not {shorten(value)}", field=_section(name))
    for key, item in document.items():
        _assign(source, f"{name}.{key}", item, spelling, inside=f".{key}")


def _find(name: str, spelling: str) -> tuple[Place, Flag | None]:
    """The place that a name means, and its field; no field if it means a section."""
    normal = name.replace("_", "-")
    _refuse_removed(normal, spelling)
    if (flag := flags().get(normal)) is not None:
        return flag.place, flag
    section = _section(normal)
    if section is not None:
        return (section,), None
    head, *keys = name.split(".")
    section = _section(head)
    if section is not None:
        field, *keys = keys
        flag = fields().get((section, field.replace("-", "_")))
        if flag is None:
            names = [place[1] for place in fields() if place[0] == section and len(place) == 2]
            raise ConfigError(
                f"{spelling}: {section} has no option {field!r}{_did_you_mean(field, names)}",
                field=f"{section}.{field}",
            )
    else:
        flag = flags().get(head.replace("_", "-"))
    if flag is None or not all(keys) or (keys and dict not in kinds_of(flag.annotation)):
        known = [*flags(), *(f"{known.replace('_', '-')}-config" for known in sections()), "config"]
        shown = variable_of if spelling.startswith(PREFIX) else str
        raise ConfigError(
            f"there is no option {spelling}{_did_you_mean(normal, known, shown)}; see rabbet serve --help"
        )
    return (*flag.place, *keys), flag


def _section(name: str) -> str | None:
    """The section that ``NAME-config`` means."""
    bare = name.replace("-", "_")
    section = bare.removesuffix("_config")
    return section if section != bare and section in sections() else None


def _refuse_removed(name: str, spelling: str) -> None:
    for known in (name, name.partition(".")[0], name.removeprefix("no-")):
        if (instead := REMOVED.get(known)) is not None:
            raise RemovedOptionError(f"{spelling} is gone: {instead}", field=known)
        if (lack := NOT_YET.get(known)) is not None:
            raise ConfigError(f"{spelling} is not possible in this release; leave it out: {lack}", field=known)


def _did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    # Here, because the registry costs 50 ms that nobody needs who makes no mistake.
    from rabbet.registry.names import nearest

    close = nearest(name, known)
    return f"; did you mean {' or '.join(map(shown, close))}?" if close else ""


def _from_flags(arguments: Sequence[str]) -> tuple[Source, str | None]:
    """The values of a command line, and the file that ``--config`` names."""
    source = Source()
    file: str | None = None
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-") or token == "-":
            if (model := source.settings.get(("model", "model"))) is not None:
                words = [word.partition("=")[0].replace("_", "-") for word in (token, str(model.value))]
                meant = [f"; did you mean --{word}?" for word in words if word in flags()]
                raise ConfigError(
                    f"{token!r} stands alone; a list is written with commas, a value behind its flag{''.join(meant[:1])}"
                )
            _assign(source, "model", token, "MODEL")
            continue
        name, equals, value = token.partition("=")
        name, attached = _long(name)
        given = value if equals else attached
        if name == "config":
            if file is not None:
                raise ConfigError("--config is given twice; one file is read", field="config")
            file = _value(name, given, rest)
        else:
            _one_flag(source, name, given, rest)
    return source, file


def _long(name: str) -> tuple[str, str | None]:
    """The long form of a flag without dashes; ``-O3`` and ``-tp2`` carry their value."""
    if name.startswith("--"):
        head, dot, tail = name[2:].partition(".")
        return head.replace("_", "-") + dot + tail, None
    head, dot, tail = name.partition(".")
    if head in SHORT:
        return SHORT[head] + dot + tail, None
    for short, long in SHORT.items():
        if name.startswith(short) and name[len(short) :].isdigit():
            return long, name[len(short) :]
    raise ConfigError(f"there is no option {name}{_did_you_mean(name, SHORT)}")


def _one_flag(source: Source, name: str, given: str | None, rest: list[str]) -> None:
    """Set one flag; takes its value from ``rest`` where it is not ``given``."""
    spelling = f"--{name}"
    positive = name.removeprefix("no-")
    if positive in NO_EFFECT:
        if given is None and positive == "mamba-cache-mode":
            _value(name, None, rest)
        _assign(source, positive, given, spelling)
        return
    flag, negated = flags().get(name.replace("_", "-")), flags().get(positive.replace("_", "-"))
    if flag is not None and flag.is_switch and given is None:
        given = rest.pop(0) if rest and rest[0].casefold() in ("true", "false") else "true"
    elif flag is None and name != positive and negated is not None and negated.is_switch:
        if given is not None:
            raise ConfigError(f"{spelling} takes no value; write --{positive}={given}", field=negated.path)
        name, given, spelling = positive, "false", f"--{positive}"
    else:
        # An unknown option is that, whatever stands behind it.
        _find(name.removesuffix("+"), spelling)
    _assign(source, name.removesuffix("+"), _value(name, given, rest), spelling, is_append=name.endswith("+"))


def _value(name: str, given: str | None, rest: list[str]) -> str:
    if given is not None:
        return given
    if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
        raise ConfigError(f"--{name} needs a value", field=name)
    return rest.pop(0)


def _from_environment(environment: Mapping[str, str]) -> Source:
    source = Source()
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in _NOT_OPTIONS | {"RABBET_CONFIG"}:
            continue
        if variable.startswith("RABBET_QUICKSTART_") or text.startswith("tcp://"):
            # Kubernetes gives each pod RABBET_PORT=tcp://... if a service is called rabbet.
            continue
        name = variable.removeprefix(PREFIX).casefold().replace("__", ".").replace("_", "-")
        try:
            _find(name, variable)
        except ConfigError as error:
            # A container may carry variables of other tools under this prefix, so this alone stops nothing.
            logger.warning("%s", error)
            continue
        _assign(source, name, text, variable)
    is_set = ("load", "is_offline") in source.settings
    if not is_set and environment.get("HF_HUB_OFFLINE", "").strip().casefold() in _TRUE:
        source.set(("load", "is_offline"), True, "HF_HUB_OFFLINE")
    return source


def _from_file(path: str) -> Source:
    source = Source()
    try:
        document = parse_yaml(read_text(path, limit=_MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}", field="config") from error
    except ValueError as error:
        raise ConfigError(f"--config {path} is no valid YAML: {error}", field="config") from error
    if not isinstance(document, dict | None):
        raise ConfigError(f"--config {path} must hold a mapping of options", field="config")
    for key, value in (document or {}).items():
        _assign(source, str(key), value, f"{Path(path).name}: {key}")
    return source


def _build(settings: Mapping[Place, Setting]) -> tuple[EngineConfig, ServerConfig]:
    tree = nest(settings)
    server = tree.pop("server", {})
    try:
        engine, http = EngineConfig(**tree), ServerConfig(**server)
    except ValidationError as error:
        raise _first_problem(error, settings) from None
    check_conflicts(engine, http)
    return engine, http


def _first_problem(error: ValidationError, settings: Mapping[Place, Setting]) -> ConfigError:
    problem = error.errors()[0]
    place = tuple(str(item) for item in problem["loc"])
    if error.title == ServerConfig.__name__:
        place = ("server", *place)
    known = max((item for item in settings if item == place[: len(item)]), key=len, default=place[:2])
    spelling = f"{settings[known].spelling}: " if known in settings else ""
    path = ".".join(known)
    return ConfigError(f"{spelling}{path} is {shorten(problem.get('input'))}: {problem['msg'].lower()}", field=path)
