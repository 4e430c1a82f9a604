"""Requests at the edges of every field, alone and together: 200 or a 400 that names a field, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

# What no answer may hold: addresses, paths of this machine, tracebacks.
LEAK = re.compile(r"0x[0-9a-f]{6}|File \"|Traceback|site-packages|/(home|usr|root|opt|tmp|var)/")
HELLO = [{"role": "user", "content": "hi"}]
LONG = "x" * 100_000

EDGES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 5, None),
    "min_tokens": (0, 1, 5),
    "temperature": (0, 1e-6, 0.01, 1, 2),
    "top_p": (1e-9, 0.5, 1),
    "top_k": (-1, 0, 1, 257, 10**6),
    "min_p": (0, 0.5, 1),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2),
    "repetition_penalty": (1e-3, 1, 1e3),
    "seed": (-(2**63), -1, 0, 2**63 - 1),
    "n": (1, 3),
    "stop": ("x", ["a", "ab" * 100], []),
    "stop_token_ids": ([], [0, 256]),
    "include_stop_str_in_output": (True, False),
    "ignore_eos": (True, False),
    "logit_bias": ({}, {"0": -100, "256": 100}),
    "allowed_token_ids": ([65], list(range(257))),
    "bad_words": ([], ["a", "ab"]),
    "logprob_token_ids": ([0, 256],),
    "prompt_logprobs": (0, 20),
    "skip_special_tokens": (True, False),
    "repetition_detection": ({"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2},),
    "stream_interval": (1, 100),
    "priority": (-(2**63), 0, 2**63 - 1),
    "cache_salt": ("s", "t" * 128),
    "truncate_prompt_tokens": (-1, 1),
    "return_token_ids": (True, False),
    "return_tokens_as_token_ids": (True, False),
    "user": ("u", 5),
    "kv_transfer_params": ({"do_remote_prefill": True, "remote_host": "127.0.0.1"},),
    "best_of": (1,),
    "vllm_xargs": ({"a": [1, {"b": None}]},),
}
COMPLETIONS = {"logprobs": (0, 1, 20), "echo": (True, False), "add_special_tokens": (True, False)}
CHAT = {"logprobs": (True,), "top_logprobs": (0, 20), "max_completion_tokens": (1, 4), "reasoning_effort": ("low",)}


def drawn(chat: bool, dice: random.Random) -> dict[str, Any]:
    """A third of all fields, each at one of its edges."""
    edges = {**EDGES, **(CHAT if chat else COMPLETIONS)}
    body: dict[str, Any] = {name: dice.choice(edges[name]) for name in dice.sample(sorted(edges), len(edges) // 3)}
    body |= {"messages": HELLO} if chat else {"prompt": dice.choice(["hello", [1, 2, 3], ["a", "b"], [[5], [6, 7]]])}
    if dice.random() < 0.5:
        body["stream"] = True
        if dice.random() < 0.5:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if "max_tokens" not in body or body["max_tokens"] is None:
        body["max_tokens"] = 3
    return body


def check(answer: httpx.Response, body: dict[str, Any]) -> None:
    """A good answer, or a refusal that names a field of the body."""
    assert answer.status_code in (200, 400), (body, answer.text)
    assert not LEAK.search(answer.text), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and error["param"] in body, (body, error)
        return
    if not body.get("stream"):
        choices = answer.json()["choices"]
    else:
        assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text, (body, answer.text[-500:])
        events = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part and not part.endswith("[DONE]")]
        choices = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) and body["prompt"][0] != 1 else 1
    assert len(choices) == num_prompts * body.get("n", 1), (body, answer.text[-500:])
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length", "repetition"}, (body, choices)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_edges_of_fields_together_are_served_or_refused_by_name(
    client: httpx.Client, neighbours: Callable[[], Any], idle: Callable[[], None], route: str
) -> None:
    """Each pair of edges meets in about ten of these requests; no later check fails what an earlier one let through."""
    dice = random.Random(route)
    num_served = 0
    with neighbours():
        for _ in range(150):
            body = drawn("chat" in route, dice)
            answer = client.post(route, json=body)
            check(answer, body)
            num_served += answer.status_code == 200
    assert num_served > 30, "too few of them tell anything about the engine"
    idle()


HOSTILE: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": {
        "prompt": ("", [], [[]], [""], None, ["a"] * 1025, [1, "a"], [257], [-1], [2**63], [1.5], [True], LONG, {"a": 1}),
        "n": (0, -1, 129, 10**9, "2", 1.5, True),
        "stop": (["x"] * 17, "x" * 1025, [""], [1], ""),
        "seed": (2**63, 2**64, "1", 1.0),
        "logprobs": (-1, 21, 10**9, True, "5"),
        "prompt_logprobs": (-1, 21),
        "max_tokens": (0, -1, 512, 2**63, "2"),
        "min_tokens": (50, -1),
        "temperature": (-1, 2.1, "1"),
        "top_p": (0, 1.1),
        "top_k": (-2,),
        "repetition_penalty": (0, -1),
        "logit_bias": ({"abc": 1}, {"-3": 1}, {"1500000000.0": 1}, {"5": "x"}, {"5": None}, {"257": 1}, [1]),
        "stop_token_ids": ([257], [-1], [2**31], [2**63], [1.5], [True], ["5"], [None], [[1]], 5),
        "allowed_token_ids": ([], [257], [-1]),
        "bad_words": ([""], [1], [LONG], ["a"] * 5000),
        "logprob_token_ids": ([257], [1] * 200),
        "cache_salt": ("", LONG, 3, "a\nb", "a\0b"),
        "priority": (2**70, "x"),
        "request_id": ("x" * 200, "a\nb", "\x1b[31m"),
        "suffix": ("x",),
        "prompt_embeds": ("AAAA", LONG),
        "structured_outputs": ({"regex": "(a+)+b"}, {"json": {}}),
        "response_format": ({"type": "json_object"}, {"type": "x"}),
        "stream_options": ({"include_usage": True},),
        "vllm_xargs": ({"a": LONG}, {"a": 2**64}),
        "truncate_prompt_tokens": (0, -2, 10**9),
        "repetition_detection": ({}, {"max_pattern_size": -1}),
        "stream_interval": (0,),
    },
    "/v1/chat/completions": {
        "messages": (
            [], [{}], [{"role": "user", "content": 5}], HELLO * 20_000, [1], "x", [{"role": "user", "content": LONG}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        ),
        "chat_template": ("{{ 'a' * 10**9 }}",),
        "chat_template_kwargs": ({"chat_template": "x"}, {"tokenize": True}, "x"),
        "tools": ([], [{"type": "function", "function": {"name": "f"}}]),
        "tool_choice": ("required", {"type": "function"}),
        "top_logprobs": (5, 21),
        "max_completion_tokens": (0, -1),
    },
    "/tokenize": {"prompt": (5, ["a"]), "messages": ([{}],), "chat_template": ("{{ 1 }}",)},
    "/detokenize": {"tokens": ([257], [-1], [2**63], [1.5], "x", None)},
}  # fmt: skip
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/tokenize": {},
    "/detokenize": {},
}


@pytest.mark.parametrize("route", HOSTILE)
def test_values_out_of_range_are_refused_by_name_at_once_and_tell_nothing(
    client: httpx.Client, neighbours: Callable[[], Any], idle: Callable[[], None], route: str
) -> None:
    with neighbours():
        for field, values in HOSTILE[route].items():
            for value in values:
                extra = {"messages": HELLO} if route == "/tokenize" and field == "chat_template" else {}
                started = time.monotonic()
                answer = client.post(route, json={**LEAST[route], **extra, field: value})
                assert answer.status_code == 400, (field, str(value)[:80], answer.text[:300])
                assert time.monotonic() - started < 5, (field, str(value)[:80])
                error = answer.json()["error"]
                assert error["param"].partition(".")[0] == field, (field, str(value)[:80], error)
                assert error["type"] == "invalid_request_error" and len(error["message"]) < 500, error
                assert not LEAK.search(answer.text), answer.text
    idle()


BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "a list": (b"[]", 400),
    "null": (b"null", 400),
    "two objects": (b'{"prompt": "a"} {}', 400),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400),
    "infinity": (b'{"prompt": "a", "temperature": 1e999}', 400),
    "an integer of 5000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "a"}', 400),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), 400),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', 400),
    "a control character": (b'{"prompt": "a\x00b"}', 400),
    "lists without end": (b"[" * 100_000, 400),
    "a deep list": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    "an unknown deep field": (b'{"prompt": [1], "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "a key twice": (b'{"prompt": [1], "max_tokens": 1, "max_tokens": 2}', 200),
    "an escaped NUL": (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),
}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_good_json_are_refused(client: httpx.Client, route: str) -> None:
    for name, (content, status) in BODIES.items():
        if status == 200 and route != "/v1/completions":
            continue
        answer = client.post(route, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status, (name, answer.text)
        assert not LEAK.search(answer.text), answer.text
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}):
        assert client.post(route, content=b'{"prompt": "a"}', headers=headers).status_code == 415
    assert client.get("/health").status_code == 200


def test_routes_of_operators_and_of_files_are_not_there(client: httpx.Client) -> None:
    """No adapter, profile, cache, sleep, pause or call from outside; no path of a file comes through the router."""
    for route in (
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile", "/reset_prefix_cache",
        "/sleep", "/wake_up", "/pause", "/resume", "/collective_rpc", "/abort_requests", "/scale_elastic_ep",
        "/inference/v1/generate", "/server_info", "/v1/models/../../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    ):  # fmt: skip
        for method in ("GET", "POST"):
            answer = client.request(method, route, json={"lora_name": "../../x", "lora_path": "/etc", "method": "exit"})
            assert answer.status_code in (404, 405), (route, answer.text)
            assert "root:" not in answer.text
