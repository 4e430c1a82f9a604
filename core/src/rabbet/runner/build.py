"""Builds the model of one rank: platform, kernels, layers, weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rabbet.config.resolved import ResolvedConfig, load_hf_config
from rabbet.contracts.attention import AttentionBackend, AttentionQuery
from rabbet.contracts.kv_cache_dtype import KVCacheDtype, KVDtypeQuery, PageFormat
from rabbet.contracts.layer_ops import LayerOps
from rabbet.contracts.model import Model
from rabbet.contracts.platform import Platform
from rabbet.contracts.quantization import QuantizationConfig
from rabbet.errors import ConfigError, PluginRefusedError
from rabbet.layers import Attention, BuildContext
from rabbet.layers.reference import TorchLayerOps
from rabbet.parallel import ParallelState
from rabbet.weights.dummy import fill_with_noise
from rabbet.weights.load import finish_loading, load_weights

__all__ = ["BuiltModel", "attention_query", "build_model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A loaded model and what it was built from."""

    model: Any
    context: BuildContext
    weights_bytes: int


def build_model(
    resolved: ResolvedConfig,
    platform: Platform,
    *,
    device: torch.device,
    parallel: ParallelState,
    progress: Callable[[str, int], None] | None = None,
) -> BuiltModel:
    """Build and load.

    Raises:
        PluginRefusedError: If the attention backend cannot serve a layer.
        WeightsError: If the checkpoint does not fit the model.
    """
    composition = resolved.composition
    config = load_hf_config(resolved.files, resolved.config.model.hf_overrides)
    model_class = composition.load("model")
    context = BuildContext(
        parallel=parallel,
        dtype=getattr(torch, resolved.dtype),
        device=device,
        linear=composition.build("linear"),
        ops=composition.expect("platform", "layer_ops", platform.layer_ops(), LayerOps | None) or TorchLayerOps(),
        moe=composition.build("moe") if composition.get("moe") else None,
        quantization=_quantization(resolved, model_class, config),
        block_size=resolved.block_size,
        kv_cache_dtype=resolved.kv_cache_dtype,
        page_format=partial(_page_format, resolved) if composition.get("kv_cache_dtype") else None,
        max_model_len=resolved.max_model_len,
    )
    format_class = composition.load("weights")
    with torch.device(device):
        model = composition.build("model", config=config, context=context)
    _check_attention(resolved, context)
    if composition.name("weights") == "dummy":
        size = fill_with_noise(model)
        finish_loading(model)
    else:
        rules = model_class.weight_rules(config)
        report = load_weights(model, rules, format_class.tensors(resolved.files), progress=progress)
        size = report.parameters_bytes
        logger.info("weights: %d tensors in %.1f s", report.num_tensors, report.seconds)
    assert isinstance(model, nn.Module)
    return BuiltModel(model=model.eval(), context=context, weights_bytes=size)


def attention_query(resolved: ResolvedConfig, layer: Attention) -> AttentionQuery:
    """What a layer that was built asks of its backend."""
    spec = layer.kv_cache_spec()
    return AttentionQuery(
        device_type=resolved.device_type,
        arch=resolved.arch,
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.kv_cache_dtype,
        num_heads=layer.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        block_size=spec.block_size,
        window=spec.window,
        has_soft_cap=layer.spec.soft_cap is not None,
        has_sinks=layer.spec.sinks is not None,
        has_alibi=layer.spec.alibi_slopes is not None,
    )


def _check_attention(resolved: ResolvedConfig, context: BuildContext) -> None:
    """Ask the backend about every layer there is: it was chosen by what config.json says, which a model may not follow."""
    if not context.attention_layers:
        raise ConfigError("the model has no attention layers", field="model")
    backend: type[AttentionBackend] = resolved.composition.load("attention")
    name = resolved.composition.name("attention") or ""
    for layer_name, layer in context.attention_layers.items():
        refusals = backend.supports(attention_query(resolved, layer))
        if refusals:
            raise PluginRefusedError(
                f"the layer {layer_name} cannot be run by attention/{name}: {'; '.join(map(str, refusals))}; choose another "
                "with --attention-backend, and see: rabbet plugins list",
                kind="attention",
                name=name,
                refusals=refusals,
            )


def _page_format(resolved: ResolvedConfig, num_kv_heads: int, head_dim: int) -> PageFormat:
    """How the KV-cache dtype stores a token of one layer; it was chosen by what config.json says, as attention was."""
    dtype: type[KVCacheDtype] = resolved.composition.load("kv_cache_dtype")
    query = KVDtypeQuery(
        device_type=resolved.device_type,
        arch=resolved.arch,
        dtype=resolved.dtype,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
    )
    if refusals := dtype.supports(query):
        raise PluginRefusedError(
            f"--kv-cache-dtype {resolved.kv_cache_dtype} cannot store layers of {num_kv_heads} heads of {head_dim}: "
            f"{'; '.join(map(str, refusals))}; use --kv-cache-dtype auto",
            kind="kv_cache_dtype",
            name=resolved.kv_cache_dtype,
            refusals=refusals,
        )
    return dtype.page_format(query)


def _quantization(resolved: ResolvedConfig, model_class: type[Model], config: Any) -> Any:
    decision = resolved.composition.get("quantization")
    if decision is None:
        return None
    stored = resolved.files.config.get("quantization_config") or {}
    settings = {**stored, **resolved.config.model.quantization_config}
    method = resolved.composition.load("quantization").from_config(settings)
    resolved.composition.expect("quantization", "from_config", method, QuantizationConfig)
    method.packed_modules = model_class.weight_rules(config).packed_modules
    return method
