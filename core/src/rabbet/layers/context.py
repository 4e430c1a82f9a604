"""What every layer of a model is built from: parallel state, types, quantisation and kernels. No global state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rabbet.contracts.quantization import EmbeddingMethod, FusedMoEMethod, KVCacheMethod, LinearMethod
from rabbet.errors import PluginLoadError, shorten

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rabbet.contracts.kv_cache_dtype import PageFormat
    from rabbet.contracts.layer_ops import LayerOps
    from rabbet.contracts.linear import LinearBackend, MoEBackend
    from rabbet.contracts.quantization import QuantizationConfig
    from rabbet.layers.attention import Attention
    from rabbet.parallel.state import ParallelState

__all__ = ["BuildContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Handed by the runner to the model, and by the model to each of its layers.

    Attributes:
        parallel: Rank, sizes and collectives.
        dtype: Type of activations and dense parameters.
        device: Where parameters are created.
        linear: Kernels for dense linear layers.
        ops: Norms, rotary embedding, gated activations.
        moe: Kernels for dense experts, or None for the plain reference.
        quantization: The checkpoint's method, or None.
        block_size: Tokens a KV block.
        kv_cache_dtype: Name of the KV-cache dtype, resolved.
        page_format: Key heads of a rank and their size to how that dtype stores a token; None: as plain numbers.
        max_model_len: Longest context; rotary tables are made for it.
        attention_layers: Filled by attention layers as they are built, name to layer, in model order.
    """

    parallel: ParallelState
    dtype: torch.dtype
    device: torch.device
    linear: LinearBackend
    ops: LayerOps
    moe: MoEBackend | None = None
    quantization: QuantizationConfig | None = None
    block_size: int = 16
    kv_cache_dtype: str = "bfloat16"
    page_format: Callable[[int, int], PageFormat] | None = None
    max_model_len: int = 8192
    attention_layers: dict[str, Attention] = field(default_factory=dict)

    def quant_method(self, layer: nn.Module, prefix: str, kind: type[Any]) -> Any:
        """The quantisation method of one layer; None where its weights are dense, or the method is for other layers.

        Raises:
            PluginLoadError: If the configuration gives what is no method.
        """
        method = self.quantization.get_quant_method(layer, prefix) if self.quantization is not None else None
        if not isinstance(method, LinearMethod | FusedMoEMethod | EmbeddingMethod | KVCacheMethod | None):
            told = f"{type(self.quantization).__qualname__}.get_quant_method() returned {shorten(method)} for {prefix}"
            raise PluginLoadError(f"{told}, but must return a method or None", kind="quantization")
        return method if isinstance(method, kind) else None
