"""Checkpoints: where they are, how names map, and how a model is filled."""

from rabbet.weights.rules import STANDARD_STACKS, Stack, WeightRules

__all__ = ["STANDARD_STACKS", "Stack", "WeightRules"]
