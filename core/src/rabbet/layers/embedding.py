"""Vocabulary-parallel embedding and output head. The vocabulary is padded to a multiple of the ranks.

Shapes: T tokens, N hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rabbet.contracts.quantization import EmbeddingMethod
from rabbet.layers.context import BuildContext
from rabbet.layers.linear import dense_parameter, drop_unless_same
from rabbet.layers.shards import copy_checked, even_part

__all__ = ["ParallelLMHead", "UnquantizedEmbeddingMethod", "VocabParallelEmbedding"]


class UnquantizedEmbeddingMethod(EmbeddingMethod):
    """A dense table; logits through the linear backend, which packs the table if it serves as a head.

    A tied embedding keeps one table for both uses; where packing makes another form, that form and the table are
    all there is. A head of its own keeps the packed form alone.
    """

    def create_weights(
        self, layer: nn.Module, *, num_rows: int, embedding_dim: int, params_dtype: torch.dtype, weight_loader: Any
    ) -> None:
        """One parameter ``weight`` of shape [rows, N]."""
        assert isinstance(layer, VocabParallelEmbedding)
        layer.weight = dense_parameter(layer, (num_rows, embedding_dim), params_dtype, weight_loader)
        layer.weight.output_dim = 0  # type: ignore[attr-defined]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack once a load, if the table is a head."""
        assert isinstance(layer, VocabParallelEmbedding)
        if layer.is_head and layer.packed is None:
            layer.packed = layer.context.linear.pack(layer.weight.data)
            if not layer.is_embedding:
                drop_unless_same(layer.weight, layer.packed)

    def embed(self, layer: Any, ids_T: torch.Tensor) -> torch.Tensor:
        """See ``EmbeddingMethod``."""
        return F.embedding(ids_T, layer.weight)

    def logits(self, layer: Any, x_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """See ``EmbeddingMethod``."""
        return layer.context.linear.apply(x_TI, layer.packed, bias_O)  # type: ignore[no-any-return]


class VocabParallelEmbedding(nn.Module):
    """Rows of the table divided over ranks; each rank looks up its own ids and the results are summed."""

    is_embedding = True
    weight: nn.Parameter

    def __init__(
        self, vocab_size: int, hidden_size: int, *, context: BuildContext, prefix: str, is_head: bool = False
    ) -> None:
        """Create this rank's rows.

        Args:
            vocab_size: V.
            hidden_size: N.
            context: Build context.
            prefix: Name of the layer.
            is_head: Whether ``logits`` is called, too: the embedding and the head of the model are tied.
        """
        super().__init__()
        parallel = context.parallel
        self.context = context
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.is_head = is_head
        self.part = even_part(vocab_size, rank=parallel.tp_rank, world_size=parallel.tp_size)
        self.packed: Any = None
        self.quant_method: EmbeddingMethod = (
            context.quant_method(self, prefix, EmbeddingMethod) or UnquantizedEmbeddingMethod()
        )
        self.quant_method.create_weights(
            self,
            num_rows=self.part.padded,
            embedding_dim=hidden_size,
            params_dtype=context.dtype,
            weight_loader=self.load_shard,
        )

    def load_shard(self, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        """Copy this rank's rows.

        Raises:
            WeightsError: If the tensor has another number of rows than ``vocab_size`` of config.json.
        """
        copy_checked(parameter.data, self.part.take(tensor, 0, 1, self.prefix), self.prefix)

    def process_weights_after_loading(self) -> None:
        """Let the method repack what was loaded."""
        self.quant_method.process_weights_after_loading(self)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T, N] rows of the ids."""
        parallel = self.context.parallel
        if parallel.tp_size == 1:
            return self.quant_method.embed(self, ids_T)
        local = ids_T - self.part.padded * parallel.tp_rank
        outside = (local < 0) | (local >= self.part.padded)
        out = self.quant_method.embed(self, local.masked_fill(outside, 0))
        return parallel.all_reduce(out.masked_fill_(outside.unsqueeze(-1), 0))

    def logits(self, hidden_TN: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, V] scores of every row of the table, gathered over ranks and without padding."""
        out = self.quant_method.logits(self, hidden_TN, bias)
        if self.context.parallel.tp_size > 1:
            out = self.context.parallel.all_gather(out, dim=-1)
        return out if out.shape[-1] == self.vocab_size else out[..., : self.vocab_size]


class ParallelLMHead(VocabParallelEmbedding):
    """An output head of its own; models with tied embeddings use their embedding's ``logits``."""

    is_embedding = False

    def __init__(self, vocab_size: int, hidden_size: int, *, context: BuildContext, prefix: str) -> None:
        """As ``VocabParallelEmbedding``."""
        super().__init__(vocab_size, hidden_size, context=context, prefix=prefix, is_head=True)
