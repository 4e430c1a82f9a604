"""Builds a model of transformers for the engine: no random values, packed linear layers, paged attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rabbet.errors import ConfigError
from rabbet.layers import BuildContext, ReplicatedLinear
from rabbet_model_transformers.attention import IMPLEMENTATION, SeenAttention, build_layer, record, register

__all__ = ["build_causal", "causal_class", "own_attention", "replace_linears"]

_LAYER_TYPES = ("full_attention", "sliding_attention")


def causal_class(config: Any) -> type[Any]:
    """The class of transformers for a configuration. Code that comes with a checkpoint is never looked at.

    Raises:
        ConfigError: If transformers has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise ConfigError(f"transformers has no causal model for {type(config).__name__}", field="model") from error
    return found  # type: ignore[no-any-return]


def build_causal(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters that hold no values yet; norms and buffers are as transformers starts them."""
    register()
    model_class = causal_class(config)
    config = copy.deepcopy(config)
    with _without_random_values():
        model = model_class._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


@contextmanager
def _without_random_values() -> Iterator[None]:
    """Skip the drawing of random numbers, which takes most of the time that a large model needs to be built."""
    from transformers.modeling_utils import PreTrainedModel

    replaced = [(nn.Linear, "reset_parameters"), (nn.Embedding, "reset_parameters"), (PreTrainedModel, "init_weights")]
    originals = [getattr(owner, name) for owner, name in replaced]
    for owner, name in replaced:
        setattr(owner, name, lambda self: None)  # noqa: ARG005
    try:
        yield
    finally:
        for (owner, name), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def own_attention(causal: Any, base: nn.Module, context: BuildContext) -> None:
    """Find the attention modules by a trial run of one token, and give each a layer of the engine.

    Raises:
        ConfigError: If the model takes no positions, does not use transformers' attention interface, or needs
            something that the engine's attention does not have.
    """
    name = type(causal).__name__
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ConfigError(f"{name} of transformers takes no position_ids: it needs a plugin of its own", field="model")
    ids = torch.zeros((1, 1), dtype=torch.long, device=context.device)
    with record() as seen, torch.inference_mode():
        base(input_ids=ids, position_ids=ids, use_cache=False)
    if not seen:
        raise ConfigError(
            f"{name} does not use the attention interface of transformers: it needs a plugin of its own", field="model"
        )
    names = {id(module): path for path, module in base.named_modules()}
    if len({id(item.module) for item in seen}) != len(seen):
        raise ConfigError(f"{name} calls an attention module twice: it needs a plugin of its own", field="model")
    for index, item in enumerate(seen):
        window = _window(causal.config, index, item, len(seen))
        build_layer(item, window=window, context=context, prefix=f"{names[id(item.module)]}.attn")


def _window(config: Any, index: int, seen: SeenAttention, num_layers: int) -> int | None:
    """The window of a layer: what the module asks for, else what the configuration says of the layer's type."""
    if seen.window is not None:
        return int(seen.window)
    text_config = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None or len(kinds) != num_layers:
        return None
    if kinds[index] not in _LAYER_TYPES:
        raise ConfigError(f"layer type {kinds[index]!r} needs a plugin of its own", field="model")
    return text_config.sliding_window if kinds[index] == "sliding_attention" else None


class TiedLinear(nn.Module):
    """A head that shares the embedding's table; the linear backend's packed form of it is its own."""

    def __init__(self, linear: nn.Linear, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.backend = context.linear
        self.packed: Any = None

    def process_weights_after_loading(self) -> None:
        """Pack the table."""
        self.packed = self.backend.pack(self.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``."""
        return self.backend.apply(x, self.packed, self.bias)


def replace_linears(model: nn.Module, context: BuildContext) -> None:
    """Put the engine's linear layers, with packed weights and the quantisation hook, in the place of torch's."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module.weight.dtype != context.dtype:
            continue
        new: Any
        if owners[id(module.weight)] > 1:
            new = TiedLinear(module, context)
        else:
            new = ReplicatedLinear(
                module.in_features, module.out_features, context=context, prefix=path, bias=module.bias is not None
            )
        # Some models read these.
        new.in_features, new.out_features = module.in_features, module.out_features
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)
