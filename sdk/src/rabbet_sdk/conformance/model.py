"""The suite of model architectures: logits are those of transformers in float32, on small random checkpoints.

Claims that are read: ``tensor_parallel_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from rabbet.contracts.model import ModelQuery
from rabbet.errors import WeightsError
from rabbet.layers import ForwardContext, set_forward_context
from rabbet.parallel import ParallelState
from rabbet.weights.load import load_weights
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims
from rabbet_sdk.conformance.outcome import level, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.ranks import ThreadRanks, build_context
from rabbet_sdk.numerics import assert_within
from rabbet_sdk.oracles.model import PlainAttention

__all__ = ["ModelConformance"]

_LENGTHS = (11, 5, 17)
_SMALL = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": 2,
}  # fmt: skip


class ModelConformance(SupportsConformance):
    """Subclass, name the plugin, and say which model of transformers has the same logits.

    Attributes:
        architecture: Name in config.json.
        model_type: transformers' ``model_type``.
        config: Fields of its configuration; small.
    """

    kind = "model"
    architecture: ClassVar[str] = ""
    model_type: ClassVar[str] = "llama"
    config: ClassVar[Mapping[str, Any]] = _SMALL
    knobs = SupportsConformance.knobs | {"architecture", "model_type", "config"}

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Numbers of ranks; more than one pipeline stage is claimed by nobody who has none."""
        name = cls.architecture or cls.plugin.partition("/")[2].rpartition(":")[2]
        return [
            Case(
                id=f"tp{size}",
                value=ModelQuery(
                    architecture=name, config={**cls.config, "model_type": cls.model_type}, tensor_parallel_size=size
                ),
                unclaimed="" if size in claims.values("tensor_parallel_size") or size == 1 else f"{size} ranks",
            )
            for size in (1, 2, 4)
        ]

    @pytest.fixture
    def reference(self, subject: Subject) -> _Reference:
        """A random model of transformers, its tensors and its logits."""
        return _Reference(subject.plugin_class, self.model_type, self.config)

    @level(2)
    @pytest.mark.parametrize("chunk", [64, 4, 1])
    def test_logits_are_those_of_transformers(self, reference: _Reference, chunk: int, record_property: Any) -> None:
        """Three texts in one batch, whole and in chunks."""
        for number, got in enumerate(reference.logits(ParallelState.single(), chunk)):
            reference.assert_near(number, got, record_property)

    @level(2)
    def test_two_ranks_equal_one(self, subject: Subject, reference: _Reference, record_property: Any) -> None:
        """Both ranks give the logits of the whole vocabulary."""
        if 2 not in subject.claims.values("tensor_parallel_size"):
            unclaimed("tensor_parallel_size 2")
        for logits in ThreadRanks(2).run(lambda state: reference.logits(state, 5)):
            for number, got in enumerate(logits):
                reference.assert_near(number, got, record_property)

    @level(3)
    def test_each_tensor_is_needed_and_no_other(self, reference: _Reference) -> None:
        """Without any one tensor, or with one more, loading raises ``WeightsError``."""
        for name in reference.tensors:
            lacking = {other: tensor for other, tensor in reference.tensors.items() if other != name}
            with pytest.raises(WeightsError):
                reference.load(ParallelState.single(), lacking)
        extra = {**reference.tensors, "model.layers.0.no_such_module.weight": torch.ones(2)}
        with pytest.raises(WeightsError, match="no_such_module"):
            reference.load(ParallelState.single(), extra)

    @level(3)
    def test_two_instances_share_no_state(self, reference: _Reference, record_property: Any) -> None:
        """A second model with other weights leaves the first as it was; built, used, dropped, twice."""
        first = reference.load(ParallelState.single(), reference.tensors)
        other = {name: tensor * 0.5 for name, tensor in reference.tensors.items()}
        reference.run(*reference.load(ParallelState.single(), other), 64)
        for _ in range(2):
            for number, got in enumerate(reference.run(*first, 64)):
                reference.assert_near(number, got, record_property)


class _Reference:
    """A random model of transformers, and the plugin's model with its weights."""

    def __init__(self, model_class: Any, model_type: str, values: Mapping[str, Any]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.model_class = model_class
        self.config = AutoConfig.for_model(model_type, **values)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            build: Any = AutoModelForCausalLM.from_config
            model = build(self.config, attn_implementation="eager").float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.3))
            self.texts = [torch.randint(0, self.config.vocab_size, (length,)) for length in _LENGTHS]
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if self.config.tie_word_embeddings:
            self.tensors.pop("lm_head.weight", None)
        with torch.inference_mode():
            self.plain = [model(text[None]).logits[0] for text in self.texts]
            exact = model.double()
            self.exact = [exact(text[None]).logits[0] for text in self.texts]

    def load(self, parallel: ParallelState, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        """The plugin's model of one rank, and its build context."""
        context = build_context(parallel)
        model = self.model_class(config=self.config, context=context)
        load_weights(model, self.model_class.weight_rules(self.config), tensors.items())
        return model.eval(), context

    def logits(self, parallel: ParallelState, chunk: int) -> list[torch.Tensor]:
        """Logits of the texts."""
        return self.run(*self.load(parallel, self.tensors), chunk)

    def run(self, model: Any, context: Any, chunk: int) -> list[torch.Tensor]:
        """Texts side by side, ``chunk`` tokens of each a step."""
        backend: Any = PlainAttention()
        names = context.attention_layers
        found: list[list[torch.Tensor]] = [[] for _ in self.texts]
        for start in range(0, max(_LENGTHS), chunk):
            pieces = [(i, text[start : start + chunk]) for i, text in enumerate(self.texts) if start < len(text)]
            ids = torch.cat([piece for _, piece in pieces])
            positions = torch.cat([torch.arange(start, start + len(piece)) for _, piece in pieces])
            metadata, end = [], 0
            for i, piece in pieces:
                metadata.append((i, slice(end, end + len(piece))))
                end += len(piece)
            step = ForwardContext(
                kv_caches=dict.fromkeys(names, torch.empty(0)), metadata=dict.fromkeys(names, metadata),
                backends=dict.fromkeys(names, backend), num_tokens=end,
            )  # fmt: skip
            with torch.inference_mode(), set_forward_context(step):
                logits = model.compute_logits(model(ids, positions))
            for i, rows in metadata:
                found[i].append(logits[rows])
        return [torch.cat(parts) for parts in found]

    def assert_near(self, number: int, got: torch.Tensor, record: Any) -> None:
        """Within four times the error of transformers' own float32."""
        assert got.shape == self.exact[number].shape
        assert_within(got, plain=self.plain[number], oracle=self.exact[number], factor=4.0, record=record)
