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

__all__ = ["check_steps", "fit_context", "no_memory", "report_capacity"]

logger = logging.getLogger(__name__)
_GIB = 1 << 30


def check_steps(resolved: ResolvedConfig) -> None:
    """Refuse steps that are larger than the device by what is sure to be allocated, before anything is.

    Raises:
        ConfigError: With the size, and the options that lower it.
    """
    hf = {**resolved.files.config, **resolved.config.model.hf_overrides}
    sizes = [(hf.get("text_config") or hf).get(name) for name in ("hidden_size", "intermediate_size")]
    hidden, inner = (size if isinstance(size, int) else 0 for size in sizes)
    tokens = resolved.max_num_batched_tokens
    # Residual, queries, their output and the two halves of the feed-forward layer; logits are float32.
    needed = (4 if resolved.dtype == "float32" else 2) * tokens * (3 * hidden + 2 * inner)
    needed += 4 * min(tokens, resolved.max_num_seqs) * resolved.vocab_size
    total = resolved.composition.load("platform").detect()[0].total_memory_bytes
    if needed > total:
        raise ConfigError(
            f"a step needs at least {_size(needed)}, but the device has {_size(total)}; {_lower(resolved)}",
            field="scheduler.max_num_batched_tokens",
        )


def no_memory(resolved: ResolvedConfig, phase: str, error: BaseException) -> ConfigError:
    """The error for a start that ran out of memory."""
    told = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"memory ran out while {phase} ({told}); {_lower(resolved)}")


def _lower(resolved: ResolvedConfig) -> str:
    tokens, requests = resolved.max_num_batched_tokens, resolved.max_num_seqs
    return (
        f"lower --max-num-batched-tokens (now {tokens}), --max-num-seqs (now {requests}), --max-model-len (now "
        f"{resolved.max_model_len}), --kv-cache-memory-bytes or --num-gpu-blocks-override"
    )


def fit_context(
    resolved: ResolvedConfig, specs: Mapping[str, KVCacheSpec], num_blocks: int, report: MemoryReport
) -> int:
    """The longest context to serve.

    Raises:
        ConfigError: If one request of the asked length does not fit: needed, available, what would fit, and the flags.
    """
    if report.available_kv_bytes > report.total_bytes:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {report.available_kv_bytes}, but the device has {report.total_bytes} bytes",
            field="cache.kv_cache_memory_bytes",
        )
    wanted = resolved.max_model_len
    fits = max_len_that_fits(specs, num_blocks, wanted)
    if fits >= wanted:
        return wanted
    if resolved.is_max_model_len_auto and fits > 1:
        logger.info("context: %d of the model's %d tokens fit into the KV cache (--max-model-len auto)", fits, wanted)
        return fits
    needed = _size(bytes_for_one_request(specs, wanted))
    available = _size(report.available_kv_bytes)
    raise ConfigError(
        f"the KV cache has {available} ({max(num_blocks - 1, 0)} blocks), but one request of {wanted} tokens "
        f"needs {needed}; the largest --max-model-len that fits is {fits}. {_advice(resolved, report, fits)}",
        field="model.max_model_len",
    )


def _size(size_bytes: int) -> str:
    """In a unit in which it is not zero."""
    return f"{size_bytes / _GIB:.3f} GiB" if size_bytes >= _GIB / 100 else f"{size_bytes / (1 << 20):.3f} MiB"


def _advice(resolved: ResolvedConfig, report: MemoryReport, fits: int) -> str:
    cache = resolved.config.cache
    if cache.num_gpu_blocks_override is not None:
        raising = f"Raise --num-gpu-blocks-override (now {cache.num_gpu_blocks_override})"
    elif cache.kv_cache_memory_bytes is not None:
        raising = f"Raise --kv-cache-memory-bytes (now {cache.kv_cache_memory_bytes})"
    else:
        raising = f"Raise --gpu-memory-utilization (now {resolved.memory_fraction:g}), or set --kv-cache-memory-bytes"
        if report.activation_bytes > report.available_kv_bytes:
            tokens, takes = resolved.max_num_batched_tokens, _size(report.activation_bytes)
            raising = f"Lower --max-num-batched-tokens (now {tokens}; such a step takes {takes}). {raising}"
    return f"{raising}, or use --max-model-len {fits} or auto" if fits > 1 else raising


def report_capacity(info: EngineInfo, report: MemoryReport) -> None:
    """The lines of the start-up log about memory."""
    logger.info(
        "memory: weights %.2f GiB, activations %.2f GiB", report.weights_bytes / _GIB, report.activation_bytes / _GIB
    )
    logger.info(
        "KV cache: %d tokens in %d blocks (%.2f GiB); maximum concurrency for %d tokens per request: %.2fx",
        info.capacity_tokens,
        info.num_blocks - 1,
        info.kv_cache_bytes / _GIB,
        info.max_model_len,
        info.max_concurrency,
    )
