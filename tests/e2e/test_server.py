"""The server as its clients see it: OpenAI's SDK, streams, log probabilities, bad bodies. One real server for all."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Count from 1 to 10."}]


def events(client: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a stream; checks that it ends as it must."""
    with client.stream("POST", route, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def free_blocks(client: httpx.Client) -> str:
    text = client.get("/metrics").text
    return next(line for line in text.splitlines() if line.startswith("rabbet:kv_cache_usage_perc{"))


def test_openai_sdk_talks_to_it_without_change(server: Any) -> None:
    from openai import NotFoundError, OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        assert sdk.models.list().data[0].id == "smollm2"
        answer = sdk.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0,
            max_completion_tokens=20, user="me", store=True, metadata={"a": "b"},
        )  # fmt: skip
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        assert (
            answer.usage is not None
            and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
        with sdk.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0,
            max_tokens=20, stream=True, stream_options={"include_usage": True},
        ) as stream:  # fmt: skip
            chunks = list(stream)
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.choices[0].message.content
        )
        assert chunks[-1].usage == answer.usage
        with pytest.raises(NotFoundError, match="not served here"):
            sdk.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])


def test_stream_has_role_first_one_finish_reason_an_index_and_usage_last(client: httpx.Client) -> None:
    body = {
        "messages": HELLO,
        "n": 3,
        "max_tokens": 8,
        "temperature": 1,
        "seed": 5,
        "stream_options": {"include_usage": True},
    }
    chunks = events(client, CHAT, body)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 24
    for index in range(3):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] is not None for choice in mine].count(True) == 1
        assert mine[-1]["finish_reason"] == "length"
    whole = client.post(CHAT, json={**body, "stream_options": None}).json()
    for index in range(3):
        text = "".join(
            c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1] if c["choices"][0]["index"] == index
        )
        assert text == whole["choices"][index]["message"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 3


@pytest.mark.parametrize("options", [None, {}])
def test_no_usage_in_a_stream_unless_it_is_asked_for(client: httpx.Client, options: dict | None) -> None:
    chunks = events(client, CHAT, {"messages": HELLO, "max_tokens": 3, "stream_options": options})
    assert all(not chunk.get("usage") and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens_is_cut_and_reported(client: httpx.Client, stream: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 48, "temperature": 0}
    text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    stop = text[7:13]
    expected = text[: text.find(stop)]
    if stream:
        chunks = events(client, CHAT, {**body, "stop": [stop, "never seen"]})
        got = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        last = chunks[-1]["choices"][0]
    else:
        last = client.post(CHAT, json={**body, "stop": [stop, "never seen"]}).json()["choices"][0]
        got = last["message"]["content"]
    assert (got, last["finish_reason"], last["stop_reason"]) == (expected, "stop", stop)
    kept = client.post(CHAT, json={**body, "stop": stop, "include_stop_str_in_output": True}).json()["choices"][0]
    assert kept["message"]["content"] == expected + stop


def test_stop_string_that_never_comes_holds_nothing_back(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 16, "temperature": 0}
    text = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    chunks = events(client, CHAT, {**body, "stop": [text[-3:] + "\u0001never"]})
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_min_tokens_keeps_stop_strings_and_the_end_token_away(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    short = client.post(CHAT, json=body).json()
    assert short["usage"]["completion_tokens"] < 20
    long = client.post(CHAT, json={**body, "min_tokens": 20, "stop": ["capital"]}).json()
    assert long["usage"]["completion_tokens"] >= 20


def test_echo_with_logprobs_covers_prompt_and_output(client: httpx.Client) -> None:
    body = {"prompt": "The sky is blue", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {5}
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [choice["text"][offset:] != "" for offset in logprobs["text_offset"]] == [True] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_generation_shows_the_prompt_alone(client: httpx.Client, stream: bool) -> None:
    body = {"prompt": "Your answer: Yes", "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        chunks = events(client, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == "Your answer: Yes"
        usage, reason = chunks[-1]["usage"], [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1]
    else:
        answer = client.post(COMPLETIONS, json=body).json()
        assert answer["choices"][0]["text"] == "Your answer: Yes"
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
        usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
    assert (usage["completion_tokens"], reason) == (0, "length")


def test_logprobs_do_not_depend_on_how_many_are_asked_for(client: httpx.Client) -> None:
    def ask(count: int) -> list[dict[str, Any]]:
        body = {"messages": HELLO, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": count}
        return client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]

    full = ask(20)
    for count in (0, 1, 4, 10):
        for entry, wanted in zip(ask(count), full, strict=True):
            assert entry["logprob"] == wanted["logprob"]
            assert entry["top_logprobs"] == wanted["top_logprobs"][:count]
            assert len(entry["top_logprobs"]) == count


def test_seed_gives_the_same_tokens_whatever_else_runs(client: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 24, "temperature": 0.9, "seed": 42, "return_token_ids": True}

    def ask(extra: dict[str, Any]) -> list[int]:
        return client.post(CHAT, json={**body, **extra}).json()["choices"][0]["token_ids"]

    alone = ask({})
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, {"seed": None, "repetition_penalty": 1.2}) for _ in range(6)]
        mine = pool.submit(ask, {})
        assert mine.result() == alone
        [other.result() for other in others]
    streamed = events(client, CHAT, body)
    assert [t for c in streamed for t in c["choices"][0].get("token_ids", [])] == alone


def test_token_id_prompts_lists_and_texts_agree(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "Once upon a time"}
    body = {"max_tokens": 8, "temperature": 0}
    answers = [
        client.post(COMPLETIONS, json={**body, "prompt": prompt}).json()["choices"]
        for prompt in ("Once upon a time", ["Once upon a time"], tokens, [tokens, tokens])
    ]
    assert {choice["text"] for choices in answers for choice in choices} == {answers[0][0]["text"]}
    assert [choice["index"] for choice in answers[3]] == [0, 1]


def test_chat_tokenises_alike_on_all_ways(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
        [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "id": "x", "refusal": None}],
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "A", "annotations": [], "audio": None}],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": None, "reasoning_content": "hm"}, {"role": "user", "content": "B"}],
    ],
)  # fmt: skip
def test_odd_messages_of_real_clients_are_accepted(client: httpx.Client, messages: list) -> None:
    assert client.post(CHAT, json={"messages": messages, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_null_is_absent_for_every_field(client: httpx.Client, route: str) -> None:
    from rabbet.server.protocol import ChatCompletionRequest, CompletionRequest

    model = ChatCompletionRequest if route == CHAT else CompletionRequest
    base = {"messages": HELLO} if route == CHAT else {"prompt": "x"}
    body = dict.fromkeys(model.model_fields) | base | {"max_tokens": 1}
    assert client.post(route, json=body).status_code == 200
    assert client.post(route, json={**body, "max_tokens": None, "stop": "1"}).status_code == 200


VOCAB = 49152
BAD = [
    ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 129}, "n"), ({"n": 10**9}, "n"), ({"n": "2"}, "n"), ({"n": 1.5}, "n"), ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"), ({"seed": "1"}, "seed"), ({"max_tokens": -1}, "max_tokens"), ({"min_tokens": 50, "max_tokens": 10}, "min_tokens"),
    ({"stop": ["x"] * 17}, "stop"), ({"stop": ["x" * 2000]}, "stop"), ({"stop": [""]}, "stop"), ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"), ({"stop_token_ids": [-1], "min_tokens": 1}, "stop_token_ids"),
    ({"logit_bias": {"191222": 1}}, "logit_bias"), ({"logit_bias": {"abc": 1}}, "logit_bias"), ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [10**9]}, "allowed_token_ids"), ({"bad_words": [""]}, "bad_words"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"), ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "a\nb"}, "cache_salt"),
    ({"cache_salt": "x" * 200}, "cache_salt"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_bad_values_are_refused_by_name(client: httpx.Client, route: str, fields: dict, param: str) -> None:
    base = {"messages": HELLO, "max_tokens": 2} if route == CHAT else {"prompt": "x", "max_tokens": 2}
    answer = client.post(route, json={**base, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert not any(word in error["message"] for word in ("0x", "Traceback", "/usr/", "/root/"))


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"), (COMPLETIONS, {"prompt": []}, "prompt"), (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"), (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"), (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [VOCAB]}, "prompt"), (COMPLETIONS, {"prompt": [-1]}, "prompt"), (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"), (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"), (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"), (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "tools": []}, "tools"), (CHAT, {"messages": HELLO, "tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"), (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"), ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"), ("/detokenize", {}, "tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_bodies_are_refused_by_name(client: httpx.Client, route: str, fields: dict, param: str) -> None:
    answer = client.post(route, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_context_overflow_names_limit_prompt_and_request(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": [5] * 8, "max_tokens": 510})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "max_tokens", "context_length_exceeded")
    assert all(number in error["message"] for number in ("510", "8 tokens", "512", "504"))
    long = client.post(COMPLETIONS, json={"prompt": [5] * 600, "max_tokens": 1}).json()["error"]
    assert (long["param"], long["code"]) == ("prompt", "context_length_exceeded") and "600" in long["message"]
    # Editors send a huge cap with chats: it is clamped to the room.
    assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 65535, "stop": ["2"]}).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400), (b"\xff\xfe", "application/json", 400), (b"", "application/json", 400),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", 400), (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400), (b'{"prompt": "x"}', "text/plain", 415), (b'{"prompt": "\\ud800"}', "application/json", 400),
    ],
)  # fmt: skip
def test_malformed_bodies_get_the_right_status(client: httpx.Client, content: bytes, kind: str, status: int) -> None:
    answer = client.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_large_body_is_refused_before_it_is_read(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, content=b" " * (33 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_routes_methods_and_slashes(client: httpx.Client) -> None:
    assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert client.get(CHAT).status_code == 405
    assert client.get("/v1//models").status_code == 200
    assert client.head("/health").status_code == client.post("/ping").status_code == 200
    assert client.get("/v1/models/smollm2").json()["max_model_len"] == 512
    assert client.get("/v1/models/none").status_code == 404
    assert len(client.get("/version").json()["composition"]) == 64
    assert CHAT in client.get("/openapi.json").json()["paths"] and client.get("/docs").status_code == 200
    assert "access-control-allow-origin" not in client.get("/health", headers={"origin": "http://evil"}).headers


def test_client_that_goes_away_frees_its_blocks(server: Any, client: httpx.Client) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(4):
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
    for _ in range(600):
        if free_blocks(client).endswith(" 0.0"):
            break
        client.get("/health")
    assert free_blocks(client).endswith(" 0.0")


def test_prefix_cache_is_used_and_salts_keep_apart(client: httpx.Client) -> None:
    def hits() -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("rabbet:prompt_tokens_cached_total{")).split()[-1])

    body = {"prompt": list(range(100, 200)), "max_tokens": 1, "temperature": 0}
    client.post(COMPLETIONS, json=body)
    start = hits()
    client.post(COMPLETIONS, json=body)
    assert hits() >= start + 96
    middle = hits()
    client.post(COMPLETIONS, json={**body, "cache_salt": "one"})
    client.post(COMPLETIONS, json={**body, "cache_salt": "two"})
    assert hits() == middle


def test_metrics_speak_prometheus(client: httpx.Client) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "request_success",
        "time_to_first_token_seconds",
    ):
        assert f"rabbet:{name}" in families


def test_the_log_says_once_that_it_is_ready_and_every_line_has_its_time(server: Any) -> None:
    lines = server.log.read_text().splitlines()
    assert len([line for line in lines if re.search(r"\bready\b", line)]) == 1
    start = lines[: next(number for number, line in enumerate(lines) if " ready at http" in line)]
    assert len(start) > 10 and any("start: choosing plugins" in line for line in start)
    assert all(re.match(r"\d\d:\d\d:\d\d (INFO|WARNING) ", line) for line in start), start
