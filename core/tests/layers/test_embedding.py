"""Vocabulary-parallel embedding and head: shards add up to the whole, and weights are held once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rabbet.errors import WeightsError
from rabbet.layers import ParallelLMHead, VocabParallelEmbedding
from rabbet.layers.reference import TorchLinearBackend

TABLE = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))


class Copying(TorchLinearBackend):
    num_packed = 0

    def pack(self, weight_OI: torch.Tensor) -> Any:
        self.num_packed += 1
        return weight_OI.clone()


def loaded(kind: Any, context: Any, **options: Any) -> Any:
    layer = kind(11, 6, context=context, prefix="model.table", **options)
    layer.weight.weight_loader(layer.weight, TABLE, None)
    layer.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
def test_shards_add_up_to_the_rows_and_join_to_the_logits(context: Any, size: int) -> None:
    ids = torch.tensor([0, 10, 5, 5, 6])
    layers = [loaded(VocabParallelEmbedding, context(rank, size), is_head=True) for rank in range(size)]
    assert len({layer.weight.shape for layer in layers}) == 1
    torch.testing.assert_close(sum(layer(ids) for layer in layers), TABLE[ids])
    x = torch.randn(3, 6)
    parts = [layer.quant_method.logits(layer, x) for layer in layers]
    torch.testing.assert_close(torch.cat(parts, dim=-1)[:, :11], x @ TABLE.T)


def test_padding_columns_are_cut_off(context: Any) -> None:
    layer = loaded(ParallelLMHead, context(0, 2))
    # One rank of two: the silent gather returns its own 6 columns.
    assert layer.logits(torch.zeros(2, 6)).shape == (2, 6)
    single = loaded(ParallelLMHead, context())
    assert single.logits(torch.zeros(2, 6)).shape == (2, 11)


def test_embedding_without_a_head_is_never_packed(context: Any) -> None:
    backend = Copying()
    loaded(VocabParallelEmbedding, context(linear=backend))
    assert backend.num_packed == 0


def test_head_of_its_own_keeps_the_packed_form_alone(context: Any) -> None:
    layer = loaded(ParallelLMHead, context(linear=Copying()))
    assert layer.weight.numel() == 0
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer.logits(x), x @ TABLE.T)


def test_tied_table_is_held_once_and_packed_once(context: Any) -> None:
    shared = loaded(VocabParallelEmbedding, context(), is_head=True)
    assert shared.packed.data_ptr() == shared.weight.data_ptr()
    backend = Copying()
    copied = loaded(VocabParallelEmbedding, context(linear=backend), is_head=True)
    copied.process_weights_after_loading()
    assert backend.num_packed == 1
    assert copied.weight.shape == (11, 6)


def test_second_load_reaches_rows_and_logits(context: Any) -> None:
    for kind, options in ((VocabParallelEmbedding, {"is_head": True}), (ParallelLMHead, {})):
        layer = loaded(kind, context(linear=Copying()), **options)
        layer.weight.weight_loader(layer.weight, 2 * TABLE, None)
        layer.process_weights_after_loading()
        x = torch.randn(3, 6)
        torch.testing.assert_close(layer.logits(x), 2 * x @ TABLE.T)


@pytest.mark.parametrize("shape", [(10, 6), (12, 6), (22, 6), (11, 5), (66,)])
def test_table_of_another_size_is_refused(context: Any, shape: tuple[int, ...]) -> None:
    layer = VocabParallelEmbedding(11, 6, context=context(), prefix="model.table")
    with pytest.raises(WeightsError, match=r"model\.table"):
        layer.weight.weight_loader(layer.weight, torch.zeros(shape), None)
