"""Commands that hook plugins add to ``rabbet``; looked for only where they may be meant."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import typer

from rabbet.errors import RabbetError

__all__ = ["add_plugin_commands", "command_names"]

logger = logging.getLogger(__name__)


def add_plugin_commands(app: typer.Typer) -> None:
    """Ask hook plugins for commands. One that carries the name of a command that is there is left out; a group of a
    name that is there adds its new commands to that group.

    A wrong environment is told in a warning: help is what one asks for when something is wrong.
    """
    from rabbet.config.load import parse_configs
    from rabbet.config.policy import policy_of
    from rabbet.registry.catalog import Catalog
    from rabbet.registry.hooks import HookBus

    try:
        policy = policy_of(parse_configs([])[0])
        catalog = Catalog.scan(policy)
    except RabbetError as error:
        logger.warning("no plugin is asked for commands: %s", error)
        return
    if not catalog.names("hooks"):
        return
    added = typer.Typer()
    HookBus.load(catalog, policy).call("add_cli_commands", app=added)
    merge_commands(app, added)


def merge_commands(app: typer.Typer, added: typer.Typer) -> None:
    """Take over the commands and groups of ``added`` whose names are free; a group that is there gains new commands."""
    taken = set(command_names(app))
    for command in added.registered_commands:
        if _is_free(_command_name(command), taken):
            app.registered_commands.append(command)
    groups = {str(group.name): group.typer_instance for group in app.registered_groups}
    for group in added.registered_groups:
        own = groups.get(str(group.name))
        if own is not None and group.typer_instance is not None:
            merge_commands(own, group.typer_instance)
        elif _is_free(str(group.name), taken):
            app.registered_groups.append(group)


def _is_free(name: str, taken: set[str]) -> bool:
    if name in taken:
        logger.warning("a plugin adds the command %r, which there is already; it is left out", name)
        return False
    taken.add(name)
    return True


def command_names(app: typer.Typer) -> Iterable[str]:
    """Commands and groups of an application."""
    yield from (_command_name(command) for command in app.registered_commands)
    yield from (str(group.name) for group in app.registered_groups)


def _command_name(command: typer.models.CommandInfo) -> str:
    callback = command.callback
    return command.name or (callback.__name__.replace("_", "-") if callback is not None else "")
