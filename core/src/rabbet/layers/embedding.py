"""Vocabulary-parallel embedding and output head. The vocabulary is padded to a multiple of the ranks.

Shapes: T tokens, N hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rabbet.contracts.quantization import EmbeddingMethod
from rabbet.errors import WeightsError
from rabbet.layers.context import BuildContext
from rabbet.layers.linear import copy_checked, take_part

__all__ = ["ParallelLMHead", "UnquantizedEmbeddingMethod", "VocabParallelEmbedding"]


class UnquantizedEmbeddingMethod(EmbeddingMethod):
    """A dense table; logits through the linear backend."""

    def create_weights(
        self, layer: nn.Module, *, num_rows: int, embedding_dim: int, params_dtype: torch.dtype, weight_loader: Any
    ) -> None:
        """One parameter ``weight`` of shape [rows, N]."""
        weight = nn.Parameter(
            torch.zeros((num_rows, embedding_dim), dtype=params_dtype, device=layer.context.device), requires_grad=False
        )
        weight.output_dim = 0  # type: ignore[attr-defined]
        weight.weight_loader = weight_loader  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)

    def embed(self, layer: nn.Module, ids_T: torch.Tensor) -> torch.Tensor:
        """See ``EmbeddingMethod``."""
        return F.embedding(ids_T, layer.weight)

    def logits(self, layer: nn.Module, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """Packs the table on the first call, so that an embedding without a head is never packed."""
        if layer.packed is None:
            layer.packed = layer.context.linear.pack(layer.weight.data)
            if not layer.is_embedding and not isinstance(layer.packed, torch.Tensor):
                layer.weight.data = torch.empty(0, dtype=layer.weight.dtype, device=layer.weight.device)
        return layer.context.linear.apply(x_TI, layer.packed, bias_O)  # type: ignore[no-any-return]


class VocabParallelEmbedding(nn.Module):
    """Rows of the table divided over ranks; each rank looks up its own ids and the results are summed."""

    is_embedding = True

    def __init__(self, vocab_size: int, hidden_size: int, *, context: BuildContext, prefix: str) -> None:
        """Create this rank's rows."""
        super().__init__()
        parallel = context.parallel
        self.context = context
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // parallel.tp_size)
        self.first_row = self.rows * parallel.tp_rank
        self.packed: Any = None
        method = context.quantization.get_quant_method(self, prefix) if context.quantization else None
        self.quant_method = method if isinstance(method, EmbeddingMethod) else UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(
            self, num_rows=self.rows, embedding_dim=hidden_size, params_dtype=context.dtype, weight_loader=self.load_shard
        )

    def load_shard(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        """Copy this rank's rows."""
        if tensor.shape[0] != self.vocab_size:
            raise WeightsError(
                f"{self.prefix} has {tensor.shape[0]} rows, but config.json says vocab_size {self.vocab_size}",
                tensor=self.prefix,
            )
        copy_checked(parameter.data, take_part(tensor, 0, self.rows, self.context.parallel.tp_rank), self.prefix)

    def process_weights_after_loading(self) -> None:
        """Let the method repack what was loaded."""
        self.packed = None
        self.quant_method.process_weights_after_loading(self)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T, N] rows of the ids."""
        parallel = self.context.parallel
        if parallel.tp_size == 1:
            return self.quant_method.embed(self, ids_T)
        local = ids_T - self.first_row
        outside = (local < 0) | (local >= self.rows)
        out = self.quant_method.embed(self, local.masked_fill(outside, 0))
        return parallel.all_reduce(out.masked_fill_(outside.unsqueeze(-1), 0))

    def logits(self, hidden_TN: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, V] scores of every row of the table, gathered over ranks and without padding."""
        out = self.context.parallel.all_gather(self.quant_method.logits(self, hidden_TN, bias), dim=-1)
        return out[..., : self.vocab_size]


class ParallelLMHead(VocabParallelEmbedding):
    """An output head of its own; models with tied embeddings use their embedding's ``logits``."""

    is_embedding = False
