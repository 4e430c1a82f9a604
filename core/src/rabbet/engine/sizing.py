"""How long a context the KV cache allows, and the lines that say so at the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rabbet.config.resolved import ResolvedConfig
from rabbet.contracts.executor import MemoryReport
from rabbet.engine.messages import EngineInfo
from rabbet.errors import ConfigError
from rabbet.kv.groups import bytes_for_one_request, max_len_that_fits
from rabbet.types.kv import KVCacheSpec

__all__ = ["fit_context", "report_capacity"]

logger = logging.getLogger(__name__)
_GIB = 1 << 30


def fit_context(
    resolved: ResolvedConfig, specs: Mapping[str, KVCacheSpec], num_blocks: int, report: MemoryReport
) -> int:
    """The longest context to serve.

    Raises:
        ConfigError: If one request of the asked length does not fit: needed, available, what would fit, and the flags.
    """
    wanted = resolved.max_model_len
    fits = max_len_that_fits(specs, num_blocks, wanted)
    if fits >= wanted:
        return wanted
    needed = bytes_for_one_request(specs, wanted) / _GIB
    available = report.available_kv_bytes / _GIB
    if resolved.is_max_model_len_auto and fits > 1:
        logger.info("context: %d of the model's %d tokens fit into the KV cache (--max-model-len auto)", fits, wanted)
        return fits
    raise ConfigError(
        f"the KV cache has {available:.2f} GiB ({max(num_blocks - 1, 0)} blocks), but one request of {wanted} tokens needs "
        f"{needed:.2f} GiB; at most {fits} tokens would fit. Raise --kv-cache-memory-bytes or --gpu-memory-utilization, "
        "or lower --max-model-len",
        field="model.max_model_len",
    )


def report_capacity(info: EngineInfo, report: MemoryReport) -> None:
    """The lines of the start-up log about memory."""
    logger.info(
        "memory: weights %.2f GiB, activations %.2f GiB, KV cache %.2f GiB",
        report.weights_bytes / _GIB,
        report.activation_bytes / _GIB,
        info.kv_cache_bytes / _GIB,
    )
    logger.info(
        "KV cache size: %d tokens in %d blocks; maximum concurrency for %d tokens per request: %.2fx",
        info.capacity_tokens,
        info.num_blocks - 1,
        info.max_model_len,
        info.max_concurrency,
    )
