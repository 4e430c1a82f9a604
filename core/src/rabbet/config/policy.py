"""The operator's rules for plugins, for those who ask what is installed and resolve nothing."""

from __future__ import annotations

from rabbet.config.schema import EngineConfig
from rabbet.registry.policy import PluginPolicy

__all__ = ["policy_of"]


def policy_of(config: EngineConfig) -> PluginPolicy:
    """The operator's rules for plugins."""
    plugins = config.plugins
    return PluginPolicy(
        allow=tuple(plugins.allow), deny=tuple(plugins.deny), mode=plugins.mode, prefer=dict(plugins.prefer),
        override=dict(plugins.override), is_strict=plugins.strict, auto=plugins.auto, files=tuple(plugins.files),
        locked=plugins.locked, certificates=plugins.certificates, is_checked=plugins.check,
        import_timeout_s=plugins.import_timeout_s,
    )  # fmt: skip
