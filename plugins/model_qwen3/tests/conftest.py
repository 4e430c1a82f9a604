"""A tiny engine for one model: checkpoints written by transformers, plain attention, ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbet.contracts.weights import ResolveQuery
from rabbet.layers import BuildContext, ForwardContext, set_forward_context
from rabbet.layers.reference import TorchLayerOps, TorchLinearBackend
from rabbet.parallel import ParallelState
from rabbet.weights.load import load_weights
from rabbet.weights.safetensors import SafetensorsFormat

LENGTHS = (11, 5, 17)
VOCAB_SIZE = 99


class PlainAttention:
    """Causal attention in float32 over caches of plain tensors; metadata lists (sequence, rows of the step)."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, layer: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, out: torch.Tensor) -> None:
        for sequence, rows in metadata:
            keys, values = self.memory.get((layer.name, sequence), (k[:0], v[:0]))
            keys, values = torch.cat((keys, k[rows])), torch.cat((values, v[rows]))
            self.memory[layer.name, sequence] = (keys, values)
            out[rows] = self.attend(layer, q[rows], keys, values)

    @staticmethod
    def attend(layer: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // keys.shape[1]
        scores = torch.einsum("thd,shd->hts", q, keys.repeat_interleave(group, dim=1)) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))[None]
        hidden = (distance < 0) | (distance >= (layer.window or len(keys) + 1))
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", probabilities, values.repeat_interleave(group, dim=1))


class ThreadRanks:
    """Collectives of ranks that are threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.slots[rank] = tensor.clone()
        self.barrier.wait()
        parts = list(self.slots)
        self.barrier.wait()
        return parts

    def run(self, work: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        """Results of ``work(state)`` of all ranks."""
        results: list[Any] = [None] * self.size

        def start(rank: int) -> None:
            try:
                results[rank] = work(ThreadState(rank, self.size, self))
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class ThreadState(ParallelState):
    """One of the threads."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.group.exchange(self.tp_rank, tensor)
        return tensor.copy_(sum(parts[1:], parts[0]))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.group.exchange(self.tp_rank, tensor), dim=dim)


def build_context(parallel: ParallelState, **changes: Any) -> BuildContext:
    values: dict[str, Any] = {
        "parallel": parallel,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "linear": TorchLinearBackend(),
        "ops": TorchLayerOps(),
        "kv_cache_dtype": "float32",
        "max_model_len": 64,
    }
    return BuildContext(**(values | changes))


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
