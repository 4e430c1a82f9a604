"""The fakes that authors get as fixtures, each doing its job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rabbet_sdk.conformance.subject import load_subject
from rabbet_sdk.fakes.model import END, UNSCRIPTED, ScriptedForCausalLM

from rabbet.contracts import Refusal
from rabbet.errors import ConfigError, PluginLoadError, PluginRefusedError
from rabbet.types.outputs import FinishReason

SCRIPT = [([5, 6, 7], [10, 11, 10, 9]), ([5, 6, 8] * 9, [20, 3, 20]), ([5, 6], [8, 33])]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 4, "max_num_seqs": 3}, {"enable_prefix_caching": False}])
def test_scripted_model_says_exactly_its_script(tiny_engine: Callable[..., Any], options: dict[str, Any]) -> None:
    engine = tiny_engine(script=SCRIPT, **options)
    prompts = [prompt for prompt, _ in SCRIPT]
    for _ in range(2):
        assert engine.generate(prompts) == [[*output, END] for _, output in SCRIPT]
        assert all(end.finish_reason is FinishReason.STOP for end in engine.last)
    assert engine.generate([prompts[0]], max_tokens=2) == [[10, 11]]


def test_scripted_model_says_so_where_no_script_holds(tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(script=SCRIPT)
    # The same tokens in another order are other text.
    assert engine.generate([[6, 5, 7], [5]], max_tokens=2) == [[UNSCRIPTED, UNSCRIPTED], [6, 8]]


def test_a_script_of_two_minds_is_refused(tiny_engine: Callable[..., Any]) -> None:
    with pytest.raises(PluginLoadError, match=r"differ after \[5, 6, 7\]"):
        tiny_engine(script=[([5, 6], [7, 8]), ([5, 6, 7], [9])])


def test_scripted_model_notices_lost_keys(tiny_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(script=SCRIPT)
    forward = ScriptedForCausalLM.forward

    def loses_token_8(self: Any, input_ids: Any, positions: Any, *rest: Any) -> Any:
        return forward(self, input_ids - (input_ids == 8).long(), positions, *rest)

    monkeypatch.setattr(ScriptedForCausalLM, "forward", loses_token_8)
    assert engine.generate([SCRIPT[1][0]], max_tokens=1) == [[UNSCRIPTED]]


def test_tiny_engine_runs_the_plugin_under_test(tiny_engine: Callable[..., Any]) -> None:
    # Attention twin against whatever the machine has; the same tokens, and another backend.
    prompts = [[5, 6, 7], [9] * 20]
    usual, strict = tiny_engine(), tiny_engine(attention_backend="strict")
    assert strict.core.resolved.composition.name("attention") == "strict"
    assert usual.generate(prompts) == strict.generate(prompts)


def test_null_platform_has_the_memory_that_the_test_says(null_platform: Any, tiny_engine: Callable[..., Any]) -> None:
    engine = tiny_engine(script=SCRIPT, device="null")
    assert engine.core.resolved.arch == "null"
    assert engine.generate([[5, 6]]) == [[8, 33, END]]
    null_platform.info = replace(null_platform.info, free_bytes=1 << 10)
    with pytest.raises(ConfigError, match="max-model-len|KV cache"):
        tiny_engine(script=SCRIPT, device="null", kv_cache_memory_bytes=None)
    null_platform.num_devices = 0
    with pytest.raises(ConfigError, match="no such device"):
        tiny_engine(script=SCRIPT, device="null")
    null_platform.num_devices = 1
    null_platform.refusals = (Refusal(code="DTYPE", message="no float32 here"),)
    with pytest.raises(PluginRefusedError, match="no float32 here"):
        tiny_engine(script=SCRIPT, device="null")


def test_fake_dist_is_found_like_an_installed_one(fake_dist: Callable[..., str]) -> None:
    source = (
        "from rabbet.contracts import register_hooks\nfrom rabbet.contracts.hooks import Hooks\n"
        '@register_hooks("faked")\nclass Faked(Hooks):\n    """Listens to nothing."""\n'
    )
    package = fake_dist(
        "acme-faked", provides={"hooks/faked": "acme_faked.listen:Faked"}, modules={"listen.py": source}
    )
    subject = load_subject("hooks/faked")
    assert (package, subject.entry.distribution) == ("acme_faked", "acme-faked")
    assert subject.plugin_class.__name__ == "Faked"


def test_faulty_store_fails_as_planned(faulty_store: Any) -> None:
    faulty_store.plan(["", "drop"])
    tickets = [faulty_store.put("k", b"v"), faulty_store.get("k")]
    assert [ticket for ticket, _ in faulty_store.poll()] == tickets[:1]


def test_scripted_proposer_follows_its_script(scripted_proposer: Callable[..., Any]) -> None:
    from types import SimpleNamespace

    proposer = scripted_proposer({"a": [8, 9, 7]}, {"a": 2})
    batch = SimpleNamespace(request_ids=["a", "b"], num_tokens=[3, 4], max_drafts=[3, 3])
    assert proposer.propose(batch).token_ids == [[9, 7], []]
    assert proposer.seen == [("a", 3), ("b", 4)]
