"""Ranks that share a model."""

from rabbet.parallel.state import ParallelState, init_parallel

__all__ = ["ParallelState", "init_parallel"]
