"""CUDA graphs of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rabbet.contracts.platform import CaptureError, GraphSession

__all__ = ["capture"]


class _CudaGraph(GraphSession):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        """See ``GraphSession``."""
        self._graph.replay()


def capture(work: Callable[[], None], pool: Any) -> GraphSession:
    """Run ``work`` once as it is, so that kernels are compiled, once into a graph, and replay that.

    Args:
        work: See ``SupportsGraphs.capture``.
        pool: ``torch.cuda.graph_pool_handle()``: memory that graphs share.

    Raises:
        CaptureError: If an operation cannot be captured.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            work()
    except RuntimeError as error:
        raise CaptureError(str(error).partition("\n")[0]) from error
    graph.replay()
    return _CudaGraph(graph)
