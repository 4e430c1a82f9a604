"""The suite of quantisation methods: bytes, values, shards, experts, loading, and what is refused.

An author says how the format stores a matrix (``checkpoint``): a function from a dense matrix to tensors, and a
dequantiser that shares no code with the plugin. Everything else follows.

Claims that are read: ``device``, ``dtype``, and the features ``moe`` (experts) and ``skip`` (modules that the settings
leave dense).
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from rabbet.contracts.quantization import EmbeddingMethod, KVCacheMethod, LinearMethod, QuantizationQuery
from rabbet.errors import ConfigError, WeightsError
from rabbet.layers import Attention, ParallelLMHead, ReplicatedLinear, VocabParallelEmbedding
from rabbet.layers.moe import UnquantizedFusedMoEMethod
from rabbet_sdk.conformance._quantized_layers import LAYERS, Layers, exact, held_bytes, layer_of, load
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.ranks import build_context
from rabbet_sdk.numerics import assert_within, poison
from rabbet_sdk.oracles.quantization import INT8_PER_CHANNEL, QuantizedCheckpoint, dense_experts

__all__ = ["QuantizationConformance"]

_DTYPES = ("float32", "bfloat16", "float16")
_HOSTILE: tuple[Any, ...] = (None, -1, 10**30, "\0", [], [[]], {"a": {}}, float("nan"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """A layer in a type, on so many ranks."""

    kind: str
    dtype: str = "float32"
    size: int = 1


class QuantizationConformance(SupportsConformance):
    """Subclass, name the plugin, set ``checkpoint``.

    Attributes:
        checkpoint: How the format stores a matrix.
    """

    kind = "quantization"
    checkpoint: ClassVar[QuantizedCheckpoint] = INT8_PER_CHANNEL
    knobs = SupportsConformance.knobs | {"checkpoint"}

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Devices by types."""
        name = cls.plugin.partition("/")[2].rpartition(":")[2]
        return [
            Case(
                id=f"{device}-{dtype}",
                value=QuantizationQuery(
                    device_type=device, arch="", dtype=dtype, raw_config=cls.checkpoint.settings(name, ())
                ),
                unclaimed=claims.missing({"device": device, "dtype": dtype}),
            )
            for device in ("cpu", "cuda")
            for dtype in _DTYPES
        ]

    @classmethod
    def linear_cases(cls, claims: Claims) -> list[Case]:
        """Kinds of layers by types."""
        return [
            Case(
                id=f"{kind}-{dtype}",
                value=_Setup(kind=kind, dtype=dtype),
                unclaimed=claims.missing({"device": cls.device, "dtype": dtype}),
            )
            for kind in LAYERS
            for dtype in _DTYPES
        ]

    @classmethod
    def rank_cases(cls, claims: Claims) -> list[Case]:
        """Divided layers by numbers of ranks."""
        dtype = next((name for name in _DTYPES if claims.allows("dtype", name)), _DTYPES[0])
        kinds = [kind for kind in LAYERS if kind != "replicated"]
        return [
            Case(id=f"{kind}-tp{size}", value=_Setup(kind=kind, dtype=dtype, size=size))
            for kind in kinds
            for size in (1, 2, 4)
        ]

    @pytest.fixture
    def layers(self, subject: Subject, torch_device: torch.device, generator: torch.Generator) -> Layers:
        """Builds layers of the plugin in the first type that it claims."""
        dtype = next((name for name in _DTYPES if subject.claims.allows("dtype", name)), _DTYPES[0])
        return Layers(
            plugin_class=subject.plugin_class,
            method=subject.entry.name,
            checkpoint=self.checkpoint,
            device=torch_device,
            generator=generator,
            dtype=getattr(torch, dtype),
        )

    # ---- settings

    def test_bad_settings_are_refused_by_name(self, subject: Subject) -> None:
        """Settings that the format does not have raise ``ConfigError`` with the key; odd values raise nothing else."""
        good = self.checkpoint.settings(subject.entry.name, ())
        for change, key in self.checkpoint.bad_settings:
            with pytest.raises(ConfigError) as caught:
                subject.plugin_class.from_config({**good, **change})
            assert key in str(caught.value), f"the error does not name {key}: {caught.value}"
        for key in good:
            for value in _HOSTILE:
                try:
                    subject.plugin_class.from_config({**good, key: value})
                except ConfigError:
                    continue

    def test_settings_are_left_alone(self, subject: Subject) -> None:
        """``from_config`` and ``supports`` change nothing of what they are given."""
        settings = self.checkpoint.settings(subject.entry.name, ("a", "b"))
        subject.plugin_class.from_config(settings)
        query = QuantizationQuery(device_type=self.device, arch="", dtype="float32", raw_config=settings)
        subject.plugin_class.supports(query)
        assert settings == self.checkpoint.settings(subject.entry.name, ("a", "b"))

    def test_supports_survives_any_settings(self, subject: Subject) -> None:
        """Settings come from strangers: ``supports`` answers whatever they hold."""
        settings = self.checkpoint.settings(subject.entry.name, ())
        for raw in (None, {}, *({**settings, key: value} for key in settings for value in _HOSTILE)):
            query = QuantizationQuery(device_type=self.device, arch="", dtype="float32", raw_config=raw)
            assert isinstance(subject.plugin_class.supports(query), tuple)

    def test_each_layer_gets_its_kind_of_method(self, layers: Layers) -> None:
        """A linear method for linear layers, and for no others; None, or their own kind, for all the rest."""
        context, config = build_context(dtype=layers.dtype, device=layers.device), layers.config()
        linear = ReplicatedLinear(8, 8, context=context, prefix="model.proj")
        attention = Attention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, context=context, prefix="model.attn")
        table: dict[Any, Any] = {
            linear: LinearMethod,
            VocabParallelEmbedding(8, 8, context=context, prefix="model.embed_tokens"): EmbeddingMethod,
            ParallelLMHead(8, 8, context=context, prefix="lm_head"): EmbeddingMethod,
            attention: KVCacheMethod,
            nn.Linear(2, 2): (),
        }
        for layer, wanted in table.items():
            method = config.get_quant_method(layer, getattr(layer, "prefix", "model.other"))
            assert method is None or isinstance(method, wanted), f"{type(layer).__name__} got {type(method).__name__}"
        assert config.get_quant_method(linear, "model.proj") is not None, "a linear layer stays dense"

    def test_skipped_modules_stay_dense(self, subject: Subject, layers: Layers) -> None:
        """Modules that the settings leave out get None, by the checkpoint's names, and others do not."""
        if not subject.claims.has("skip"):
            unclaimed("feature skip")
        config = replace(layers, skip=("model.proj", "model.q_proj", "model.k_proj", "model.v_proj")).config()
        layer = ReplicatedLinear(8, 8, context=build_context(), prefix="x")
        found = {
            name: config.get_quant_method(layer, name) is None
            for name in ("model.proj", "model.qkv_proj", "model.gate_up_proj", "model.proj2", "other.model.proj")
        }
        assert [name for name, is_dense in found.items() if is_dense] == ["model.proj", "model.qkv_proj"]

    def test_half_skipped_merged_layers_are_refused(self, subject: Subject, layers: Layers) -> None:
        """A merged layer of which the checkpoint quantises a part cannot be one parameter: an error, not garbage."""
        if not subject.claims.has("skip"):
            unclaimed("feature skip")
        config = replace(layers, skip=("model.k_proj",)).config()
        layer = ReplicatedLinear(8, 8, context=build_context(), prefix="x")
        with pytest.raises(ConfigError, match="k_proj"):
            config.get_quant_method(layer, "model.qkv_proj")

    # ---- values

    @dangerous
    @level(2)
    def test_golden_bytes_mean_what_the_format_says(self, layers: Layers, record_property: Any) -> None:
        """Known bytes give the known matrix: in the author's dequantiser exactly, in the plugin within the bound."""
        assert self.checkpoint.golden, "checkpoint.golden is empty: give bytes whose values are known"
        for golden in self.checkpoint.golden:
            packed, wanted = golden.decode(), torch.tensor(golden.values, dtype=torch.float64)
            unpacked = self.checkpoint.unpack(packed)
            assert torch.equal(unpacked, wanted), f"checkpoint.unpack gives {unpacked.tolist()}"
            rows, columns = wanted.shape
            root = layers.build("replicated", sizes=(columns, (rows,)))
            load(root, {f"model.proj.{suffix}": tensor for suffix, tensor in packed.items()})
            x = torch.eye(columns, dtype=layers.dtype, device=layers.device)
            plain = self.checkpoint.plain(x, wanted.to(x), None)
            assert_within(layer_of(root)(x), plain=plain, oracle=wanted.T, record=record_property)

    @cases("linear_cases")
    @level(2)
    def test_products_are_those_of_the_dequantised_matrix(
        self, layers: Layers, case: Case, record_property: Any
    ) -> None:
        """Each kind of layer, with and without bias, for one row, few, odd and many."""
        setup = case.value
        layers = replace(layers, dtype=getattr(torch, setup.dtype))
        for bias in (False, True):
            stored = layers.store(setup.kind, bias=bias)
            _, layer = layers.loaded(setup.kind, stored)
            for tokens in (1, 7, 64, 257):
                x = layers.inputs(tokens, stored.dense.shape[1])
                got = layer(x)
                assert (got.shape, got.dtype) == ((tokens, len(stored.dense)), x.dtype)
                assert_within(got, plain=layers.plain(x, stored), oracle=exact(x, stored), record=record_property)

    @dangerous
    @level(2)
    def test_sizes_at_the_edges(self, layers: Layers, record_property: Any) -> None:
        """Smallest and odd matrices, no rows, strided rows, and inputs of more axes."""
        inner, outer = self.checkpoint.input_multiple, self.checkpoint.output_multiple
        for inputs, outputs in ((inner, outer), (3 * inner, 5 * outer), (33 * inner, outer), (inner, 65 * outer)):
            sizes = (inputs, (outputs,))
            stored = layers.store("replicated", sizes=sizes)
            _, layer = layers.loaded("replicated", stored, sizes=sizes)
            assert layer(layers.inputs(0, inputs)).shape == (0, outputs)
            wide = layers.inputs(6, 2 * inputs)
            for x in (wide[:, :inputs], wide[::2, inputs:]):
                assert_within(layer(x), plain=layers.plain(x, stored), oracle=exact(x, stored), record=record_property)

    @level(2)
    def test_outliers_and_rows_of_zeros(self, layers: Layers, record_property: Any) -> None:
        """One huge weight, a row of zeros, one of the smallest numbers: finite, and right within the bound."""
        inputs, (outputs,) = layers.sizes("replicated")
        matrix = torch.randn(outputs, inputs, generator=layers.generator)
        matrix[0], matrix[1, 3], matrix[2] = 0.0, 1000.0, matrix[2] * 1e-20
        stored = layers.store_dense("replicated", [matrix])
        _, layer = layers.loaded("replicated", stored)
        x = layers.inputs(9, inputs)
        got = layer(x)
        assert torch.isfinite(got).all(), "zeros or outliers gave NaN or infinity"
        assert_within(got, plain=layers.plain(x, stored), oracle=exact(x, stored), record=record_property)
        zeros = self.checkpoint.unpack(self.checkpoint.pack(torch.zeros(outputs, inputs)))
        if not zeros.any():
            assert not layer(x)[:, 0].any(), "a row of zeros is no row of zeros any more"

    @level(2)
    def test_nan_stays_in_its_row(self, layers: Layers) -> None:
        """NaN in a tensor of reals is refused, or reaches no output but those of its matrix's first half."""
        stored = layers.store("merged")
        rows = layers.sizes("merged")[1][0]
        clean = layers.loaded("merged", stored)[1](x := layers.inputs(5, stored.dense.shape[1]))
        for name, tensor in stored.tensors.items():
            if not tensor.is_floating_point() or ".gate_proj." not in name:
                continue
            try:
                _, layer = layers.loaded(
                    "merged", replace(stored, tensors={**stored.tensors, name: poison(tensor.clone())})
                )
            except WeightsError:
                continue
            got = layer(x)
            assert torch.equal(got[:, rows:], clean[:, rows:]), f"NaN in {name} reaches the outputs of up_proj"
            assert got[:, :rows].isnan().all(), f"NaN in {name} does not show"

    @level(2)
    def test_inputs_and_weights_are_left_alone(self, layers: Layers) -> None:
        """``apply`` changes neither its inputs nor what is stored, and gives the same again."""
        stored = layers.store("qkv", bias=True)
        _, layer = layers.loaded("qkv", stored)
        x = layers.inputs(6, stored.dense.shape[1])
        before, kept = x.clone(), {name: p.clone() for name, p in layer.named_parameters()}
        first = layer(x)
        second = layer(x)
        assert torch.equal(x, before), "apply changed its input"
        assert torch.equal(first, second), "apply gives something else the second time"
        changed = [name for name, p in layer.named_parameters() if not torch.equal(p, kept[name])]
        assert not changed, f"apply changed {', '.join(changed)}"

    @cases("rank_cases")
    @level(2)
    def test_ranks_reassemble_to_the_whole(self, layers: Layers, case: Case, record_property: Any) -> None:
        """Each rank holds its own shard: outputs side by side, or inputs summed, give the undivided product."""
        setup = case.value
        layers = replace(layers, dtype=getattr(torch, setup.dtype))
        stored = layers.store(setup.kind, bias=True)
        x = layers.inputs(5, stored.dense.shape[1])
        oracle, plain = exact(x, stored), layers.plain(x, stored)
        total = torch.zeros_like(oracle)
        seen = torch.zeros(oracle.shape[1], dtype=torch.bool)
        for rank in range(setup.size):
            _, layer = layers.loaded(setup.kind, stored, rank=rank, size=setup.size)
            part = layer.input_part
            mine = torch.zeros(5, part.padded, dtype=x.dtype, device=x.device)
            mine[:, : part.size] = x[:, part.first : part.first + part.size]
            got = layer(mine)
            if setup.kind == "row":
                total += got.cpu().double()
                continue
            column = first = 0
            for piece in layer.output_parts:
                rows = slice(first + piece.first, first + piece.first + piece.size)
                real, padding = (
                    got[:, column : column + piece.size],
                    got[:, column + piece.size : column + piece.padded],
                )
                assert_within(real, plain=plain[:, rows], oracle=oracle[:, rows], record=record_property)
                assert not padding.any(), f"rank {rank} fills its padding with something else than zeros"
                seen[rows] = True
                column, first = column + piece.padded, first + piece.total
        if setup.kind == "row":
            assert_within(total.to(x.dtype), plain=plain, oracle=oracle, record=record_property)
        else:
            assert seen.all(), "no rank computes some of the outputs"

    @level(2)
    @pytest.mark.parametrize("size", [1, 2])
    def test_experts_are_those_of_the_dequantised_matrices(
        self, subject: Subject, layers: Layers, size: int, record_property: Any
    ) -> None:
        """Experts with and without tokens, each with its own scales, whole and divided over ranks."""
        if not subject.claims.has("moe"):
            method = layers.experts(2, 8, 8).quant_method
            assert isinstance(method, UnquantizedFusedMoEMethod), "takes experts, though the feature moe is not claimed"
            unclaimed("feature moe")
        num_experts, hidden = 4, _multiple(24, self.checkpoint)
        inner = _multiple(20, self.checkpoint) * 2
        draw = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        packed = [
            {
                name: self.checkpoint.pack(torch.randn(shape, generator=layers.generator) * 0.1 * 3.0**expert)
                for name, shape in draw.items()
            }
            for expert in range(num_experts)
        ]
        x = layers.inputs(7, hidden)
        ids = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [1, 0], [3, 1], [0, 1]], dtype=torch.int32)
        weights = torch.rand(7, 2, generator=layers.generator)
        total = torch.zeros(7, hidden, dtype=torch.float64)
        for rank in range(size):
            layer = layers.experts(num_experts, hidden, inner, rank=rank, size=size)
            for expert, matrices in enumerate(packed):
                for name, tensors in matrices.items():
                    layers.load_expert(layer, expert, name, tensors)
            layer.process_weights_after_loading()
            got = layer.quant_method.apply(layer, x, weights.to(x.device), ids.to(x.device))
            total += got.cpu().double()
        dense = [{name: self.checkpoint.unpack(t) for name, t in matrices.items()} for matrices in packed]
        found = []
        for dtype in (torch.float64, layers.dtype):
            gate_up = [(item["gate"].to(dtype), item["up"].to(dtype)) for item in dense]
            down = [item["down"].to(dtype) for item in dense]
            found.append(dense_experts(x.cpu().to(dtype), gate_up, down, weights, ids))
        assert_within(total.to(layers.dtype), plain=found[1], oracle=found[0], record=record_property)

    # ---- loading

    @level(3)
    def test_loading_again_replaces_everything(self, layers: Layers) -> None:
        """New weights into a layer that was used give what a new layer gives; finishing twice changes nothing."""
        first, second = layers.store("qkv", bias=True), layers.store("qkv", bias=True)
        root, layer = layers.loaded("qkv", first)
        x = layers.inputs(5, first.dense.shape[1])
        before = layer(x)
        layer.process_weights_after_loading()
        assert torch.equal(layer(x), before), "process_weights_after_loading is not idempotent"
        load(root, second.tensors)
        assert torch.equal(layer(x), layers.loaded("qkv", second)[1](x)), (
            "the second load leaves something of the first"
        )
        load(root, first.tensors)
        assert torch.equal(layer(x), before), "a third load leaves something of the second"

    @level(3)
    def test_weights_are_the_same_from_each_source(self, layers: Layers, tmp_path: Path) -> None:
        """From memory, in reverse order, from strided views and from a safetensors file: the same products."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        stored = layers.store("merged")
        x = layers.inputs(5, stored.dense.shape[1])
        wanted = layers.loaded("merged", stored)[1](x)
        file = tmp_path / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in stored.tensors.items()}, file)
        with safe_open(str(file), framework="pt") as handle:
            mapped = {name: handle.get_tensor(name) for name in stored.tensors}
            strided = {name: torch.stack((t, t), dim=-1)[..., 1] for name, t in stored.tensors.items()}
            for tensors in (mapped, strided, dict(reversed(stored.tensors.items()))):
                _, layer = layers.loaded("merged", replace(stored, tensors=tensors))
                assert torch.equal(layer(x), wanted)

    @level(3)
    def test_checkpoints_that_do_not_fit_are_refused(self, layers: Layers) -> None:
        """A tensor that is missing, unknown, or of another shape raises ``WeightsError`` that names it."""
        stored = layers.store("merged")
        for name, tensor in stored.tensors.items():
            lacking = {other: t for other, t in stored.tensors.items() if other != name}
            damages = {"missing": lacking, "unknown": {**stored.tensors, f"{name}_2": tensor}}
            if tensor.dim():
                longer = torch.cat((tensor, tensor[:1])) if len(tensor) else tensor
                damages |= {
                    "too long": {**stored.tensors, name: longer},
                    "too short": {**stored.tensors, name: tensor[:-1]},
                    "of another rank": {**stored.tensors, name: tensor[..., None]},
                }
            for what, tensors in damages.items():
                try:
                    load(layers.build("merged"), tensors)
                except WeightsError as error:
                    assert name.rpartition(".")[2] in str(error), f"{name} {what}: the error does not name it: {error}"
                else:
                    raise AssertionError(f"{name} is {what}, and nobody objects")

    @level(3)
    def test_memory_is_what_was_declared(self, layers: Layers) -> None:
        """After loading and use, the layer holds no more bytes than its parameters had before."""
        inner, outer = 16 * self.checkpoint.input_multiple, 16 * self.checkpoint.output_multiple
        sizes = (-(-512 // inner) * inner, (-(-384 // outer) * outer,))
        stored = layers.store("replicated", sizes=sizes)
        root = layers.build("replicated", sizes=sizes)
        layer = layer_of(root)
        declared = sum(p.numel() * p.element_size() for p in layer.parameters())
        load(root, stored.tensors)
        layer(layers.inputs(3, sizes[0]))
        held = held_bytes(layer)
        assert held <= 1.1 * declared + 16384, f"declared {declared} bytes, but holds {held}: is a dense copy kept?"

    @level(3)
    def test_two_instances_share_no_state(self, layers: Layers) -> None:
        """Two checkpoints side by side in one process, used in turns, give what each gives alone."""
        stored = layers.store("column"), layers.store("column")
        x = layers.inputs(4, stored[0].dense.shape[1])
        pair = [layers.loaded("column", item)[1] for item in stored]
        for _ in range(2):
            for item, layer in zip(stored, pair, strict=True):
                assert_within(layer(x), plain=layers.plain(x, item), oracle=exact(x, item))

    @level(3)
    def test_nothing_outlives_its_layer(self, layers: Layers) -> None:
        """Built, used and dropped, twice: no registry or cache keeps the layer."""
        for _ in range(2):
            root, layer = layers.loaded("column", layers.store("column"))
            layer(layers.inputs(2, layer.input_size))
            ghost = weakref.ref(layer)
            del root, layer
            gc.collect()
            assert ghost() is None, "a layer lives on after its last use"


def _multiple(size: int, checkpoint: QuantizedCheckpoint) -> int:
    """A size that suits an expert's matrices as inputs and as outputs."""
    for number in range(size, 100 * size):
        if number % checkpoint.input_multiple == 0 == number % checkpoint.output_multiple:
            return number
    raise ValueError(f"no size near {size} suits {checkpoint.input_multiple} and {checkpoint.output_multiple}")
