"""A class that a user decorates in a module of his own, imports, and selects by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet import LLM, SamplingParams
from rabbet.contracts.registration import _staged
from rabbet.errors import DuplicatePluginError, PluginLoadError, UnknownPluginError

MODULE = '''
import torch
from rabbet import register_model, register_quantization_config
from rabbet.contracts.quantization import LinearMethodBase, QuantizationConfig
from rabbet.layers import LinearBase, get_forward_context
from rabbet_model_llama.model import LlamaForCausalLM

APPLIED, SEEN, TAKEN = [], [], []


class Twice(LinearMethodBase):
    """Keeps each weight as two halves that it adds."""

    def create_weights(self, layer, *, input_size_per_partition, output_partition_sizes, input_size, output_size,
                       params_dtype, weight_loader):
        weight = torch.nn.Parameter(
            torch.zeros(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype), requires_grad=False
        )
        weight.output_dim, weight.input_dim, weight.weight_loader = 0, 1, weight_loader
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer):
        layer.half = layer.weight.data / 2

    def apply(self, layer, x_TI, bias_O=None):
        APPLIED.append(tuple(x_TI.shape))
        return torch.nn.functional.linear(x_TI, layer.half + layer.half, bias_O)


@register_quantization_config("twice-halved")
class TwiceHalved(QuantizationConfig):
    @classmethod
    def supports(cls, query):
        return ()

    @classmethod
    def from_config(cls, config):
        method = cls()
        method.skip = config.get("modules_to_not_convert", ())
        return method

    def get_quant_method(self, layer, prefix):
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{name}" for name in self.packed_modules.get(last, (last,))]
        if not isinstance(layer, LinearBase) or all(name in self.skip for name in names):
            return None
        TAKEN.append(prefix)
        return Twice()


@register_model("OwnForCausalLM")
class OwnForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        SEEN.append(get_forward_context())
        return super().forward(*args, **kwargs)
'''
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(__file__).parents[1] / "e2e/tiny_model.py"
    spec = importlib.util.spec_from_file_location("surface_tiny_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "surface_own_module.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def module(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The user's module, imported as any other; afterwards forgotten."""
    before = dict(_staged)
    monkeypatch.syspath_prepend(str(file.parent))
    yield importlib.import_module("surface_own_module")
    del sys.modules["surface_own_module"]
    _staged.clear()
    _staged.update(before)


def answer(model: Path, **options: Any) -> list[int]:
    options = {"engine_process": False, "load_format": "safetensors", **options}
    with LLM(str(model), max_model_len=64, dtype="float32", **options) as llm:
        return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_quantisation_method_and_a_model_of_ones_own_module_are_used_once_it_is_imported_and_named(
    module: ModuleType, tiny: Path, tmp_path: Path
) -> None:
    plain = answer(tiny)
    module.APPLIED.clear()
    assert answer(tiny, quantization="twice_halved") == plain
    # Attention and MLP of two layers, for the prompt and for each token.
    assert (3, 64) in module.APPLIED and (1, 64) in module.APPLIED
    own = tmp_path / "own"
    own.mkdir()
    for item in tiny.iterdir():
        (own / item.name).write_bytes(item.read_bytes())
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    assert answer(own) == plain
    assert module.SEEN and module.SEEN[-1] is not None


def test_a_skip_list_of_the_checkpoints_names_meets_merged_layers(
    module: ModuleType, tiny: Path, tmp_path: Path
) -> None:
    """Lists name q_proj, k_proj and v_proj; the model has a qkv_proj, and says what it is made of."""
    skipped = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    skipped += ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"]
    for item in tiny.iterdir():
        (tmp_path / item.name).write_bytes(item.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "twice-halved", "modules_to_not_convert": skipped}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = answer(tiny)
    module.TAKEN.clear()
    assert answer(tmp_path) == plain
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    everything = {f"model.layers.{number}.{layer}" for number in range(2) for layer in layers}
    dense = {"model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.down_proj"}
    assert set(module.TAKEN) == everything - dense


def test_an_engine_in_a_process_of_its_own_imports_the_module_by_its_path(file: Path, tiny: Path) -> None:
    asked = {"quantization": "twice-halved", "plugin": [str(file)], "engine_process": True}
    before = dict(_staged)
    try:
        assert answer(tiny, **asked) == answer(tiny)
    finally:
        _staged.clear()
        _staged.update(before)


def test_a_method_that_nobody_imported_is_unknown(tiny: Path) -> None:
    with pytest.raises(UnknownPluginError, match="named 'twice-halved'"):
        answer(tiny, quantization="twice-halved")


def test_a_second_class_under_a_name_is_refused_and_the_same_one_again_is_not(module: ModuleType) -> None:
    from rabbet import register_quantization_config

    with pytest.raises(DuplicatePluginError, match="registered twice"):
        register_quantization_config("TWICE_HALVED")(type("Other", (), {}))
    assert register_quantization_config("twice-halved")(module.TwiceHalved) is module.TwiceHalved


def test_a_class_that_is_no_quantisation_is_refused_with_its_contract(tiny: Path) -> None:
    from rabbet import register_quantization_config

    before = dict(_staged)
    try:
        register_quantization_config("surface-wrong")(type("Wrong", (), {}))
        with pytest.raises(
            PluginLoadError, match="does not derive from rabbet.contracts.quantization.QuantizationConfig"
        ):
            answer(tiny, quantization="surface-wrong")
    finally:
        _staged.clear()
        _staged.update(before)


def test_bases_and_layers_have_the_names_that_methods_of_the_field_test_for() -> None:
    from rabbet import layers
    from rabbet.contracts import quantization

    assert quantization.LinearMethodBase is quantization.LinearMethod
    assert quantization.FusedMoEMethodBase is quantization.FusedMoEMethod
    assert issubclass(layers.QKVParallelLinear, layers.LinearBase) and isinstance(layers.FusedMoE, type)
