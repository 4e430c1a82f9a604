"""Probes that tell the truth, models, version, metrics, tokenising, the API's own page."""

from __future__ import annotations

from typing import Any

import pytest
from server_scripted import CONTEXT

from rabbet import __version__
from rabbet.errors import EngineDeadError
from rabbet.types.outputs import FinishReason

PROBES = ("/health", "/ready", "/ping")


def statuses(site: Any) -> set[tuple[int, str | None]]:
    answers = [site.get(path) for path in PROBES] + [site.ask("POST", "/ping")]
    heads = {site.ask("HEAD", path).status_code for path in PROBES}
    found = {(a.status_code, (a.json().get("error") or {}).get("code")) for a in answers}
    assert {status for status, _ in found} == heads
    return found


def test_health_is_that_of_the_engine(site: Any) -> None:
    assert statuses(site) == {(200, None)}
    site.engine._die(EngineDeadError("gone"))
    assert statuses(site) == {(503, "engine_dead")}


@pytest.mark.parametrize("state", ["starting", "draining", "engine_dead"])
def test_nothing_is_served_before_and_after(site: Any, state: str) -> None:
    if state == "starting":
        site.state.llm = None
    elif state == "draining":
        site.state.is_draining = True
    else:
        site.state.is_dead = True
    assert statuses(site) == {(503, state)}
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = site.post(path, body)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "service_unavailable_error"
        assert ("retry-after" in answer.headers) == (state != "engine_dead")
    assert site.get("/v1/models").status_code == 503
    assert site.get("/version").status_code == site.get("/metrics").status_code == 200
    assert site.state.stats.rejections[state] == 4


def test_models_have_all_names_and_the_context(site: Any) -> None:
    listed = site.get("/v1/models").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["scripted", "other"]
    for model in listed["data"]:
        assert site.get(f"/v1/models/{model['id']}").json() == model
        assert (model["max_model_len"], model["root"], model["object"]) == (CONTEXT, "scripted", "model")
    assert site.ask("HEAD", "/v1/models").status_code == 200


def test_version_has_the_composition(site: Any) -> None:
    assert site.get("/version").json() == {"version": __version__, "composition": "d" * 64}


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1/models/", "///health//"])
def test_slashes_too_many_do_no_harm(site: Any, path: str) -> None:
    assert site.get(f"http://site{path}").status_code == 200


def test_tokenising_agrees_with_the_engine(site: Any) -> None:
    text = site.answer("/tokenize", {"prompt": "Hi \u20ac", "return_token_strs": True})
    assert text["tokens"][0] == 257 and text["count"] == len(text["tokens"]) and text["max_model_len"] == CONTEXT
    assert text["token_strs"][:3] == ["<start>", "H", "i"]
    plain = site.answer("/tokenize", {"prompt": "Hi", "add_special_tokens": False})["tokens"]
    assert plain == [72, 105]
    assert site.answer("/detokenize", {"tokens": text["tokens"]}) == {"prompt": "<start>Hi \u20ac"}
    messages = [{"role": "user", "content": "Hi"}]
    ids = site.answer("/tokenize", {"messages": messages})["tokens"]
    site.answer("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert site.engine.requests[-1].prompt_token_ids == ids
    site.answer("/v1/completions", {"prompt": "Hi \u20ac", "max_tokens": 1})
    assert site.engine.requests[-1].prompt_token_ids == text["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "x", "messages": []}, "prompt"), ("/tokenize", {"messages": []}, "messages"), ("/detokenize", {}, "tokens"),
     ("/detokenize", {"tokens": [300]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens"),
     ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template")],
)  # fmt: skip
def test_wrong_bodies_are_refused(site: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert site.error(path, body)["param"] == param


def test_templates_of_requests_are_used_where_the_operator_trusts_them(make_site: Any) -> None:
    site = make_site(trust_request_chat_template=True, default_chat_template_kwargs={"mark": "<"})
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template": "{{ mark }}{{ more }}{{ messages[0].content }}",
    }
    ids = site.answer("/tokenize", {**body, "chat_template_kwargs": {"more": ">"}})["tokens"]
    assert bytes(ids) == b"<>x"


def test_counting_the_tokens_of_a_text_longer_than_the_context_works(site: Any) -> None:
    assert site.answer("/tokenize", {"prompt": "y" * 20_000})["count"] == 20_001
    assert site.answer("/tokenize", {"prompt": "", "add_special_tokens": False}) == {
        "count": 0, "max_model_len": CONTEXT, "tokens": [],
    }  # fmt: skip


def test_metrics_count_by_closed_sets(site: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    site.answer("/v1/completions", {"prompt": "x", "max_tokens": 3})
    for number in range(20):
        site.get(f"/nowhere/{number}")
        site.get(f"/v1/models/{number}")
    answer = site.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    responses = {(s.labels["route"], s.labels["status"]): s.value for s in families["rabbet:http_responses"].samples}
    assert responses == {
        ("/v1/completions", "200"): 1, ("unmatched", "404"): 20, ("/v1/models/{name:path}", "404"): 20,
    }  # fmt: skip
    done = {s.labels["finished_reason"]: s.value for s in families["rabbet:request_success"].samples}
    assert done == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    labels = families["rabbet:num_requests_running"].samples[0].labels
    assert labels == {"model_name": "scripted", "engine": "0"}
    assert not [name for name in families if name.startswith("vllm:")]


def test_metrics_can_carry_the_reference_names(make_site: Any) -> None:
    text = make_site(metrics_compat="vllm").get("/metrics").text
    for name in ("num_requests_running", "prompt_tokens_total", "time_to_first_token_seconds_bucket"):
        assert f"\nvllm:{name}{{" in text and f"\nrabbet:{name}{{" in text


def test_the_page_of_the_api_is_complete(site: Any) -> None:
    assert site.get("/docs").status_code == 200
    schema = site.get("/openapi.json").json()
    assert "$ref" not in str(schema["paths"]["/v1/chat/completions"])
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stream_options", "tools"} <= body["properties"].keys()
    assert len({o["operationId"] for p in schema["paths"].values() for o in p.values()}) == sum(
        map(len, schema["paths"].values())
    )


def test_the_page_can_be_switched_off(make_site: Any) -> None:
    site = make_site(disable_fastapi_docs=True)
    assert site.get("/docs").status_code == site.get("/openapi.json").status_code == 404


def test_one_line_a_request_without_its_text(make_site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(enable_log_requests=True)
    with caplog.at_level("INFO", logger="rabbet.server.state"):
        answer = site.answer("/v1/completions", {"prompt": "secret\nword", "max_tokens": 3})
    lines = [record.getMessage() for record in caplog.records if answer["id"] in record.getMessage()]
    assert len(lines) == 1 and "length, 12 prompt tokens (2 cached), 3 generated" in lines[0]
    assert "secret" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_metrics_know_the_longest_output_and_the_preemptions(site: Any, stream: bool) -> None:
    last = {"new_token_ids": [99], "finish_reason": FinishReason.LENGTH, "num_preemptions": 2}
    scripts = iter([[97, 98, last], [97, last]])
    site.engine.script = lambda _request: next(scripts)
    assert site.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 9, "stream": stream}).status_code == 200
    histograms = site.state.stats.histograms
    assert histograms["request_max_num_generation_tokens"].total == 3
    assert histograms["request_generation_tokens"].total == 5
    assert histograms["request_num_preemptions"].total == 4
