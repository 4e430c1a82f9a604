"""Completions: forms of prompts, echo, log probabilities, streams that join to the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from server_scripted import of_index

PATH = "/v1/completions"


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for choice in of_index(chunks, index))


def test_answer_has_the_shape_that_clients_expect(site: Any) -> None:
    answer = site.answer(PATH, {"model": "other", "prompt": "Hi", "max_tokens": 3})
    assert answer["object"] == "text_completion" and answer["model"] == "other" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_max_tokens_is_16_by_default_and_null_is_the_default(site: Any) -> None:
    for body in ({"prompt": "x"}, {"prompt": "x", "max_tokens": None}):
        assert site.answer(PATH, body)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_with_many_outputs_are_numbered_prompt_by_prompt(site: Any, stream: bool) -> None:
    site.engine.script = lambda request: [request.prompt_token_ids[-1], 33]
    body = {"prompt": ["x", "y", "z"], "n": 2, "max_tokens": 2}
    if stream:
        chunks = site.events(PATH, {**body, "stream_options": {"include_usage": True}})
        texts = [joined(chunks, index) for index in range(6)]
        usage = chunks[-1]["usage"]
        assert all(
            [c["finish_reason"] for c in of_index(chunks, i)].count("length") == 1
            and of_index(chunks, i)[-1]["finish_reason"] == "length"
            for i in range(6)
        )
    else:
        answer = site.answer(PATH, body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
    assert texts == ["x!", "x!", "y!", "y!", "z!", "z!"]
    assert usage == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}


def test_every_output_of_every_prompt_has_its_own_seed_and_a_second_call_the_same(site: Any) -> None:
    body = {"prompt": ["x", "x"], "n": 2, "seed": 7, "max_tokens": 1}
    for _ in range(2):
        site.answer(PATH, body)
    seeds = [request.sampling.seed for request in site.engine.requests]
    assert len(set(seeds[:4])) == 4 and 7 in seeds and sorted(seeds[:4]) == sorted(seeds[4:])
    assert site.post(PATH, {**body, "seed": 2**63 - 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_covers_prompt_and_output(site: Any, stream: bool, max_tokens: int) -> None:
    body = {"prompt": "Yes", "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    if stream:
        chunks = site.events(PATH, {**body, "stream_options": {"include_usage": True}})
        parts = [choice["logprobs"] for choice in of_index(chunks, 0) if choice["logprobs"]]
        logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]}
        text, usage, reason = joined(chunks), chunks[-1]["usage"], of_index(chunks, 0)[-1]["finish_reason"]
    else:
        answer = site.answer(PATH, body)
        choice = answer["choices"][0]
        logprobs, text, usage = choice["logprobs"], choice["text"], answer["usage"]
        reason = choice["finish_reason"]
    assert text == "Yes" + "ab"[:max_tokens] and reason == "length"
    assert usage["completion_tokens"] == max_tokens and usage["prompt_tokens"] == 4
    assert logprobs["tokens"] == ["<start>", "Y", "e", "s", *"ab"[:max_tokens]]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (3 + max_tokens)
    assert logprobs["top_logprobs"][0] is None and list(logprobs["top_logprobs"][1]) == ["Z", "Y"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4][: 4 + max_tokens], "the start token is not in the text"


def _logprobs(site: Any, body: dict[str, Any], stream: bool) -> tuple[str, list[str], list[int]]:
    """Text, tokens and offsets."""
    if not stream:
        choice = site.answer(PATH, body)["choices"][0]
        return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    chunks = site.events(PATH, body)
    parts = [choice["logprobs"] for choice in of_index(chunks, 0) if choice["logprobs"]]
    tokens, offsets = ([item for part in parts for item in part[key]] for key in ("tokens", "text_offset"))
    return joined(chunks), tokens, offsets


# Ids of the tokenizer of pieces: the mark of a space alone, " Hello", " world", "a", "b", and bytes from 3 on.
SPACE, HELLO, WORLD, A, B, START = 259, 260, 261, 262, 263, 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_characters_of_the_returned_text_with_a_tokenizer_of_pieces(
    fallback_site: Any, stream: bool, echo: bool
) -> None:
    """A text loses the space of its first token, and bytes of one character begin where the character does."""
    euro = [3 + byte for byte in "\u20ac".encode()]
    fallback_site.engine.script = lambda _: [WORLD, *euro, A, SPACE, HELLO]
    output = " world\u20aca  Hello"
    output_offsets = [0, 6, 6, 6, 7, 8, 9]
    for prompt, ids, prompt_text, prompt_offsets in (
        ([HELLO, A], [HELLO, A], "Helloa", [0, 5]),
        ([START, HELLO, A], [START, HELLO, A], "<start> Helloa", [0, 7, 13]),
        ("Hello\u20ac", None, "Hello\u20ac", None),
    ):
        body = {"prompt": prompt, "max_tokens": 7, "logprobs": 0, "echo": echo}
        text, tokens, offsets = _logprobs(fallback_site, body, stream)
        start = len(prompt_text) if echo else 0
        assert text == (prompt_text if echo else "") + output
        assert offsets[-7:] == [start + offset for offset in output_offsets]
        assert len(offsets) == len(tokens) == (len(ids or range(len(tokens) - 7)) if echo else 0) + 7
        if echo and prompt_offsets is not None:
            assert offsets[:-7] == prompt_offsets
        if echo and ids is None:
            places = dict(zip(offsets[:-7], tokens[:-7], strict=True))
            assert sorted(set(offsets[:-7])) == offsets[:-7][:1] + [place for place in sorted(places) if place > 0]
            assert max(places) == 5, "the bytes of the last character"


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_skip_what_is_not_shown(site: Any, stream: bool) -> None:
    site.engine.script = lambda _: [97, 257, 98, 256]
    text, tokens, offsets = _logprobs(site, {"prompt": "x", "max_tokens": 9, "logprobs": 0}, stream)
    assert (text, tokens, offsets) == ("ab", ["a", "<start>", "b", "<end>"], [0, 1, 1, 2])
    body = {"prompt": "x", "max_tokens": 9, "logprobs": 0, "skip_special_tokens": False}
    assert _logprobs(site, body, stream)[0::2] == ("a<start>b", [0, 1, 8, 9])


def test_no_offset_lies_beyond_what_a_stop_string_leaves(site: Any) -> None:
    body = {"prompt": "x", "max_tokens": 9, "logprobs": 0, "stop": ["bcd"], "echo": True}
    assert _logprobs(site, body, False) == ("xa", ["<start>", "x", "a", "b", "c", "d"], [0, 0, 1, 2, 2, 2])


def test_echo_waits_for_the_prompts_logprobs_of_the_first_output(site: Any) -> None:
    """The second output may have a token before the first one, which alone brings the prompt's log probabilities."""
    gate = asyncio.Event()

    def script(request: Any) -> Iterator[Any]:
        if request.sampling.prompt_logprobs is not None:
            yield from (gate, 97, 98)
            return
        yield 99
        gate.set()
        yield 100

    site.engine.script = script
    chunks = site.events(PATH, {"prompt": "P", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 2})
    for index in range(2):
        first = of_index(chunks, index)[0]
        assert first["text"] == "P" and len(first["logprobs"]["tokens"]) == 2
    assert (joined(chunks, 0), joined(chunks, 1)) == ("Pab", "Pcd")


def test_echo_differs_by_exactly_the_prompt(site: Any) -> None:
    for prompt in ("Hello", [72, 105, 0xE2]):
        body = {"prompt": prompt, "max_tokens": 4}
        plain = site.answer(PATH, body)["choices"][0]["text"]
        echoed = site.answer(PATH, {**body, "echo": True})["choices"][0]["text"]
        assert echoed.endswith(plain) and echoed.removesuffix(plain) == ("Hello" if prompt == "Hello" else "Hi\ufffd")
        assert joined(site.events(PATH, {**body, "echo": True})) == echoed
        assert joined(site.events(PATH, body)) == plain


def test_logprobs_are_sorted_exact_and_told_apart_where_tokens_read_the_same(site: Any) -> None:
    site.engine.script = lambda _request: [0xF0]
    choice = site.answer(PATH, {"prompt": "x", "max_tokens": 1, "logprobs": 3})["choices"][0]
    top = choice["logprobs"]["top_logprobs"][0]
    assert list(top.values()) == sorted(top.values(), reverse=True) and len(top) == 3
    assert sum(key.startswith("token_id:") for key in top) == 2
    none = site.answer(PATH, {"prompt": "x", "max_tokens": 1, "logprobs": 0})["choices"][0]["logprobs"]
    assert len(none["top_logprobs"][0]) == 1 and none["token_logprobs"] == [-0.5]
    ids = site.answer(PATH, {"prompt": "x", "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True})
    assert ids["choices"][0]["logprobs"]["tokens"] == ["token_id:240"]


@pytest.mark.parametrize("stop", ["cde", ["zz", "cde", "def"], "c"])
def test_stop_strings_leave_no_trace_in_a_stream(site: Any, stop: Any) -> None:
    body = {"prompt": "x", "max_tokens": 20, "stop": stop}
    choice = site.answer(PATH, body)["choices"][0]
    chunks = site.events(PATH, body)
    assert choice["text"] == joined(chunks) == "ab"
    last = of_index(chunks, 0)[-1]
    assert (choice["finish_reason"], choice["stop_reason"]) == (last["finish_reason"], last["stop_reason"])
    assert choice["stop_reason"] in ("cde", "c")
    kept = site.answer(PATH, {**body, "include_stop_str_in_output": True})["choices"][0]["text"]
    assert kept == "ab" + choice["stop_reason"]


def test_token_ids_come_through_although_text_is_held_back(site: Any) -> None:
    euro = list("\u20ac".encode())
    site.engine.script = lambda _request: [*euro, 97]
    body = {"prompt": [65, 66], "max_tokens": 4, "return_token_ids": True}
    choice = site.answer(PATH, body)["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["text"]) == ([*euro, 97], [65, 66], "\u20aca")
    chunks = site.events(PATH, body)
    assert [token for choice in of_index(chunks, 0) for token in choice["token_ids"]] == [*euro, 97]
    assert joined(chunks) == "\u20aca" and of_index(chunks, 0)[0]["prompt_token_ids"] == [65, 66]


def test_no_empty_chunks_and_no_replacement_characters(site: Any) -> None:
    site.engine.script = lambda _request: [*"\u65e5\u672c".encode(), 97]
    chunks = site.events(PATH, {"prompt": "x", "max_tokens": 7})
    assert [choice["text"] for choice in of_index(chunks, 0)] == ["\u65e5", "\u672c", "a"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, [5, 6, 7, 8]), ({"truncate_prompt_tokens": 2}, [7, 8]), ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
     ({"truncate_prompt_tokens": -1}, [5, 6, 7, 8]), ({"truncate_prompt_tokens": 9}, [5, 6, 7, 8])],
)  # fmt: skip
def test_prompts_can_be_truncated(site: Any, fields: dict[str, Any], expected: list[int]) -> None:
    site.answer(PATH, {"prompt": [5, 6, 7, 8], "max_tokens": 1, **fields})
    assert site.engine.requests[-1].prompt_token_ids == expected


def test_minus_one_truncates_to_what_fits(site: Any) -> None:
    site.answer(PATH, {"prompt": [5] * 400, "max_tokens": 6, "truncate_prompt_tokens": -1})
    assert len(site.engine.requests[-1].prompt_token_ids) == 250
    assert site.error(PATH, {"prompt": "x", "truncate_prompt_tokens": 0})["param"] == "truncate_prompt_tokens"
    assert site.error(PATH, {"prompt": "x", "truncate_prompt_tokens": 300})["code"] == "context_length_exceeded"


def test_old_and_unknown_fields_are_ignored_and_counted(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "max_tokens": 1, "best_of": 5, "user": "me", "guided_json": {}, "bad\nname": 1}
    for _ in range(2):
        assert site.post(PATH, body).status_code == 200
    assert site.state.stats.unknown_fields == 4
    warnings = [record.getMessage() for record in caplog.records if "is not known" in record.getMessage()]
    assert len(warnings) == 2 and not any("\n" in text for text in warnings)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"suffix": "x"}, "suffix"), ({"max_tokens": 0}, "max_tokens"), ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
     ({"prompt": ["a", [1]]}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [[]]}, "prompt"),
     ({"prompt": ["x"] * 1025}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": [1.5]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
     ({"request_id": "a\nb"}, "request_id"), ({"request_id": "x" * 129}, "request_id"), ({"stream_options": {"include_usage": True}}, "stream_options"),
     ({"stream": True, "stream_options": 5}, "stream_options"), ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
     ({"response_format": {"type": "json_object"}}, "response_format"), ({"response_format": {"type": "x"}}, "response_format"),
     ({"structured_outputs": {"regex": "a"}}, "structured_outputs"), ({"n": 10**9}, "n"), ({"n": 2, "temperature": 0}, "n"),
     ({"prompt_embeds": "AAAA"}, "prompt_embeds")],
    ids=str,
)  # fmt: skip
def test_wrong_fields_are_refused_by_name_before_anything_runs(site: Any, fields: dict[str, Any], param: str) -> None:
    error = site.error(PATH, {"prompt": "x", **fields})
    assert (error["type"], site.engine.requests) == ("invalid_request_error", [])
    assert error["param"] == param and param in error["message"]


def test_an_empty_suffix_is_none(site: Any) -> None:
    assert site.post(PATH, {"prompt": "x", "suffix": "", "max_tokens": 1}).status_code == 200


def test_context_overflow_names_limit_prompt_and_request(site: Any) -> None:
    error = site.error(PATH, {"prompt": [5] * 8, "max_tokens": 250})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert all(number in error["message"] for number in ("250", "8 tokens", "256", "248"))


def test_long_texts_are_tokenised_beside_the_loop_with_the_same_result(make_site: Any) -> None:
    site = make_site(max_body_bytes=1 << 20)
    error = site.error(PATH, {"prompt": "y" * 40_000})
    assert error["code"] == "context_length_exceeded"
