"""Conversations as clients send them become the prompt that the template writes."""

from __future__ import annotations

from typing import Any

import pytest

from rabbet.errors import InvalidRequestError
from rabbet.front import chat
from rabbet.front.chat import normalise_messages, render_chat
from rabbet.front.tokenizer import Tokenizer


def render(tokenizer: Tokenizer, messages: Any, **options: Any) -> str:
    template = options.pop("template", tokenizer.chat_template)
    return render_chat(template, messages, special_tokens=tokenizer.special_tokens, **options)


def test_the_template_writes_the_prompt(byte_level: Tokenizer) -> None:
    text = render(byte_level, [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}])
    assert text == "<start>[user]A[assistant]B<end>[assistant]"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "x"}, "[system]x"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "[user]ab"),
        ({"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}, "[user]ab"),
        ({"role": "user", "content": []}, "[user]"),
        ({"role": "assistant", "content": ""}, "[assistant]<end>"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}, "[assistant]<end>"),
        ({"role": "assistant"}, "[assistant]<end>"),
        ({"role": "user", "content": "x", "id": "1", "refusal": None, "annotations": [], "audio": None}, "[user]x"),
    ],
)
def test_what_clients_send_is_taken(byte_level: Tokenizer, message: dict[str, Any], expected: str) -> None:
    assert render(byte_level, [message], add_generation_prompt=False) == "<start>" + expected


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "empty"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([{"content": "x"}], "no role"),
        ([{"role": 5, "content": "x"}], "no role"),
        ([{"role": "user", "content": 5}], "must be text or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": [7]}], "int"),
        ([{"role": "assistant", "tool_calls": 5}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [{}, 5]}], r"messages\[0\]\.tool_calls\[1\] is 5"),
        ([{"role": "user", "content": [{"type": "text", "text": {}}]}], r"messages\[0\]\.content\[0\]\.text is {}"),
        ([{"role": "user", "content": [{"type": "text", "text": 0}]}], r"messages\[0\]\.content\[0\]\.text is 0"),
        (
            [{"role": "user", "content": ["a", {"type": "text", "text": ["b"]}]}],
            r"messages\[0\]\.content\[1\]\.text is \['b",
        ),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]}], r"\.content\[0\]\.refusal is 1"),
        ([{"role": "user", "content": "x", "name": {"a": 1}}], r"messages\[0\]\.name is {'a': 1}"),
        ([{"role": "tool", "content": "x", "tool_call_id": 7}], r"messages\[0\]\.tool_call_id is 7"),
        ([{"role": "assistant", "content": "x", "reasoning": [1]}], r"messages\[0\]\.reasoning is \[1\]"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 3}], r"messages\[0\]\.reasoning_content is 3"),
    ],
)
def test_what_is_no_message_is_refused(byte_level: Tokenizer, messages: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        render(byte_level, messages)
    assert caught.value.field == "messages"


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    (message,) = normalise_messages([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{bad"}}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "{bad"


def test_a_chat_prompt_has_one_start_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(render(byte_level, [{"role": "user", "content": "A"}]), add_special_tokens=False)
    assert ids.count(257) == 1 and ids[0] == 257


def test_the_last_message_can_be_continued(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "So "}]
    assert render(byte_level, messages, continue_final_message=True) == "<start>[user]A[assistant]So"
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        render(byte_level, [{"role": "assistant", "content": ""}], continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
        "{{ cycler.__init__.__globals__.os.system('touch /tmp/x') }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_the_requests_error(byte_level: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        render(byte_level, [{"role": "user", "content": "A"}], template=template)


def test_a_broken_template_names_its_line(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="line 2"):
        render(byte_level, [{"role": "user", "content": "A"}], template="a\n{% if %}")


def test_variables_reach_the_template_but_not_its_messages(byte_level: Tokenizer) -> None:
    variables = {"enable_thinking": False, "messages": [], "add_generation_prompt": True}
    text = render(
        byte_level,
        [{"role": "user", "content": "A"}],
        template="{{ enable_thinking }}{{ messages|length }}{{ add_generation_prompt }}{{ {'k': '\u00e9<'}|tojson }}",
        variables=variables,
        add_generation_prompt=False,
    )
    assert text == 'False1False{"k": "\u00e9<"}'


GROWS = "{% set n = namespace(t='ab') %}{% for i in range(90) %}{% set n.t = n.t OP n.t %}{% endfor %}{{ n.t }}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.05 s"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "longer than 0.05 s"),
        ("{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% for j in range(999) %}{% call m() %}{% endcall %}"
         "{% endfor %}{% endfor %}", "longer than 0.05 s"),
        ("{% for a in range(99) %}{{ 'x' * 999 }}{% endfor %}", "more than 10000 characters"),
        ("{{ 'a' * 10 ** 9 }}", "more than 10000 characters"),
        ("{{ 10 ** 9 * [1] }}", "more than 10000 characters"),
        ("{{ 10 ** 10 ** 10 ** 10 ** 10 }}", "more than 10000 characters"),
        (GROWS.replace("OP", "+"), "more than 10000 characters"),
        (GROWS.replace("OP", "~"), "more than 10000 characters"),
        *[
            ("{% set big = 'a\n\t' * 3000 %}{{ " + code + " }}", "more than 10000 characters")
            for code in (
                "'a'|center(10 ** 10)", "'a'.center(10 ** 10)", "'a'.ljust(10 ** 10)", "'a'.zfill(10 ** 10)", "big.expandtabs(10 ** 9)",
                "big|indent(10 ** 9)", "big|indent(width=10 ** 9)", "big|replace('a', big)", "big.replace('a', big)", "'%010000000000d' % 1",
                "'%*d' % (10 ** 10, 1)", "'{:10000000000}'.format(1)", "'{:{}}'.format(1, 10 ** 10)", "'{0}{0}'.format(big)",
                "'%s%s'|format(big, big)", "[big, big]|join", "'x'.join([big, big])", "([1] * 5000)|join(big)", "[big, big]|string",
                "{'a': [big, big]}|tojson", "[[1]]|tojson(indent=10 ** 9)", "[1]|batch(10 ** 9, 0)|list", "[1]|slice(10 ** 9)|list",
            )
        ],
        ("{{ range(10 ** 12)|list }}", "OverflowError"),
        ("{{ lipsum(10 ** 9) }}", "lipsum"),
    ],
)  # fmt: skip
def test_a_template_has_limits_of_time_and_size(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str, text: str
) -> None:
    monkeypatch.setattr(chat, "RENDER_LIMIT_S", 0.05)
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 10_000)
    with pytest.raises(InvalidRequestError, match=text) as caught:
        render(byte_level, [{"role": "user", "content": "A"}], template=template)
    assert caught.value.field == "messages"


def test_operators_of_templates_do_what_they_do_elsewhere(byte_level: Tokenizer) -> None:
    template = "{{ 'a'|center(3) }}{{ ['a', 1]|join('-') }}{{ 'a b'.replace(' ', '') }}{{ 'x\ny'|indent(1) }}{{ '%s=%d' % ('a', 7) }}{{ '{:>3}'.format(1) }}"
    template += "{{ [1]|tojson }}{{ 'aa'|replace('a', 'b') }}{{ '%s'|format(2) }}{{ 7 % 4 }}{{ [1, 2]|batch(1)|list }}"
    template += "{{ 2 * 3 }}{{ 'a' * 2 }}{{ 2 ** 3 }}{{ 'a' + 'b' }}{{ 1 + 2 }}{{ 'x' ~ 1 ~ none ~ undefined_name }}{{ [1] + [2] }}{{ 1.5 * 2 }}"
    assert (
        render(byte_level, [{"role": "user", "content": "A"}], template=template)
        == " a a-1abx\n ya=7  1[1]bb23[[1], [2]]6aa8ab3x1None[1, 2]3.0"
    )
