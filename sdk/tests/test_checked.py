"""Checked mode: the strict twins serve a real engine under it, mutants are caught by it there, off it is not there."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rabbet_sdk.checked import ContractViolation, check
from rabbet_sdk.checked.hints import hints_of, mismatch
from rabbet_sdk.checked.proxy import _STATE
from rabbet_sdk.fakes.dist import write_distribution
from rabbet_sdk.mutants import all_mutants
from rabbet_sdk.oracles.quantization import INT8_PER_CHANNEL
from rabbet_sdk.oracles.weights import write_plain
from rabbet_sdk.strict import twin_table
from safetensors.torch import load_file, save_file

from rabbet import LLM, SamplingParams
from rabbet.contracts.attention import AttentionBackend
from rabbet.contracts.proposer import Proposer
from rabbet.errors import RabbetError

TINY = Path(__file__).parents[2] / "tests/e2e/tiny_model.py"

CAUGHT = {
    "attention/nan_leaks": "no NaN",
    "attention/output_accumulates": "no NaN",
    "attention/writes_null_block": "inputs are left alone",
    "attention/metadata_mutated": "inputs are left alone",
    "attention/queries_overwritten": "inputs are left alone",
    "attention/page_too_large": "a block fits its page",
    "quantization/input_changed": "inputs are left alone",
    "quantization/finished_twice": "a second call changes nothing",
    "quantization/zero_scale_divides": "no NaN",
    "quantization/linear_for_everything": "the method fits the layer",
    "quantization/settings_eaten": "inputs are left alone",
    "quantization/supports_raises": "supports never raises",
    "weights/tensor_twice": "each tensor once",
}
"""Mutants that compute without an error of their own, and the rule that each breaks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the twin's architecture, in the twin's 8 bits; one row of a matrix is zero."""
    spec = importlib.util.spec_from_file_location("checked_tiny_model", TINY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory: Path = module.write_tiny_model(tmp_path_factory.mktemp("checked") / "model")
    dense = load_file(directory / "model.safetensors")
    dense["lm_head.weight"] = dense["model.embed_tokens.weight"].clone()
    dense["model.layers.1.mlp.down_proj.weight"][3] = 0
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in dense.items():
        packed = INT8_PER_CHANNEL.pack(tensor) if "_proj" in name else {"weight": tensor}
        stored.update({f"{name.removesuffix('weight')}{part}": item for part, item in packed.items()})
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    configure(directory, "strict", skip=[])
    return directory


def configure(directory: Path, method: str, **settings: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(architectures=["StrictForCausalLM"], tie_word_embeddings=False)
    config["quantization_config"] = {"quant_method": method, **settings}
    path.write_text(json.dumps(config))


@pytest.fixture
def chosen(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options that choose the twins, with a directory of further distributions on the path."""
    sys.path.insert(0, str(tmp_path))
    yield {
        "attention_backend": "strict", "engine_process": False, "max_model_len": 128, "kv_cache_memory_bytes": 4 << 20,
        "plugins_auto": "any",
    }  # fmt: skip


def run(model: Path, options: dict[str, Any], *, check: bool) -> list[list[int]]:
    with LLM(str(model), check_plugins=check, **options) as llm:
        prompts = ["A prompt of one and a half blocks", "Hi"]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        for output in outputs:
            assert not output.outputs[0].error, output.outputs[0].error
        return [output.outputs[0].token_ids for output in outputs]


def test_twins_serve_the_same_tokens_checked_and_not(model: Path, chosen: dict[str, Any]) -> None:
    processors = {"logits_processors": ["strict"]} if "logits_processor" in _twins() else {}
    assert run(model, chosen | processors, check=True) == run(model, chosen | processors, check=False)


def _twins() -> tuple[str, ...]:
    from rabbet_sdk.strict import twin_kinds

    return twin_kinds()


def test_off_no_checked_object_is_there(model: Path, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects that serve are the plugins' own; on, all of those that the contracts know are not."""
    seen: dict[str, bool] = {}
    from rabbet.registry.composition import Composition

    original = Composition.load

    def load(self: Composition, kind: str, scope: str = "target") -> type[Any]:
        cls = original(self, kind, scope)
        seen[kind] = hasattr(cls, _STATE)
        return cls

    monkeypatch.setattr(Composition, "load", load)
    run(model, chosen, check=False)
    assert seen and not any(seen.values())
    seen.clear()
    run(model, chosen, check=True)
    assert {"platform", "model", "attention", "quantization", "executor", "scheduler"} <= seen.keys()
    assert all(seen.values())


@pytest.mark.parametrize("mutant", CAUGHT)
def test_mutants_are_caught_in_an_engine(mutant: str, model: Path, chosen: dict[str, Any], tmp_path: Path) -> None:
    kind, _, name = mutant.partition("/")
    target = next(item.target for item in all_mutants(kind) if item.name == name)
    claims = "\n".join(f"{key} = {json.dumps(value)}" for key, value in twin_table(kind).get("claims", {}).items())
    manifest = (
        f'schema = 1\n[[provides]]\nkind = "{kind}"\nname = "{name}"\ncontract = ">=1.0,<2"\n'
        f"priority = 99\n[provides.claims]\n{claims}\n"
    )
    write_distribution(tmp_path, "checked-zoo", provides={mutant: target}, manifest=manifest)
    if kind == "quantization":
        configure(model, name, skip=5 if name == "supports_raises" else [])
    elif kind == "weights":
        configure(model, "strict", skip=[])
        chosen["load_format"] = name
        _as_raw(model)
    else:
        configure(model, "strict", skip=[])
        chosen["attention_backend"] = name
    with pytest.raises((RabbetError, AssertionError)) as caught:
        run(model, chosen, check=True)
    told = str(caught.value)
    assert f"{mutant} " in told and f"breaks the rule {CAUGHT[mutant]!r} in " in told, told


def _as_raw(model: Path) -> None:
    """The same tensors in the format of the twin."""
    write_plain(model, load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text()))


# ---- the parts


def test_types_are_compared() -> None:
    hints = hints_of(Proposer.propose)
    assert mismatch("x", hints["batch"], "batch") == "batch is of the type str, not DraftBatch"
    assert not mismatch((1, 2), tuple[int, ...], "a") and not mismatch((), tuple[int, ...], "a")
    assert mismatch((1, "b"), tuple[int, ...], "a") == "a[1] is of the type str, not int"
    assert mismatch((1,), tuple[int, int], "a") == "a has 1 items, not 2"
    assert mismatch({"k": [1.5]}, dict[str, list[int]], "a") == "a['k'][0] is of the type float, not int"
    assert "not int | None" in mismatch("b", int | None, "a")


def test_a_contract_that_is_called_out_of_order_is_the_callers_fault() -> None:
    from rabbet_sdk.strict.attention import StrictAttention

    cls = check("attention", StrictAttention)
    assert issubclass(cls, StrictAttention) and cls.__name__ == "StrictAttention"
    backend = cls.__new__(cls)
    tensor = torch.zeros(1, 1, 1)
    from rabbet.contracts.attention import AttentionLayerSpec

    layer = AttentionLayerSpec(name="a", scale=1.0)
    with pytest.raises(ContractViolation, match="'call order' in forward.*before build_metadata.*the caller's fault"):
        backend.forward(layer, tensor, tensor, tensor, tensor, None, tensor)
    with pytest.raises(ContractViolation, match="'argument types' in forward.*q_THD is of the type int"):
        backend.called = True
        vars(backend)[_STATE].called.add("build_metadata")
        backend.forward(layer, 1, tensor, tensor, tensor, None, tensor)


def test_results_of_a_wrong_type_are_named() -> None:
    class Bad(AttentionBackend):
        supports = classmethod(lambda cls, query: ["no"])
        kv_layout = classmethod(lambda cls, spec: None)
        build_metadata = forward = lambda self, *rest: None

    from rabbet.contracts.attention import AttentionQuery

    query = AttentionQuery(device_type="cpu", arch="", dtype="float32", kv_cache_dtype="float32", num_heads=1,
                           num_kv_heads=1, head_dim=8, head_dim_v=8, block_size=16)  # fmt: skip
    with pytest.raises(ContractViolation, match="'result type' in supports.*type list, not tuple") as caught:
        check("attention", Bad).supports(query)
    assert (caught.value.kind, caught.value.method, caught.value.rule) == ("attention", "supports", "result type")


def test_grammars_that_a_backend_makes_are_checked_too() -> None:
    """A grammar that ors its bits into the row is right on a cleared row only."""
    from rabbet.contracts.grammar import Grammar, GrammarBackend

    class Ors(Grammar):
        accept = count_accepted = lambda self, token_ids: len(token_ids) + 1
        rollback = lambda self, num_tokens: None  # noqa: E731
        is_terminated = property(lambda self: False)

        def fill_bitmask(self, row: Any) -> None:
            row |= 1

    class Backend(GrammarBackend):
        supports = classmethod(lambda cls, query: ())
        compile = lambda self, spec: Ors()  # noqa: E731

    import numpy as np

    from rabbet.contracts.grammar import GrammarContext
    from rabbet.types.sampling import StructuredOutputsParams

    context = GrammarContext(tokenizer=SimpleNamespace(), vocab_size=32, end_token_ids=(0,))
    grammar = check("grammar", Backend)(context).compile(StructuredOutputsParams(choice=["a"]))
    assert isinstance(grammar, Ors)
    with pytest.raises(ContractViolation, match="'every bit is written' in fill_bitmask"):
        grammar.fill_bitmask(np.zeros(1, np.int32))
    with pytest.raises(ContractViolation, match="'a prefix is accepted' in accept.*3 of 2 tokens"):
        grammar.accept([1, 2])


@pytest.mark.parametrize("kind", ["grammar", "logits_processor", "proposer", "tool_parser"])
def test_twins_pass_their_suites_checked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real engine does not reach in this file keeps to the rules in its suite."""
    from rabbet_sdk.check import check_plugin

    monkeypatch.setenv("RABBET_CHECK_PLUGINS", "1")
    result = check_plugin(f"{kind}/strict", level=2)
    assert result.is_passed, result.failures
