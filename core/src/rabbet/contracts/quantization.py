"""Contract of a quantisation method: how a checkpoint stores weights and how layers compute with them.

The layer classes that a method sees (``rabbet.layers``): ``LinearBase``, ``FusedMoE``, ``VocabParallelEmbedding``
(and ``ParallelLMHead``) and ``Attention``. Each kind of layer has its own kind of method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "EmbeddingMethod",
    "FusedMoEMethod",
    "KVCacheMethod",
    "LinearMethod",
    "LinearMethodBase",
    "QuantizationConfig",
    "QuantizationQuery",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationQuery:
    """Where a method would have to work: device, types, and the checkpoint's own words (``raw_config``)."""

    device_type: str
    arch: str
    dtype: str
    kv_cache_dtype: str = "auto"
    model_architecture: str = ""
    raw_config: Mapping[str, Any] | None = None


class LinearMethod(ABC):
    """How one linear layer stores and applies its weight.

    Order of calls: ``create_weights`` in the layer's constructor, the loader fills the parameters through their
    ``weight_loader`` attributes, ``process_weights_after_loading`` once, then ``apply`` at will. Loading new
    weights repeats the last three.
    """

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        *,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        """Register parameters on ``layer``.

        Args:
            layer: The layer.
            input_size_per_partition: Inputs of this rank.
            output_partition_sizes: Outputs of this rank, one entry for each merged matrix (q, k, v; gate, up).
            input_size: Inputs of all ranks.
            output_size: Outputs of all ranks.
            params_dtype: Type of dense parameters.
            weight_loader: Callable ``(parameter, tensor, shard_id)`` to attach to each parameter as the attribute
                ``weight_loader``; it slices by the parameter's attributes ``output_dim`` and ``input_dim`` (axis
                indices, absent where the axis is not sharded) and ``packed_factor`` (values an element, default 1).
        """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack, quantise or check what was loaded. Idempotent."""
        return None

    @abstractmethod
    def apply(self, layer: nn.Module, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` in the dtype of ``x_TI``."""


LinearMethodBase = LinearMethod
"""The reference engine's name for ``LinearMethod``."""


class FusedMoEMethod(ABC):
    """The same for the experts of one layer."""

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        """Register the parameters of ``num_experts`` local experts on ``layer``.

        What checkpoints call ``weight`` of an expert's matrices goes to ``gate_up`` (the gate's rows above those of up)
        and ``down``; ``weight_scale`` goes to ``gate_up_scale`` and ``down_scale``, any other ``X`` to ``gate_up_X`` and
        ``down_X`` (``rabbet.weights.Experts``).

        Args:
            layer: The layer.
            num_experts: X.
            hidden_size: N.
            intermediate_size_per_partition: Inner size of this rank.
            params_dtype: Type of dense parameters.
            weight_loader: ``FusedMoE.load_shard``, to attach as for linear layers. Parameters are [X, ...]; their
                ``output_dim`` and ``input_dim`` count axes from the expert's on.
        """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As for linear layers."""
        return None

    @abstractmethod
    def apply(
        self, layer: nn.Module, x_TI: torch.Tensor, topk_weights_TA: torch.Tensor, topk_ids_TA: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum over the local experts of each token."""


FusedMoEMethodBase = FusedMoEMethod
"""The reference engine's name for ``FusedMoEMethod``."""


class EmbeddingMethod(ABC):
    """The same for a vocabulary-parallel embedding or output head."""

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, *, num_rows: int, embedding_dim: int, params_dtype: torch.dtype, weight_loader: Any
    ) -> None:
        """Register the parameters of this rank's rows."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As for linear layers."""
        return None

    @abstractmethod
    def embed(self, layer: nn.Module, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of local ids."""

    @abstractmethod
    def logits(self, layer: nn.Module, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ rows.T``, for a head or a tied embedding."""


class KVCacheMethod(ABC):
    """Scales of a quantised KV cache, one instance an attention layer."""

    @abstractmethod
    def create_weights(self, layer: nn.Module) -> None:
        """Register scale parameters on the attention layer."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Set ``layer.k_scale`` and ``layer.v_scale``: numbers, or float32 [K] where the KV-cache dtype has one a head."""


class QuantizationConfig(ABC):
    """One method with the settings of one checkpoint."""

    file_names: ClassVar[tuple[str, ...]] = ()
    """Files beside config.json that may hold the settings, e.g. ``quant_config.json``."""

    @classmethod
    @abstractmethod
    def supports(cls, query: QuantizationQuery) -> tuple[Refusal, ...]:
        """Every reason why the method cannot work there; empty: it can."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Build from the checkpoint's settings (``quantization_config`` of config.json), or from ``{}`` where the
        method quantises at load.

        Raises:
            rabbet.errors.ConfigError: Naming the key, its value and what is possible.
        """

    @classmethod
    def claims(cls, config: Mapping[str, Any], user_choice: str | None) -> bool:
        """Whether this method takes a checkpoint whose settings name another method. Takes effect only where the
        plugin declares ``replaces`` and the operator allows it."""
        return False

    @abstractmethod
    def get_quant_method(
        self, layer: nn.Module, prefix: str
    ) -> LinearMethod | FusedMoEMethod | EmbeddingMethod | KVCacheMethod | None:
        """The method for one layer, or None for dense weights.

        Args:
            layer: Test it with ``isinstance`` against the classes of ``rabbet.layers``.
            prefix: The layer's name in the model, e.g. ``model.layers.0.self_attn.qkv_proj``. For merged layers
                ``packed_modules`` tells the checkpoint's names.
        """

    packed_modules: Mapping[str, tuple[str, ...]] = {}
    """Merged layer to the checkpoint's names, e.g. ``qkv_proj`` to ``(q_proj, k_proj, v_proj)``, and ``experts`` to
    ``(experts.0.gate_proj, ...)``; the engine sets what the model's ``weight_rules`` say, before any layer is built."""
