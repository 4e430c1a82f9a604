"""Which distribution provides which plugin: data only, in ``catalog.toml``."""
