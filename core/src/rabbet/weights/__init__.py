"""Checkpoints: where they are, how names map, and how a model is filled."""

from rabbet.weights.rules import STANDARD_STACKS, Experts, Stack, WeightRules

__all__ = ["STANDARD_STACKS", "Experts", "Stack", "WeightRules"]
