"""Counts without bounds: each list and number of a request has a limit, and what is far beyond it is refused unread."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rabbet.server.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from rabbet.types.sampling import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"role": "user", "content": 'a "[1, 2]" b'}
TOOL = {"type": "function", "function": {"name": "x", "parameters": {"enum": [[], []]}}}


@pytest.mark.parametrize(
    ("path", "body", "param", "count"),
    [
        (COMPLETIONS, {"prompt": [1] * 100_000}, "prompt", 100_000),
        (COMPLETIONS, {"prompt": ["a, [b]"] * 20_000}, "prompt", 20_000),
        (COMPLETIONS, {"prompt": [[1, 2]] * 20_000}, "prompt", 20_000),
        (CHAT, {"messages": [MESSAGE] * 10_000}, "messages", 10_000),
        (CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 2_000}, "tools", 2_000),
        ("/tokenize", {"messages": [MESSAGE] * 10_000}, "messages", 10_000),
    ],
    ids=["ids", "texts", "lists of ids", "messages", "tools", "messages to tokenise"],
)
def test_long_lists_are_refused_before_objects_are_made_of_them(
    site: Any, path: str, body: dict[str, Any], param: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_args: Any, **_more: Any) -> Any:
        raise AssertionError("the body was validated")

    for model in (CompletionRequest, ChatCompletionRequest, TokenizeRequest):
        monkeypatch.setattr(model, "model_validate", late)
    error = site.error(path, body)
    assert error["param"] == param and f" {count} " in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [1] * 100_000, "truncate_prompt_tokens": 8}),
        (COMPLETIONS, {"prompt": "x", "user": [[1], ",[" * 100_000]}),
        (COMPLETIONS, {"prompt": [[1]] * 3, "user": "," * 100_000}),
        (CHAT, {"messages": [MESSAGE], "user": ["x"] * 30_000}),
        (CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 1024, "tool_choice": "none"}),
    ],
    ids=["truncated", "text with commas", "few lists", "another field", "just enough tools"],
)
def test_large_bodies_within_the_limits_are_served(site: Any, path: str, body: dict[str, Any]) -> None:
    assert len(json.dumps(body)) > 64 << 10
    site.answer(path, {**body, "max_tokens": 1})


@pytest.mark.parametrize("prompt", [None, {"a": ["x"] * 30_000}, [True] * 30_000, [1.5] * 30_000, [-1] * 30_000])
def test_large_wrong_prompts_are_refused_as_small_ones_are(site: Any, prompt: Any) -> None:
    error = site.error(COMPLETIONS, {"prompt": prompt, "user": "x" * (64 << 10)})
    assert error["param"] == "prompt"


def test_prompts_times_n_have_a_bound_of_their_own(make_site: Callable[..., Any]) -> None:
    site = make_site(max_outputs=6)
    assert len(site.answer(COMPLETIONS, {"prompt": ["x", "y", "z"], "n": 2, "max_tokens": 1})["choices"]) == 6
    error = site.error(COMPLETIONS, {"prompt": ["x", "y"], "n": 0})
    assert error["message"] == "n is 0, but must be an integer from 1 to 128 (--max-n)" and error["param"] == "n"
    error = site.error(COMPLETIONS, {"prompt": ["x", "y"], "n": 4})
    assert error["param"] == "n" and "8 outputs, the limit is 6 (--max-outputs)" in error["message"]
    assert len(site.engine.requests) == 6


def test_lists_times_outputs_have_a_bound(site: Any) -> None:
    """Each output carries the lists of its request, so 1024 outputs make gigabytes of a body of one megabyte."""
    many = {"prompt": ["x"] * 8, "n": 128, "max_tokens": 1, "temperature": 1.0}
    bias = {str(i): 1 for i in range(300)}
    error = site.error(COMPLETIONS, {**many, "allowed_token_ids": [97] * 3000, "logit_bias": bias})
    assert error["param"] == "allowed_token_ids"
    assert "3300 entries for each of 1024 outputs" in error["message"] and "2097152" in error["message"]
    chat = {"messages": [MESSAGE], "n": 128, "bad_words": ["x" * 128] * 128, "temperature": 1.0}
    assert site.error(CHAT, {**chat, "stop_token_ids": [1]})["param"] == "bad_words"
    assert not site.engine.requests
    assert len(site.answer(COMPLETIONS, {**many, "allowed_token_ids": [97] * 2000})["choices"]) == 1024


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", -1), ("n", 129), ("n", 10**9), ("n", "2"), ("n", 1.5), ("n", True), ("seed", 2**64), ("seed", -(2**64)), ("stop", ["a"] * 17), ("stop", "a" * 2048), ("stop", [""]),
        ("stop", [1]), ("bad_words", ["x"] * 100_000), ("logit_bias", {str(i): 1 for i in range(5000)}), ("logit_bias", {"300": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"x": 1}),
        ("stop_token_ids", [1] * 5000), ("stop_token_ids", [-1]), ("stop_token_ids", [2**63]), ("stop_token_ids", [1.5]), ("stop_token_ids", [True]), ("stop_token_ids", ["5"]), ("stop_token_ids", [[1]]),
        ("allowed_token_ids", [1] * 5000), ("allowed_token_ids", [300]), ("allowed_token_ids", []), ("logprob_token_ids", [1] * 5000), ("logprob_token_ids", [2**31]), ("prompt_logprobs", 10**9),
        ("prompt_logprobs", -2), ("min_tokens", 10**9), ("min_tokens", -1), ("cache_salt", ""), ("cache_salt", "x" * 10**6), ("cache_salt", 3), ("cache_salt", "a\nb"), ("cache_salt", "a\0b"),
        ("request_id", "a\r\nb"), ("request_id", "x" * 129), ("request_id", "\x1b[31m"), ("vllm_xargs", {"x": "y" * 20_000}), ("vllm_xargs", {"x": [1] * 9000}),
    ],
    ids=lambda value: str(value)[:24].encode("unicode_escape").decode(),
)  # fmt: skip
def test_counts_ids_and_texts_out_of_range_are_refused_by_name(
    site: Any, path: str, stream: bool, name: str, value: Any
) -> None:
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    error = site.error(path, {**body, "stream": stream, name: value})
    assert error["param"] == name and len(error["message"]) < 400
    assert not site.engine.requests


@pytest.mark.parametrize("more", [{"max_tokens": 10}, {"max_tokens": None}, {}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_more_tokens_at_least_than_at_most_are_refused(site: Any, path: str, more: dict[str, Any]) -> None:
    """The pair that killed an engine's input thread elsewhere: a null limit with a huge minimum."""
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    for least in (50 if more.get("max_tokens") else 10**9, 2**63):
        assert site.error(path, {**body, **more, "min_tokens": least})["param"] == "min_tokens"
    assert not site.engine.requests


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[], [1]], [1, "x"], ["x", 1], ["x", [1]], [None], {}, 5, True, [-1], [300], [2**31], [2**63], [1.5], [True], ["x", None], [[["x"]]], [[300]], [[1, "5"]]],
    ids=str,
)  # fmt: skip
def test_empty_and_odd_prompts_are_refused_by_name(site: Any, prompt: Any) -> None:
    assert site.error(COMPLETIONS, {"prompt": prompt})["param"] == "prompt"
    assert not site.engine.requests


def test_clients_cannot_grow_the_metrics(site: Any) -> None:
    """Models, paths, methods, fields, users and ids that clients make up become no label and are not kept."""

    def ask(number: int) -> None:
        more = {"user": f"u{number}", "request_id": f"r{number}", f"field{number}": 1, "cache_salt": f"s{number}"}
        site.answer(COMPLETIONS, {"prompt": "x", "max_tokens": 1, **more})
        site.post(COMPLETIONS, {"prompt": "x", "model": f"m{number}"})
        site.ask(f"M{number}", f"/p{number}")
        site.ask(f"M{number}", COMPLETIONS)

    ask(0)
    before = len(site.get("/metrics").text.splitlines())
    for number in range(1, 200):
        ask(number)
    # The answer to /metrics itself is a new line the first time.
    assert len(site.get("/metrics").text.splitlines()) <= before + 1
    assert len(site.state._noted) <= 64


def test_what_clients_send_forges_no_line_of_the_log(
    make_site: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Line ends, escape sequences and formats in prompts, names, fields, models and headers."""
    site = make_site(enable_log_requests=True)
    hostile = "x\r\n\x1b[31mERROR forged %s %d {} \u2028"
    body = {"prompt": hostile, hostile: 1, "user": hostile, "max_tokens": 1}
    with caplog.at_level("INFO"):
        for more in (
            {},
            {"model": hostile},
            {"request_id": hostile},
            {"cache_salt": hostile},
            {"stop": [hostile] * 99},
        ):
            site.post(COMPLETIONS, {**body, **more}, headers={"User-Agent": "%s\x1b[31m", "X-Request-Id": "%s{}"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("rabbet")]
    assert len(lines) == 2, "one for the unknown field, one for the request that ran"
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"bad_words": ["x" * 20_000]}, "bad_words", "20000 characters in all, the limit is 16384"),
        ({"bad_words": ["bad word"] * 4000}, "bad_words", "32000 characters in all, the limit is 16384"),
        ({"priority": 1 << 70}, "priority", "64 bits"),
        ({"priority": -(1 << 63) - 1}, "priority", "64 bits"),
        ({"repetition_detection": {"min_count": 1 << 64}}, "repetition_detection", "64 bits"),
        ({"vllm_xargs": {"a": 1 << 64}}, "vllm_xargs", "64 bits"),
        ({"vllm_xargs": {"a": [{"b": {"c": -(1 << 70)}}]}}, "vllm_xargs", "64 bits"),
        ({"structured_outputs": {"json": {"maximum": 1 << 64}}}, "structured_outputs", "64 bits"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": 1 << 64}}}},
            "response_format",
            "64 bits",
        ),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words", "leave no token"),
    ],
    ids=[
        "a long bad word",
        "many bad words",
        "high priority",
        "low priority",
        "many repetitions",
        "large argument",
        "large inner argument",
        "large schema",
        "large format",
        "bad words",
    ],
)
def test_values_that_would_hold_up_the_others_or_cannot_be_sent_are_refused_by_name(
    site: Any, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    error = site.error(path, prompt | fields)
    assert error["param"] == param and words in error["message"]


def test_large_maps_of_many_outputs_do_not_hold_up_the_loop(site: Any) -> None:
    """Lists are checked once a request, not for each of its prompts and outputs: 4096 entries, 32 prompts, 4 outputs."""
    looks = 0

    class Counted(dict[int, float]):
        def __iter__(self) -> Any:
            nonlocal looks
            looks += 1
            return super().__iter__()

        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    params = SamplingParams(n=4, max_tokens=1, temperature=1.0, seed=1)
    object.__setattr__(params, "logit_bias", Counted({i % 300: 1.0 for i in range(300)}))
    notes: list[int] = []

    async def work() -> None:
        for number in range(32):
            prompt = await site.llm.tokenize([97])
            outputs = [o async for o in site.llm.generate(prompt, params.clone(seed=number))]
            assert outputs[-1].finished
            notes.append(looks)

    site.run(work())
    assert len(site.engine.requests) == 128 and notes[-1] == notes[0]
