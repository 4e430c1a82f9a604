"""The fallback architecture: any causal model of transformers that uses its attention interface.

Shapes: T tokens, N hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rabbet.contracts import Refusal, register_model
from rabbet.contracts.model import Model, ModelQuery
from rabbet.errors import ConfigError
from rabbet.layers import BuildContext
from rabbet.weights import WeightRules
from rabbet_model_transformers.build import build_causal, own_attention, replace_linears
from rabbet_model_transformers.checkpoint import HubRules, Merger, checkpoint_names

__all__ = ["TransformersForCausalLM"]

_GROWING_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = ("full_attention", "sliding_attention")


class HiddenOutput:
    """What a base model returns, as far as heads read it: hidden states, and None for everything else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        """No caches, no attention weights, no router logits."""
        return

    def __getitem__(self, index: Any) -> Any:
        """As the tuple of one."""
        return (self.last_hidden_state,)[index]


class GivenHidden(nn.Module):
    """Stands for the base model while the head is computed: its output is what it is given."""

    @property
    def decoder(self) -> GivenHidden:
        """OPT's head calls ``model.decoder``."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **options: Any) -> HiddenOutput:
        """As a base model's forward."""
        return HiddenOutput(inputs_embeds)


@register_model("*")
class TransformersForCausalLM(nn.Module, Model):
    """A causal model of transformers on one rank. The base model and the head run as transformers wrote them."""

    # Code of transformers may choose what it does by lengths and values.
    is_capturable = False

    @classmethod
    def supports(cls, query: ModelQuery) -> tuple[Refusal, ...]:
        """Refuses what transformers does not know, code that comes with the checkpoint, and several ranks."""
        config = query.config
        refusals = list(_class_refusals(query))
        kinds = (config.get("text_config") or config).get("layer_types") or ()
        unknown = sorted({str(kind) for kind in kinds} - set(_LAYER_TYPES))
        if unknown:
            refusals.append(Refusal(code="LAYER_TYPES", message=f"layers of the type {', '.join(unknown)}"))
        if query.tensor_parallel_size > 1:
            message = f"models without a plugin of their own run on one rank, not {query.tensor_parallel_size}"
            refusals.append(Refusal(code="RANKS", message=message, fix="--tensor-parallel-size 1"))
        if query.pipeline_parallel_size > 1:
            message = "models without a plugin of their own have no pipeline stages"
            refusals.append(Refusal(code="PIPELINE", message=message, fix="--pipeline-parallel-size 1"))
        return tuple(refusals)

    def __init__(self, *, config: Any, context: BuildContext) -> None:
        """See ``Model``.

        Raises:
            ConfigError: If the model needs more than the engine's attention has.
        """
        super().__init__()
        _check_rope(config, context.max_model_len)
        causal = build_causal(config, context.dtype)
        prefix = causal.base_model_prefix
        base = getattr(causal, prefix)
        own_attention(causal, base, context)
        replace_linears(causal, context)
        self.vocab_size = int(causal.config.get_text_config().vocab_size)
        self.base = base
        setattr(causal, prefix, GivenHidden())
        self.causal = causal
        _own_buffers(base)
        _own_buffers(causal)
        self.merger = Merger(checkpoint_names(config), causal.config)
        self.merger.attach(self)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Model``."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs: dict[str, torch.Tensor] = {"input_ids": input_ids[None]}
        else:
            inputs = {"inputs_embeds": inputs_embeds[None]}
        output = self.base(**inputs, position_ids=positions[None], use_cache=False, return_dict=True)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def compute_logits(self, hidden_TN: torch.Tensor) -> torch.Tensor:
        """See ``Model``; scales and caps behind the head are the model's own."""
        logits = self.causal(inputs_embeds=hidden_TN[None], use_cache=False, return_dict=True).logits[0]
        return logits[:, : self.vocab_size]  # type: ignore[no-any-return]

    def process_weights_after_loading(self) -> None:
        """Fill parameters that are made of several checkpoint tensors."""
        self.merger.finish(self)

    @classmethod
    def weight_rules(cls, config: Any) -> WeightRules:
        """See ``Model``."""
        names = checkpoint_names(config)
        buffers = frozenset(names.inner(name) for name, value in names.state.items() if _is_buffer(value))
        return HubRules(names=names, buffers=buffers)


def _is_buffer(value: torch.Tensor) -> bool:
    return not isinstance(value, nn.Parameter)


def _own_buffers(model: nn.Module) -> None:
    """Make parameters of persistent buffers: checkpoints hold them, and the loader fills parameters."""
    for module in model.modules():
        skipped = module._non_persistent_buffers_set
        for name, value in list(module._buffers.items()):
            if value is not None and name not in skipped:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _class_refusals(query: ModelQuery) -> tuple[Refusal, ...]:
    """Whether transformers itself has the class, and the class the attention interface."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = query.config
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), ())
    names = (known,) if isinstance(known, str) else tuple(known)
    if query.architecture not in names:
        if _has_code(config):
            message = (
                f"{query.architecture} comes with code of its own (auto_map in config.json), which is never run, "
                "with or without --trust-remote-code"
            )
            return (Refusal(code="REMOTE_CODE", message=message, fix="install a plugin for the architecture"),)
        message = f"neither an installed plugin nor transformers {transformers.__version__} has {query.architecture}"
        return (Refusal(code="ARCHITECTURE", message=message, fix="install a plugin for it"),)
    model_class = getattr(transformers, query.architecture)
    # The class attribute for it is missing on some that do use it; the trial run has the last word.
    uses_interface = hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not uses_interface or getattr(model_class, "_is_stateful", False):
        message = f"{query.architecture} does not use the attention interface of transformers"
        return (Refusal(code="ATTENTION", message=message, fix="install a plugin for the architecture"),)
    return ()


def _has_code(config: Mapping[str, Any]) -> bool:
    """Whether a configuration, or one inside it, names code."""
    return any(key == "auto_map" or (isinstance(value, Mapping) and _has_code(value)) for key, value in config.items())


def _check_rope(config: Any, max_model_len: int) -> None:
    """Angles that change with the longest text of a step would change keys that are in the cache already."""
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in _GROWING_ROPE:
        return
    limit = rope.get("original_max_position_embeddings") or getattr(
        text_config, "original_max_position_embeddings", None
    )
    limit = int(limit or text_config.max_position_embeddings)
    if max_model_len > limit:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but angles of the type {kind!r} hold up to {limit} tokens only",
            field="model.max_model_len",
        )
