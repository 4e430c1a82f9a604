"""The zoo: plugins with one planted fault each. A suite that lets one of them live is not good enough."""

from rabbet_sdk.mutants.base import Mutant, all_mutants, mutant_kinds
from rabbet_sdk.mutants.run import Kill, hunt

__all__ = ["Kill", "Mutant", "all_mutants", "hunt", "mutant_kinds"]
