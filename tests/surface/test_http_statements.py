"""What a body may hold: ignored, refused, and in which precedence; through a server over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rabbet.config import engine_config_from_kwargs
from rabbet.errors import ConfigError
from rabbet.front.defaults import default_sampling, sampling_defaults

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": HELLO}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    [{"best_of": 5}, {"use_beam_search": True}, {"guided_json": {}}, {"guided_regex": "a"}, {"logits_processors": ["a.B"]}, {"user": "me"}, {"user": None}],
    ids=str,
)  # fmt: skip
def test_best_of_user_and_fields_of_older_servers_are_accepted_and_change_nothing(
    site: Any, path: str, fields: dict[str, Any]
) -> None:
    plain = site.answer(path, {**BODIES[path], "max_tokens": 4})
    odd = site.answer(path, {**BODIES[path], "max_tokens": 4, **fields})
    assert odd["choices"] == plain["choices"] and odd["usage"] == plain["usage"]
    first, second = site.engine.requests
    assert len(site.engine.requests) == 2
    assert first.sampling.clone(seed=None) == second.sampling.clone(seed=None)


def test_suffix_is_refused_by_name(site: Any) -> None:
    for body in ({"prompt": "x"}, {"prompt": [1, 2]}, {"prompt": "x", "echo": True}, {"prompt": "x", "stream": True}):
        error = site.error(COMPLETIONS, {**body, "suffix": "end"})
        assert error["param"] == "suffix" and not site.engine.requests


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_an_image_is_refused_whatever_its_detail_because_the_model_reads_text(site: Any, detail: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": detail}}
    error = site.error(CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]})
    assert "image_url" in error["message"] and str(error["param"]).startswith("messages")
    assert not site.engine.requests


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def test_tools_by_choice_of_the_model_need_the_switch_and_a_parser(site: Any) -> None:
    for fields in ({}, {"tool_choice": "auto"}):
        error = site.error(CHAT, {"messages": HELLO, "tools": TOOLS, **fields})
        assert "--enable-auto-tool-choice" in error["message"] and "--tool-call-parser" in error["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/chat/completions/render", "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/realtime", "/score"])  # fmt: skip
def test_routes_that_this_release_lacks_are_404_in_openais_shape(site: Any, path: str) -> None:
    answer = site.post(path, {"input": "x"})
    assert answer.status_code == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models"])
def test_the_operators_routes_answer(site: Any, path: str) -> None:
    assert site.get(path).status_code == 200


# ---- precedence of defaults


def config(**options: Any) -> Any:
    return engine_config_from_kwargs("m", **options).model


FILE = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 64, "do_sample": True,
    "presence_penalty": 0.5, "frequency_penalty": 0.25, "skip_special_tokens": False, "bos_token_id": 1, "chat_template": "x",
}  # fmt: skip


def test_generation_config_supplies_sampling_defaults_and_nothing_else() -> None:
    found = sampling_defaults(config(), FILE)
    assert found == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 64,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "skip_special_tokens": False,
    }  # fmt: skip
    assert default_sampling(found).temperature == 0.6
    for name in ("rabbet", "vllm"):
        assert sampling_defaults(config(generation_config=name), FILE) == {}


def test_overrides_lie_over_the_file_and_a_directory_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7, "max_new_tokens": 9}))
    options = {"generation_config": str(tmp_path), "override_generation_config": {"top_k": 8, "top_p": 0.5}}
    assert sampling_defaults(config(**options), FILE) == {"top_k": 8, "top_p": 0.5, "max_tokens": 9}
    with pytest.raises(ConfigError, match="generation_config.json cannot be read"):
        sampling_defaults(config(generation_config=str(tmp_path / "none")), FILE)
    with pytest.raises(ConfigError, match="the sampling defaults are wrong: temperature is -1"):
        sampling_defaults(config(override_generation_config={"temperature": -1}), FILE)


@pytest.fixture
def with_defaults(make_site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A site whose model has sampling defaults."""
    site = make_site()
    defaults = {"temperature": 0.5, "top_k": 20, "max_tokens": 5}
    monkeypatch.setattr(site.llm, "sampling_defaults", defaults)
    return site


@pytest.mark.parametrize("path", BODIES)
def test_a_field_of_the_request_wins_over_the_models_default_and_this_over_openais(
    with_defaults: Any, path: str
) -> None:
    site = with_defaults
    site.answer(path, {**BODIES[path]})
    site.answer(path, {**BODIES[path], "temperature": 1.5, "top_k": 0, "seed": 3})
    plain, asked = (request.sampling for request in site.engine.requests)
    assert (plain.temperature, plain.top_k, plain.top_p) == (0.5, 20, 1)
    assert (asked.temperature, asked.top_k) == (1.5, 0)


def test_the_models_limit_is_a_default_for_chats_that_requests_may_exceed_and_completions_have_16(
    with_defaults: Any,
) -> None:
    site = with_defaults
    for path, fields, expected in (
        (CHAT, {}, 5), (CHAT, {"max_tokens": 60}, 60), (CHAT, {"max_completion_tokens": 61}, 61), (COMPLETIONS, {}, 16), (COMPLETIONS, {"max_tokens": 40}, 40),
    ):  # fmt: skip
        usage = site.answer(path, {**BODIES[path], **fields})["usage"]
        assert usage["completion_tokens"] == expected, (path, fields)


# ---- bad input, each with its answer


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETIONS, {"max_tokens": 300}, "max_tokens", ("300", "256")), (COMPLETIONS, {"prompt": []}, "prompt", ("prompt",)), (COMPLETIONS, {"prompt": None}, "prompt", ("prompt",)),
        (CHAT, {"messages": []}, "messages", ("empty",)),
        *((path, {"temperature": -1}, "temperature", ("-1", "[0, 2]")) for path in BODIES),
        *((path, {"top_p": 0}, "top_p", ("(0, 1]",)) for path in BODIES), *((path, {"top_k": -2}, "top_k", ("-2", ">= -1")) for path in BODIES),
        *((path, {"repetition_penalty": 0}, "repetition_penalty", ("0",)) for path in BODIES), *((path, {"presence_penalty": 3}, "presence_penalty", ("3", "[-2, 2]")) for path in BODIES),
        *((path, {"n": 0}, "n", ("0",)) for path in BODIES), *((path, {"stop": [""]}, "stop", ("non-empty",)) for path in BODIES),
        *((path, {"stop_token_ids": [300, -1, 10**9], "min_tokens": 1}, "stop_token_ids", ("300", "299")) for path in BODIES),
        *((path, {"logit_bias": {"191222": -100, "5": 2}}, "logit_bias", ("191222", "299")) for path in BODIES),
        *((path, {"logit_bias": {"abc": 1}}, "logit_bias", ("abc",)) for path in BODIES), *((path, {"logit_bias": {"5": "x"}}, "logit_bias", ()) for path in BODIES),
        *((path, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", ("9", "3")) for path in BODIES),
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_400_with_field_value_and_limit(
    site: Any, path: str, fields: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    error = site.error(path, {**BODIES[path], **fields})
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0] == param
    assert all(word in error["message"] for word in words), error["message"]
    assert not site.engine.requests


def test_an_empty_text_is_a_prompt_where_the_tokenizer_writes_a_start_token(site: Any) -> None:
    assert site.answer(COMPLETIONS, {"prompt": "", "max_tokens": 1})["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_400(site: Any, name: str, value: str) -> None:
    content = f'{{"prompt": "x", "{name}": {value}}}'
    answer = site.ask("POST", COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and not site.engine.requests


def test_a_context_overflow_holds_limit_prompt_and_request(site: Any) -> None:
    error = site.error(COMPLETIONS, {"prompt": [5] * 8, "max_tokens": 253})
    assert (error["param"], error["code"], error["type"]) == (
        "max_tokens",
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert all(word in error["message"] for word in ("256", "8", "253"))


def test_an_unknown_model_is_404_with_the_names_that_there_are(site: Any) -> None:
    answer = site.post(COMPLETIONS, {"prompt": "x", "model": "gpt-9"})
    assert answer.status_code == 404
    assert "gpt-9" in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "model"
