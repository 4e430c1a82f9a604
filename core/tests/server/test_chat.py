"""Chat: the frame of a stream, usage, log probabilities, tools and their seam, odd clients."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from server_scripted import END, of_index

from rabbet.contracts.parsers import ParsedPiece, ReasoningParser, ToolCallPiece, ToolParser
from rabbet.server.parsing import Parsers
from rabbet.server.protocol import ChatCompletionRequest

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in of_index(chunks, index))


def test_answer_has_the_shape_that_clients_expect(site: Any) -> None:
    site.engine.script = lambda _request: [104, 105, END]
    answer = site.answer(PATH, {"messages": HELLO})
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hi"}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt = site.engine.requests[0].prompt_token_ids
    assert prompt[0] == 257 and prompt.count(257) == 1 and bytes(prompt[1:]) == b"[user]Hi[assistant]"
    assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23}


def test_stream_has_role_first_one_finish_reason_an_index_and_joins_to_the_whole(site: Any) -> None:
    body = {"messages": HELLO, "n": 3, "max_tokens": 8, "seed": 1}
    chunks = site.events(PATH, body)
    whole = site.answer(PATH, body)
    for index in range(3):
        mine = of_index(chunks, index)
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert content(chunks, index) == whole["choices"][index]["message"]["content"] == "abcdefgh"
    assert len({chunk["id"] for chunk in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"continuous_usage_stats": True}])
def test_no_usage_unless_it_is_asked_for(site: Any, options: Any) -> None:
    chunks = site.events(PATH, {"messages": HELLO, "max_tokens": 3, "stream_options": options})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_is_the_last_chunk_and_none_elsewhere(site: Any) -> None:
    chunks = site.events(PATH, {"messages": HELLO, "max_tokens": 3, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    assert not any(chunk.get("usage") for chunk in chunks[:-1])


def test_continuous_usage_counts_the_whole_prompt_from_the_first_chunk_on(site: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = site.events(PATH, {"messages": HELLO, "max_tokens": 3, "stream_options": options})
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [20] * len(chunks)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]


def test_the_operator_can_force_usage_and_cached_tokens(make_site: Any) -> None:
    site = make_site(enable_force_include_usage=True, enable_prompt_tokens_details=True)
    usage = site.events(PATH, {"messages": HELLO, "max_tokens": 1})[-1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert site.answer(PATH, {"messages": HELLO, "max_tokens": 1})["usage"] == usage


@pytest.mark.parametrize("count", [None, 0, 1, 5, 20])
def test_logprobs_hold_exactly_the_alternatives_asked_for(site: Any, count: int | None) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": count}
    entries = site.answer(PATH, body)["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"], e["bytes"]) for e in entries] == [("a", -0.5, [97]), ("b", -0.5, [98])]
    for entry in entries:
        values = [item["logprob"] for item in entry["top_logprobs"]]
        assert len(values) == (count or 0) and values == sorted(values, reverse=True)
        assert len({str(item) for item in entry["top_logprobs"]}) == len(values)
    streamed = [e for c in of_index(site.events(PATH, body), 0) if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == entries


def test_a_part_of_a_character_has_its_bytes(site: Any) -> None:
    pieces = [[0xE2, 0x82], [0xAC], [0x41, 0xE2], [0x82], [0xAC]]
    # Ids 258 and 260 are the pieces of two bytes.
    site.engine.script = lambda _request: [258, 0xAC, 260, 0x82, 0xAC]
    answer = site.answer(PATH, {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2})
    assert answer["choices"][0]["message"]["content"] == "\u20acA\u20ac"
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == pieces
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "\u20acA\u20ac"
    assert all(item["bytes"] for entry in entries for item in entry["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_last_message_first(site: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    body = {"messages": messages, "max_tokens": 2, "echo": True}
    text = content(site.events(PATH, body)) if stream else site.answer(PATH, body)["choices"][0]["message"]["content"]
    assert text == "ABab"


def test_a_huge_limit_is_lowered_to_the_room(site: Any) -> None:
    answer = site.answer(PATH, {"messages": HELLO, "max_tokens": 65535})
    assert answer["usage"]["total_tokens"] == 256
    assert site.answer(PATH, {"messages": HELLO, "max_completion_tokens": 2})["usage"]["completion_tokens"] == 2


def test_null_is_absent_for_every_field(site: Any) -> None:
    nulls = dict.fromkeys(ChatCompletionRequest.model_fields)
    assert site.answer(PATH, {**nulls, "messages": HELLO, "max_tokens": 2})["choices"][0]["message"]["content"] == "ab"
    for name in nulls.keys() - {"messages"}:
        assert site.post(PATH, {"messages": HELLO, "max_tokens": 1, name: None}).status_code == 200, name


def test_fields_of_real_clients_are_accepted(site: Any) -> None:
    body = {
        "messages": HELLO, "max_completion_tokens": 1, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": None,
        "modalities": ["text"], "reasoning_effort": {"effort": "low", "summary": "auto"}, "verbosity": "low", "prompt_cache_key": "k",
        "safety_identifier": "s", "user": 5, "parallel_tool_calls": True, "num_ctx": 4096, "response_format": {"type": "text"},
        "tools": TOOLS, "tool_choice": "none",
    }  # fmt: skip
    assert site.post(PATH, body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": TOOLS}, "tools", "tool_parser"), ({"tools": TOOLS, "tool_choice": "auto"}, "tools", "tool_parser"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "grammar"), ({"tools": []}, "tools", "empty"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice", "grammar"),
        ({"tool_choice": "auto"}, "tool_choice", "tools"), ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format", "grammar"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs", "grammar"), ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"), ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "negative"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "trust"), ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "exclude"), ({"messages": []}, "messages", "empty"),
        ({"messages": HELLO * 300}, "messages", "256"), ({"tools": TOOLS * 1025, "tool_choice": "none"}, "tools", "1024"), ({"reasoning_effort": {"effort": 3}}, "reasoning_effort", "text"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "256"), ({"messages": "x"}, "messages", "list"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"), ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "text"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(site: Any, fields: dict[str, Any], param: str, word: str) -> None:
    error = site.error(PATH, {"messages": HELLO, **fields})
    assert error["param"] == param and word in error["message"] and not site.engine.requests


class Calls(ToolParser):
    """``@name(arguments)`` is a call; text up to the closing bracket is held back."""

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(tokenizer, tools)
        self.held, self.count = "", 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        self.held += text
        content, calls = "", []
        while "@" in self.held and ")" in self.held:
            before, _, call = self.held.partition("@")
            name, _, arguments = call.partition("(")
            body, _, self.held = arguments.partition(")")
            content += before
            calls += [ToolCallPiece(index=self.count, name=name), ToolCallPiece(index=self.count, arguments=body)]
            self.count += 1
        if "@" not in self.held:
            content, self.held = content + self.held, ""
        return ParsedPiece(content=content, tool_calls=tuple(calls))

    def finish(self) -> ParsedPiece:
        return ParsedPiece(content=self.held)


class Thoughts(ReasoningParser):
    """Everything before ``|`` is thought."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.is_over = False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> ParsedPiece:
        if self.is_over:
            return ParsedPiece(content=text)
        thought, mark, rest = text.partition("|")
        self.is_over = bool(mark)
        return ParsedPiece(reasoning=thought, content=rest)

    def finish(self) -> ParsedPiece:
        return ParsedPiece()

    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        return self.is_over


@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (False, 1)])
def test_parsers_split_whole_and_streamed_answers_alike(site: Any, parallel: bool, count: int) -> None:
    site.state.parsers = Parsers(tools=Calls, reasoning=Thoughts, is_auto_allowed=True)
    site.engine.script = lambda _request: [*b"hm|ok@now({})@at({1})", END]
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": parallel}
    choice = site.answer(PATH, body)["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("ok", "hm", "hm")
    assert choice["finish_reason"] == "tool_calls"
    assert [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("function", "now", "{}"), ("function", "at", "{1}"),
    ][:count]  # fmt: skip
    chunks = site.events(PATH, body)
    deltas = [choice["delta"] for choice in of_index(chunks, 0)]
    assert content(chunks) == "ok" and "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index in range(count):
        mine = [call for call in calls if call["index"] == index]
        assert [("id" in call, "name" in call["function"]) for call in mine] == [(True, True), (False, False)]
        assert "".join(call["function"]["arguments"] for call in mine) == ["{}", "{1}"][index]
    assert len({call["index"] for call in calls}) == count
    assert of_index(chunks, 0)[-1]["finish_reason"] == "tool_calls"


def test_what_a_parser_holds_back_comes_out_at_the_end(site: Any) -> None:
    site.state.parsers = Parsers(tools=Calls, is_auto_allowed=True)
    site.engine.script = lambda _request: list(b"a@now(")
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 6}
    assert site.answer(PATH, body)["choices"][0]["message"]["content"] == "a@now("
    chunks = site.events(PATH, body)
    assert content(chunks) == "a@now(" and of_index(chunks, 0)[-1]["finish_reason"] == "length"
    plain = site.answer(PATH, {"messages": HELLO, "max_tokens": 6})["choices"][0]
    assert plain["message"]["content"] == "a@now("


def test_grammars_reach_the_engine_once_a_plugin_is_in_use(site: Any) -> None:
    site.state.has_grammar = True
    schema = {"type": "object"}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
    ):
        site.answer(PATH, {"messages": HELLO, "max_tokens": 1, **fields})
        assert site.engine.requests[-1].sampling.structured_outputs.json == schema
    site.answer(PATH, {"messages": HELLO, "max_tokens": 1, "response_format": {"type": "json_object"}})
    assert site.engine.requests[-1].sampling.structured_outputs.json_object is True
    assert site.error(PATH, {"messages": HELLO, "structured_outputs": {"what": 1}})["param"] == "structured_outputs"
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}}
    assert site.error(PATH, {"messages": HELLO, **both})["param"] == "response_format"


def test_templates_run_off_the_loop(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may be slow or hostile, and nobody else must wait for it."""
    threads: list[threading.Thread] = []
    render = site.llm.render_chat

    def noting(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args, **options)

    monkeypatch.setattr(site.llm, "render_chat", noting)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    site.answer("/v1/chat/completions", body)
    site.answer("/tokenize", {"messages": body["messages"]})
    assert len(threads) == 2 and threading.main_thread() not in threads
