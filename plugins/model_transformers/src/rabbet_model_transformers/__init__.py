"""Any causal model of transformers, with attention over the engine's paged cache."""
