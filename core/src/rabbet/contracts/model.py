"""Contract of a model architecture.

A model is a ``torch.nn.Module`` that also derives from ``Model``. It is built from layers of ``rabbet.layers``,
which carry tensor parallelism and the quantisation hook. ``forward`` gets no KV cache and no metadata: the
attention layers read both from the forward context that the runner sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rabbet.contracts.support import Refusal

if TYPE_CHECKING:
    import torch

    from rabbet.layers.context import BuildContext
    from rabbet.weights.rules import WeightRules

__all__ = ["Model", "ModelQuery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelQuery:
    """What is asked of a model.

    Attributes:
        architecture: The name in config.json.
        config: config.json as a mapping (the text part of it for multimodal models).
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages.
        task: ``generate`` or a pooling task.
    """

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    task: str = "generate"


class Model(ABC):
    """A causal language model.

    Order of calls: ``supports``; ``__init__`` under ``torch.device`` of the rank; the loader reads
    ``weight_rules`` and fills parameters; then ``forward`` and ``compute_logits`` for each step.

    Attributes:
        is_capturable: Neither method looks at a tensor's values on the host, so that a platform may capture their
            operations once and replay them on other values.
    """

    is_capturable: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def supports(cls, query: ModelQuery) -> tuple[Refusal, ...]:
        """Every reason why this configuration cannot be served (a rope type, uneven heads); empty: it can."""

    @abstractmethod
    def __init__(self, *, config: Any, context: BuildContext) -> None:
        """Create parameters, uninitialised.

        Args:
            config: transformers' configuration object.
            context: Parallel state, dtype, quantisation and kernels; handed to every layer.
        """

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: int64 [T] token ids, or None with ``inputs_embeds``.
            positions: int64 [T].
            intermediate_tensors: Output of the pipeline stage before, or None.
            inputs_embeds: [T, N] in place of ``input_ids``.

        Returns:
            [T, N]; the intermediate tensors instead on all but the last pipeline stage.
        """

    @abstractmethod
    def compute_logits(self, hidden_TN: torch.Tensor) -> torch.Tensor:
        """[T, V] over the whole vocabulary, gathered over ranks; padding columns are cut off."""

    @classmethod
    @abstractmethod
    def weight_rules(cls, config: Any) -> WeightRules:
        """How the checkpoint's tensor names map to parameters, as data."""
