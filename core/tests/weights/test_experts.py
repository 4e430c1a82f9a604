"""Experts of a checkpoint, a matrix each, become the parameters of one layer: names, shares of ranks, what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rabbet.contracts.quantization import FusedMoEMethod, QuantizationConfig
from rabbet.errors import WeightsError
from rabbet.layers import BuildContext, FusedMoE, ReplicatedLinear
from rabbet.layers.reference import TorchLayerOps, TorchLinearBackend, TorchMoEBackend
from rabbet.parallel import ParallelState
from rabbet.weights import STANDARD_STACKS, Experts, WeightRules
from rabbet.weights.load import load_weights

MIXTRAL = Experts(num_experts=4, gate="w1", up="w3", down="w2")
QWEN = Experts(num_experts=4)


class Silent(ParallelState):
    """A rank whose sums are left to the test."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Block(nn.Module):
    """Router and experts, under the names that checkpoints give them."""

    def __init__(self, rank: int = 0, size: int = 1, quantization: Any = None) -> None:
        super().__init__()
        context = BuildContext(
            parallel=Silent(rank, size), quantization=quantization, dtype=torch.float32, device=torch.device("cpu"), linear=TorchLinearBackend(),
            ops=TorchLayerOps(), kv_cache_dtype="float32", max_model_len=64,
        )  # fmt: skip
        self.gate = ReplicatedLinear(16, 4, context=context, prefix="gate")
        self.experts = FusedMoE(
            num_experts=4, top_k=2, hidden_size=16, intermediate_size=24, context=context, prefix="experts"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


def saved(name: str, directory: Path) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A random block of transformers, and its tensors as ``save_pretrained`` names them."""
    import transformers

    torch.manual_seed(0)
    common = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
    }
    if name == "mixtral":
        config: Any = transformers.MixtralConfig(
            **common, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
        )
        model: Any = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            **common, intermediate_size=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True, head_dim=8,
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    prefixes = ("model.layers.0.block_sparse_moe.", "model.layers.0.mlp.")
    block = {key.removeprefix(prefix): t for key, t in tensors.items() for prefix in prefixes if key.startswith(prefix)}
    assert len(block) == 4 * 3 + 1, "one router, three matrices an expert"
    return model.model.layers[0].mlp, block


@pytest.mark.parametrize(("name", "experts"), [("mixtral", MIXTRAL), ("qwen3_moe", QWEN)])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_checkpoints_of_transformers_compute_what_transformers_computes(
    name: str, experts: Experts, size: int, tmp_path: Path
) -> None:
    theirs, tensors = saved(name, tmp_path)
    rules = WeightRules(stacks=STANDARD_STACKS, experts=experts)
    total, x = torch.zeros(9, 16), torch.randn(9, 16)
    for rank in range(size):
        block = Block(rank, size)
        report = load_weights(block, rules, tensors.items())
        assert (report.num_tensors, report.num_parameters) == (13, 3)
        total += block(x)
    want = theirs(x.unsqueeze(0))
    torch.testing.assert_close(total, (want[0] if isinstance(want, tuple) else want)[0], rtol=1e-4, atol=1e-4)


class Int8(FusedMoEMethod):
    """Rows of eight bits with a scale each, which the layer's own loader divides as it divides the rows."""

    def create_weights(self, layer: Any, *, weight_loader: Any, **sizes: Any) -> None:
        count, hidden, inner = (sizes[key] for key in ("num_experts", "hidden_size", "intermediate_size_per_partition"))
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            codes = torch.zeros(count, rows, columns, dtype=torch.int8)
            for suffix, zeros, axes in (
                ("", codes, {"output_dim": 1, "input_dim": 2}),
                ("_scale", torch.zeros(count, rows), {"output_dim": 1}),
            ):
                parameter: Any = nn.Parameter(zeros, requires_grad=False)
                for key, value in {"weight_loader": weight_loader, **axes}.items():
                    setattr(parameter, key, value)
                layer.register_parameter(name + suffix, parameter)

    def apply(self, layer: Any, x_TI: Any, topk_weights_TA: Any, topk_ids_TA: Any) -> torch.Tensor:
        dense = [getattr(layer, name) * getattr(layer, f"{name}_scale").unsqueeze(-1) for name in ("gate_up", "down")]
        return TorchMoEBackend().apply(x_TI, tuple(dense), topk_weights_TA, topk_ids_TA, None)


class Int8Config(QuantizationConfig):
    @classmethod
    def supports(cls, query: Any) -> tuple[()]:
        return ()

    @classmethod
    def from_config(cls, config: Any) -> Int8Config:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Int8 | None:
        return Int8() if isinstance(layer, FusedMoE) else None


@pytest.mark.parametrize("size", [1, 2])
def test_experts_of_eight_bits_are_loaded_with_their_scales(size: int, tmp_path: Path) -> None:
    _, dense = saved("mixtral", tmp_path)
    stored = {"gate.weight": dense["gate.weight"]}
    for name, matrix in dense.items():
        if name.startswith("experts."):
            scale = matrix.abs().amax(dim=1) / 127
            stored[name] = (matrix / scale.unsqueeze(1)).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            dense[name] = stored[name] * scale.unsqueeze(1)
    rules, x = WeightRules(experts=MIXTRAL), torch.randn(9, 16)
    whole = Block()
    load_weights(whole, rules, dense.items())
    total = torch.zeros(9, 16)
    for rank in range(size):
        block = Block(rank, size, Int8Config())
        assert load_weights(block, rules, stored.items()).num_parameters == 5
        total += block(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-4, atol=1e-4)


def test_names_of_experts_are_told_from_others() -> None:
    rules = WeightRules(stacks=STANDARD_STACKS, experts=QWEN)
    expected = {
        "m.0.mlp.experts.3.gate_proj.weight": ("m.0.mlp.experts.gate_up", (3, "gate")),
        "m.0.mlp.experts.3.up_proj.weight_scale": ("m.0.mlp.experts.gate_up_scale", (3, "up")),
        "m.0.mlp.experts.0.down_proj.qweight": ("m.0.mlp.experts.down_qweight", (0, "down")),
        "m.0.mlp.experts.4.down_proj.weight": ("m.0.mlp.experts.4.down_proj.weight", None),
        "m.0.mlp.shared_expert.gate_proj.weight": ("m.0.mlp.shared_expert.gate_up_proj.weight", 0),
        "m.0.mlp.gate.weight": ("m.0.mlp.gate.weight", None),
        "m.0.self_attn.k_proj.weight": ("m.0.self_attn.qkv_proj.weight", "k"),
    }
    assert {name: rules.target(name) for name in expected} == expected
    assert rules.shards("m.0.mlp.experts.down_qweight") == {(number, "down") for number in range(4)}
    assert len(rules.shards("m.0.mlp.experts.gate_up")) == 8
    assert rules.shards("m.0.mlp.shared_expert.down_proj.weight") == {None}


def test_merged_modules_are_told_by_the_checkpoints_names() -> None:
    packed = WeightRules(stacks=STANDARD_STACKS, experts=MIXTRAL).packed_modules
    assert packed["qkv_proj"] == ("q_proj", "k_proj", "v_proj")
    assert packed["gate_up_proj"] == ("gate_proj", "up_proj")
    assert packed["experts"][:4] == ("experts.0.w1", "experts.0.w3", "experts.0.w2", "experts.1.w1")
    assert len(packed["experts"]) == 12 and WeightRules().packed_modules == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts.2.w1.weight": None}, r"lacks experts\.gate_up \(\(2, 'gate'\)\)"),
        ({f"experts.{i}.w2.weight": None for i in range(4)}, r"lacks experts\.down \(\(0, 'down'\), .*\(3, 'down'\)\)"),
        ({"experts.4.w1.weight": torch.ones(24, 16)}, r"no place for experts\.4\.w1\.weight"),
        ({"experts.1.w1.weight_scale": torch.ones(24)}, r"no place for experts\.1\.w1\.weight_scale"),
        ({"experts.1.w3.weight": torch.ones(23, 16)}, r"tensor experts\.1\.w3\.weight does not fit"),
    ],
)
def test_experts_that_do_not_fit_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    _, tensors = saved("mixtral", tmp_path)
    given = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(WeightsError, match=words):
        load_weights(Block(), WeightRules(experts=MIXTRAL), given.items())
