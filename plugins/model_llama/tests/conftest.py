"""A tiny engine for one model: checkpoints written by transformers, plain attention, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rabbet_sdk.fakes.ranks import ThreadRanks, build_context
from rabbet_sdk.oracles.model import PlainAttention

from rabbet.contracts.weights import ResolveQuery
from rabbet.layers import BuildContext, ForwardContext, set_forward_context
from rabbet.parallel import ParallelState
from rabbet.weights.load import load_weights
from rabbet.weights.safetensors import SafetensorsFormat

LENGTHS = (11, 5, 17)
VOCAB_SIZE = 99


@dataclass
class Checkpoint:
    """A small random model of transformers, saved, and what it says about three texts."""

    directory: Path
    config: Any
    texts: list[torch.Tensor]
    expected: list[torch.Tensor]
    memory: list[Any] = field(default_factory=list)

    def load(self, model_class: Any, parallel: ParallelState | None = None, **changes: Any) -> tuple[Any, BuildContext]:
        context = build_context(parallel or ParallelState.single(), **changes)
        model = model_class(config=self.config, context=context)
        files = SafetensorsFormat.resolve(ResolveQuery(model=str(self.directory)))
        load_weights(model, model_class.weight_rules(self.config), SafetensorsFormat.tensors(files))
        return model, context

    def logits(self, model: Any, context: BuildContext, chunk: int = 64) -> list[torch.Tensor]:
        """Logits of the texts, computed together, ``chunk`` tokens of each a step."""
        backend, names = PlainAttention(), context.attention_layers
        found: list[list[torch.Tensor]] = [[] for _ in self.texts]
        for start in range(0, max(LENGTHS), chunk):
            pieces = [(i, text[start : start + chunk]) for i, text in enumerate(self.texts) if start < len(text)]
            ids = torch.cat([piece for _, piece in pieces])
            positions = torch.cat([torch.arange(start, start + len(piece)) for _, piece in pieces])
            metadata, end = [], 0
            for i, piece in pieces:
                metadata.append((i, slice(end, end + len(piece))))
                end += len(piece)
            step = ForwardContext(
                kv_caches=dict.fromkeys(names, torch.empty(0)),
                metadata=dict.fromkeys(names, metadata),
                backends=dict.fromkeys(names, backend),
                num_tokens=end,
            )
            with torch.inference_mode(), set_forward_context(step):
                logits = model.compute_logits(model(ids, positions))
            for i, rows in metadata:
                found[i].append(logits[rows])
        return [torch.cat(parts) for parts in found]

    def assert_equal(self, logits: Sequence[torch.Tensor], tolerance: float = 1e-4) -> None:
        for got, want in zip(logits, self.expected, strict=True):
            assert got.shape == want.shape
            assert (got - want).abs().max().item() < tolerance


def write_checkpoint(directory: Path, config: Any, shard_size: str = "5GB") -> Checkpoint:
    """Save a random model; weights are wide enough that an error anywhere shows in the logits."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(directory, max_shard_size=shard_size)
    texts = [torch.randint(0, VOCAB_SIZE, (length,)) for length in LENGTHS]
    with torch.inference_mode():
        expected = [model(text[None]).logits[0].float() for text in texts]
    return Checkpoint(directory=directory, config=config, texts=texts, expected=expected)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """``write_checkpoint`` into the test's own directory."""
    return lambda config, **options: write_checkpoint(tmp_path, config, **options)


@pytest.fixture
def ranks() -> type[ThreadRanks]:
    return ThreadRanks
