"""The bus for hook plugins: pluggy finds the listeners, Rabbet loads them by policy and calls them one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pluggy

from rabbet.contracts.hooks import HookSpecs
from rabbet.errors import PluginPolicyError
from rabbet.registry.catalog import Catalog
from rabbet.registry.composition import Composition
from rabbet.registry.entry import State
from rabbet.registry.loader import load_entry
from rabbet.registry.policy import PluginPolicy, matches
from rabbet.registry.tamper import watch

__all__ = ["HookBus"]

logger = logging.getLogger(__name__)
_MAX_FAILURES = 3


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("rabbet")
    manager.add_hookspecs(HookSpecs)
    return manager


@dataclass(slots=True)
class HookBus:
    """Calls every listener of a hook; one that raises disturbs no other, and is switched off after three failures."""

    manager: pluggy.PluginManager = field(default_factory=_manager)
    failures: Counter[str] = field(default_factory=Counter)
    total_failures: Counter[str] = field(default_factory=Counter)

    @classmethod
    def load(cls, catalog: Catalog, policy: PluginPolicy) -> HookBus:
        """Load hook plugins that are installed and not denied; those that add routes only if allowed by name.

        Raises:
            PluginPolicyError: If one changes core and the policy is strict.
        """
        bus = cls()
        for entry in catalog.of_kind("hooks"):
            if entry.state not in (State.COMPATIBLE, State.UNDECLARED):
                continue
            named = any(matches(rule, entry.kind, entry.name, entry.distribution) for rule in policy.allow)
            if (entry.provided is None or entry.provided.adds_routes) and not named:
                logger.info("hooks/%s of %s is not loaded: allow it by name (--plugins-allow)", entry.name, entry.label)
                continue
            try:
                found = load_entry(entry)
                if hasattr(found, "add_http_routes") and not named:
                    raise PluginPolicyError("it adds routes, which its manifest does not say (adds_routes); allow it by name")
                with watch(entry.label, entry.value):
                    bus.manager.register(found(), name=entry.name)
            except (Exception, SystemExit) as error:  # its constructor may raise anything, and must not stop the start
                logger.warning(
                    "hooks/%s of %s is left out: %s: %s", entry.name, entry.label, type(error).__name__, error
                )
                bus.manager.unregister(name=entry.name) if bus.manager.has_plugin(entry.name) else None
        Composition(decisions=()).settled(is_strict=policy.is_strict)
        return bus

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Results of all listeners that returned something, in pluggy's order."""
        results = []
        for implementation in reversed(getattr(self.manager.hook, hook).get_hookimpls()):
            name = implementation.plugin_name
            if self.failures[name] >= _MAX_FAILURES:
                continue
            given = {key: arguments[key] for key in implementation.argnames}
            try:
                result = implementation.function(**given)
            except BaseException:  # a listener may raise anything, and must not disturb the others
                self.failures[name] += 1
                self.total_failures[name or "?"] += 1
                off = ", which is switched off now" if self.failures[name] >= _MAX_FAILURES else ""
                logger.exception("hook %s of plugin %s failed%s", hook, name, off)
                continue
            self.failures[name] = 0
            if result is not None:
                results.append(result)
        return results
