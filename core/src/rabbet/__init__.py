"""Rabbet: an engine that serves large language models, put together from plugins."""
