"""HIP graphs of steps, through torch's interface of CUDA's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rabbet.contracts.platform import CaptureError, GraphSession

__all__ = ["capture"]

_MODE = "thread_local"
"""Only what the capturing thread does can spoil a capture. In the mode "global" so could RCCL's threads, which ask events."""


class _HipGraph(GraphSession):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        """See ``GraphSession``."""
        self._graph.replay()


def capture(work: Callable[[], None], pool: Any) -> GraphSession:
    """Run ``work`` once as it is, since kernels are compiled and libraries allocate on their first call; then capture it.

    Args:
        work: See ``SupportsGraphs.capture``.
        pool: ``torch.cuda.graph_pool_handle()``: memory that graphs share.

    Raises:
        CaptureError: If an operation cannot be captured; the device has done what was launched before.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=_MODE):
            work()
    except RuntimeError as error:
        raise CaptureError(str(error).partition("\n")[0]) from error
    graph.replay()
    return _HipGraph(graph)
