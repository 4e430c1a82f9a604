"""The contracts that plugins are written against. What is listed here is all that a plugin needs of Rabbet's core,
beside ``rabbet.types``, ``rabbet.errors``, ``rabbet.layers``, ``rabbet.parallel`` and ``rabbet.weights``.

Importing this package imports no torch: contracts name its types in annotations only.
"""

from rabbet.contracts.kinds import KINDS, Kind
from rabbet.contracts.registration import *  # noqa: F403
from rabbet.contracts.registration import __all__ as _registration_names
from rabbet.contracts.support import Refusal

CONTRACT_VERSIONS = {name: kind.version for name, kind in KINDS.items()}
"""Contract version of each kind that this core speaks."""

__all__ = ["CONTRACT_VERSIONS", "KINDS", "Kind", "Refusal", *_registration_names]
