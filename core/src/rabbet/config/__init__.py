"""Configuration: the schema, where values come from, and how every "auto" is decided."""

from rabbet.config.load import engine_config_from_kwargs, parse_configs
from rabbet.config.schema import EngineConfig, ServerConfig

__all__ = ["EngineConfig", "ServerConfig", "engine_config_from_kwargs", "parse_configs"]
