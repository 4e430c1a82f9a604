"""Finds, judges, chooses and loads plugins. The only package that reads entry points. Imports no torch."""

from rabbet.registry.catalog import Catalog
from rabbet.registry.composition import Composition, compose
from rabbet.registry.decision import Decision, Rejection
from rabbet.registry.hooks import HookBus
from rabbet.registry.policy import PluginPolicy
from rabbet.registry.select import select

__all__ = ["Catalog", "Composition", "Decision", "HookBus", "PluginPolicy", "Rejection", "compose", "select"]
