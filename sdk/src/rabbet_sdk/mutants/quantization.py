"""Quantisation methods with one fault each, on top of the strict twin."""

# ruff: noqa: ARG001, ARG005 - faults stand in for methods, whose arguments they do not all need

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from rabbet.contracts import register_quantization_config
from rabbet.layers import LinearBase
from rabbet_sdk.mutants.base import Mutant
from rabbet_sdk.strict.quantization import StrictQuantization, _dense, _Int8Experts, _Int8Linear

__all__ = ["MUTANTS"]


class _Faulty(StrictQuantization):
    """The twin with another method for linear layers, or for experts."""

    linear: ClassVar[type[Any]] = _Int8Linear
    experts: ClassVar[type[Any]] = _Int8Experts

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if super().get_quant_method(layer, prefix) is None:
            return None
        return self.linear() if isinstance(layer, LinearBase) else self.experts()


def _plant(name: str, caught_by: str, story: str, *, claims: str | None = None, **parts: Any) -> Mutant:
    """Register a class with ``parts`` in place of the twin's, as an attribute of this module."""
    title = name.title().replace("_", "")
    cls = type(title, (_Faulty,), {"__module__": __name__, "__doc__": story, **parts})
    globals()[title] = register_quantization_config(name)(cls)
    return Mutant(
        name=name, target=f"{__name__}:{title}", caught_by=f"test_{caught_by}", story=story, claims=claims
    )  # fmt: skip


def _linear(name: str, caught_by: str, story: str, **methods: Any) -> Mutant:
    """A fault in the methods of linear layers."""
    return _plant(name, caught_by, story, linear=type("Linear", (_Int8Linear,), methods))


def _scaled(scale: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An ``apply`` with other scales than the layer's."""

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, _dense(layer.weight, scale(layer, layer.weight_scale), x.dtype), bias)

    return apply


def _seen(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An ``apply`` that sees its input changed."""
    return lambda self, layer, x, bias=None: _Int8Linear.apply(self, layer, change(x), bias)


def _loading(name: str, change: Callable[[Any, torch.Tensor, Any], torch.Tensor]) -> Callable[..., None]:
    """A ``create_weights`` whose parameter ``name`` sees its checkpoint tensor changed."""

    def create_weights(self: Any, layer: Any, **sizes: Any) -> None:
        _Int8Linear.create_weights(self, layer, **sizes)
        parameter = getattr(layer, name)
        load = parameter.weight_loader
        parameter.weight_loader = lambda p, tensor, shard=None: load(p, change(layer, tensor, shard), shard)

    return create_weights


def _finished_again(self: Any, layer: Any) -> None:
    layer.weight_scale.data.mul_(2 if hasattr(layer, "is_done") else 1)
    layer.is_done = True


def _pack_once(self: Any, layer: Any) -> None:
    if not hasattr(layer, "kept_scale"):
        layer.kept_scale = layer.weight_scale.clone()


def _keep_dense(self: Any, layer: Any) -> None:
    layer.dense = _dense(layer.weight, layer.weight_scale, torch.float32)


def _first_of_experts(self: Any, layer: Any, *inputs: Any) -> torch.Tensor:
    scale = layer.down_scale.data
    layer.down_scale.data = scale[:1].expand_as(scale)
    out = _Int8Experts.apply(self, layer, *inputs)
    layer.down_scale.data = scale
    return out


def _shard_zero(layer: Any, tensor: torch.Tensor, shard: Any) -> torch.Tensor:
    part = layer.output_parts[layer._index(shard)]
    return torch.cat((tensor[: part.padded], tensor))[: len(tensor)].roll(part.first, 0)


def _skip_substring(self: Any, layer: Any, prefix: str) -> Any:
    return None if any(name in prefix for name in self.skip) else _Faulty.get_quant_method(self, layer, prefix)


def _skip_halves(self: Any, layer: Any, prefix: str) -> Any:
    parts = self.packed_modules.get(prefix.rpartition(".")[2], ())
    is_cut = any(name.rpartition(".")[2] in parts for name in self.skip)
    return None if is_cut else _Faulty.get_quant_method(self, layer, prefix)


def _without_device(cls: Any, query: Any) -> Any:
    return tuple(item for item in StrictQuantization.supports(query) if item.code != "DEVICE")


def _measured(cls: Any, query: Any) -> Any:
    return StrictQuantization.supports(query) if len((query.raw_config or {}).get("skip", ())) >= 0 else ()


_cache: dict[Any, torch.Tensor] = {}
_kept: list[Any] = []

MUTANTS = (
    _linear("scale_forgotten", "golden_bytes_mean_what_the_format_says", "codes taken for values",
            apply=_scaled(lambda layer, scale: torch.ones_like(scale))),
    _linear("one_scale_for_all", "products_are_those_of_the_dequantised_matrix", "q, k and v under one scale",
            apply=_scaled(lambda layer, scale: scale.max().expand_as(scale))),
    _linear("bias_lost_for_one_row", "products_are_those_of_the_dequantised_matrix", "the decode kernel has no bias",
            apply=lambda self, layer, x, bias=None: _Int8Linear.apply(self, layer, x, bias if len(x) > 1 else None)),
    _linear("strides_ignored", "sizes_at_the_edges", "a slice of a wider tensor comes in",
            apply=_seen(lambda x: torch.as_strided(x, x.shape, (x.shape[1], 1)))),
    _linear("shard_zero_on_every_rank", "ranks_reassemble_to_the_whole", "vllm-gguf-plugin#103, vllm#49764",
            create_weights=_loading("weight_scale", _shard_zero)),
    _linear("finished_twice", "loading_again_replaces_everything", "a factor folded in twice",
            process_weights_after_loading=_finished_again),
    _linear("reload_ignored", "loading_again_replaces_everything", "vllm#28606: a reload leaves old weights",
            process_weights_after_loading=_pack_once, apply=_scaled(lambda layer, scale: layer.kept_scale)),
    _linear("keeps_dense_copy", "memory_is_what_was_declared", "dense weights beside the packed ones",
            process_weights_after_loading=_keep_dense),
    _linear("scales_by_name", "two_instances_share_no_state", "target and drafter have layers of the same names",
            apply=_scaled(lambda layer, scale: _cache.setdefault((layer.prefix, scale.shape), scale.clone()))),
    _linear("input_changed", "inputs_and_weights_are_left_alone", "the residual reads it afterwards",
            apply=lambda self, layer, x, bias=None: (_Int8Linear.apply(self, layer, x, bias), x.mul_(0.5))[0]),
    _linear("nan_spreads", "nan_stays_in_its_row", "one bad scale makes all outputs NaN",
            apply=_scaled(lambda layer, scale: scale / scale.max() * scale.max())),
    _linear("zero_scale_divides", "outliers_and_rows_of_zeros", "0 / 0 in a row of zeros",
            apply=_scaled(lambda layer, scale: scale * scale / scale)),
    _linear("wrong_sizes_cropped", "checkpoints_that_do_not_fit_are_refused", "another model's scales",
            create_weights=_loading(
                "weight_scale", lambda layer, t, shard: t.flatten()[: layer.output_sizes[layer._index(shard)]])),
    _linear("reads_raw_memory", "weights_are_the_same_from_each_source", "data_ptr without strides",
            create_weights=_loading(
                "weight", lambda layer, t, shard: torch.as_strided(t, t.shape, (t.shape[-1], 1)))),
    _linear("keeps_layers", "nothing_outlives_its_layer", "a list of layers for sleep, never emptied",
            process_weights_after_loading=lambda self, layer: _kept.append(layer)),
    _plant("scales_of_expert_zero", "experts_are_those_of_the_dequantised_matrices", "one expert's scales for all",
           experts=type("Experts", (_Int8Experts,), {"apply": _first_of_experts})),
    _plant("takes_unclaimed_experts", "experts_are_those_of_the_dequantised_matrices", "experts that no test ran",
           claims='device = ["cpu"]\ndtype = ["float32", "bfloat16"]\nfeatures = ["skip"]'),
    _plant("skip_by_substring", "skipped_modules_stay_dense", "proj is skipped, and with it proj2",
           get_quant_method=_skip_substring),
    _plant("half_skipped_is_dense", "half_skipped_merged_layers_are_refused", "k_proj is dense, and q and v with it",
           get_quant_method=_skip_halves),
    _plant("linear_for_everything", "each_layer_gets_its_kind_of_method", "a linear method for embeddings and heads",
           get_quant_method=lambda self, layer, prefix: _Int8Linear()),
    _plant("claims_too_much", "supports_is_honest", "a promise that nobody ran",
           claims='device = ["cpu"]\ndtype = ["float32", "bfloat16", "float16"]\nfeatures = ["skip", "moe"]'),
    _plant("accepts_unclaimed", "supports_is_honest", "accepted, and never tested",
           supports=classmethod(_without_device)),
    _plant("supports_raises", "supports_survives_any_settings", "a stranger's config.json",
           supports=classmethod(_measured)),
    _plant("settings_unchecked", "bad_settings_are_refused_by_name", "a typo changes nothing",
           from_config=classmethod(lambda cls, config: cls(tuple(map(str, config["skip"]))))),
    _plant("settings_eaten", "settings_are_left_alone", "the second build finds no settings",
           from_config=classmethod(lambda cls, config: cls(tuple(config.pop("skip", ()))))),
)  # fmt: skip
