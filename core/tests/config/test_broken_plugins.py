"""Plugins that answer what their contract does not say: the error has kind, name, owner, method and answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.contracts.support import Refusal
from rabbet.errors import PluginLoadError, PluginRefusedError, WeightsError
from rabbet.registry import Catalog
from rabbet.registry.loader import call, load_entry

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 300,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip

NAMES = {"platform": "cpu", "attention": "cpu", "model": "LlamaForCausalLM", "weights": "dummy", "linear": "cpu"}
OPTIONS = {"platform": "device", "attention": "attention_backend", "weights": "load_format", "linear": "linear_backend"}


def run(folder: Path, **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return resolve(engine_config_from_kwargs(str(folder), **{"load_format": "dummy", **options}), is_server=True)


class Loud:
    """What a plugin may give back by mistake."""

    def __repr__(self) -> str:
        return "loud " * 1000


WRONG: list[tuple[str, str, Any, str]] = [
    ("platform", "detect", None, "tuple | list of DeviceInfo"),
    ("platform", "detect", ["cpu"], "tuple | list of DeviceInfo"),
    ("platform", "batch_defaults", None, "BatchDefaults"),
    ("platform", "batch_defaults", {"max_num_seqs": 3}, "BatchDefaults"),
    ("platform", "default_dtype", None, "str"),
    ("platform", "preferences", None, "tuple | list of str"),
    ("platform", "preferences", [3], "tuple | list of str"),
    ("platform", "supports", None, "tuple | list of Refusal"),
    ("attention", "supports", True, "tuple | list of Refusal"),
    ("attention", "supports", ["too old"], "tuple | list of Refusal"),
    ("attention", "supports", "too old", "tuple | list of Refusal"),
    ("attention", "block_sizes", 16, "tuple | list of int"),
    ("attention", "block_sizes", ["16"], "tuple | list of int"),
    ("linear", "supports", Loud(), "tuple | list of Refusal"),
    ("model", "supports", None, "tuple | list of Refusal"),
    ("weights", "peek", "{}", "Mapping | None"),
    ("weights", "resolve", None, "ModelFiles"),
    ("weights", "resolve", {"config": {}}, "ModelFiles"),
]


def owned(kind: str) -> tuple[type[Any], str]:
    entry = Catalog.scan().find(kind, NAMES[kind])
    return load_entry(entry), f"{kind}/{NAMES[kind]} of {entry.label}"


@pytest.mark.parametrize(("kind", "method", "answer", "wanted"), WRONG, ids=lambda item: str(item)[:20])
def test_an_answer_of_a_wrong_type_is_the_plugins_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str, answer: Any, wanted: str
) -> None:
    target, owner = owned(kind)
    monkeypatch.setattr(target, method, lambda *_arguments, **_named: answer)
    named = {OPTIONS[kind]: NAMES[kind]} if kind in OPTIONS else {}
    with pytest.raises(PluginLoadError) as caught:
        run(tmp_path, **named)
    told = str(caught.value)
    assert told.startswith(f"{owner} is broken: {method}() returned ") and len(told) < 400
    assert wanted in told and told.endswith("; upgrade or remove the distribution")
    assert (caught.value.kind, caught.value.name) == (kind, NAMES[kind])


@pytest.mark.parametrize(
    "error", [RuntimeError("no licence"), SystemExit(3), KeyError("x"), AttributeError("y")], ids=repr
)
@pytest.mark.parametrize(("kind", "method"), sorted({(kind, method) for kind, method, *_ in WRONG}))
def test_a_method_that_raises_is_the_plugins_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str, error: BaseException
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> Any:
        raise error

    target, owner = owned(kind)
    monkeypatch.setattr(target, method, fail)
    named = {OPTIONS[kind]: NAMES[kind]} if kind in OPTIONS else {}
    with pytest.raises(PluginLoadError) as caught:
        run(tmp_path, **named)
    assert str(caught.value).startswith(f"{owner} failed in {method}(): {type(error).__name__}: {error}")
    assert caught.value.__cause__ is error


def test_auto_passes_a_broken_backend_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, owner = owned("linear")
    monkeypatch.setattr(target, "supports", lambda _query: None)
    assert run(tmp_path).composition.name("linear") == "torch"
    assert f"{owner} is broken: supports() returned None" in caplog.text


def test_a_list_of_refusals_is_as_good_as_a_tuple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = owned("attention")
    monkeypatch.setattr(target, "supports", lambda _query: [Refusal(code="AGE", message="too old")])
    with pytest.raises(PluginRefusedError, match="AGE: too old"):
        run(tmp_path, attention_backend="cpu")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: 8 TB"), WeightsError("corrupt")])
def test_a_lack_of_memory_and_errors_of_ours_are_not_the_plugins_fault(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call(Catalog.scan().find("platform", "cpu"), "memory", fail)
    assert caught.value is error


def test_a_constructor_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: Any, *_arguments: Any) -> None:
        raise ValueError("no AMX here")

    target, owner = owned("linear")
    composition = run(tmp_path, linear_backend="cpu").composition
    monkeypatch.setattr(target, "__init__", fail)
    with pytest.raises(PluginLoadError) as caught:
        composition.build("linear")
    assert f"{owner} failed in __init__(): ValueError: no AMX here" in str(caught.value)
