"""What authors of Rabbet plugins need beside the contracts: suites that prove a plugin, oracles, fakes, a scaffold.

Importing this package imports neither torch nor pytest.
"""

__all__ = ["SUITE_VERSION"]

SUITE_VERSION = "1.0"
"""Version of the conformance suites; its major follows the contracts'."""
