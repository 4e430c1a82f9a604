"""Renders conversations with the model's chat template, in a sandbox that cannot change or reach anything.

Source: the template interface of transformers (names and functions that templates may use).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rabbet.errors import InvalidRequestError, shorten

__all__ = ["MAX_RENDERED_CHARS", "RENDER_LIMIT_S", "check_template", "normalise_messages", "render_chat"]

RENDER_LIMIT_S = 10.0
"""A template is a program of somebody else: it ends after that many seconds."""
MAX_RENDERED_CHARS = 32 << 20
"""Of a prompt, and of every text and list on the way to it."""

_ROLES = {"developer": "system"}
_RESERVED = ("messages", "tools", "add_generation_prompt", "documents", "chat_template", "tokenize")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation.

    Args:
        template: Jinja source.
        messages: As clients send them.
        special_tokens: ``bos_token`` and the like.
        tools: Tools that the model may call.
        add_generation_prompt: End with the start of an answer.
        continue_final_message: End inside the last message, so that the model goes on with it.
        variables: Further values for the template.

    Raises:
        InvalidRequestError: If messages are malformed or the template refuses them.
    """
    plain = normalise_messages(messages)
    given = {key: value for key, value in (variables or {}).items() if key not in _RESERVED}
    compiled = _compiled(template)
    try:
        _clock.ends_s = time.monotonic() + RENDER_LIMIT_S
        pieces = compiled.generate(
            messages=plain,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **{**special_tokens, **given},
        )
        text = _joined(pieces)
    except jinja2.TemplateError as error:
        message = f"the chat template refuses these messages: {error.message}"
        raise InvalidRequestError(message, field="messages") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequestError(
            f"the chat template cannot render these messages ({type(error).__name__})", field="messages"
        ) from error
    return _cut_after(text, plain) if continue_final_message else text


def check_template(template: str) -> None:
    """Compile a template.

    Raises:
        InvalidRequestError: If it is wrong, with the line where it is known.
    """
    _compiled(template)


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined, ``developer`` as ``system``, None as empty text.

    Raises:
        InvalidRequestError: Naming the message and the field.
    """
    if not messages:
        raise InvalidRequestError("messages is empty", field="messages")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"messages[{index}] is {shorten(message)}, no object", field="messages")
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(f"messages[{index}] has no role", field="messages")
        content = _text(message.get("content"), index)
        entry: dict[str, Any] = {"role": _ROLES.get(role, role), "content": content}
        for key in ("name", "tool_call_id"):
            if message.get(key) is not None:
                entry[key] = _checked_text(message[key], f"messages[{index}].{key}")
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list | tuple):
                raise InvalidRequestError(f"messages[{index}].tool_calls must be a list", field="messages")
            entry["tool_calls"] = [
                _tool_call(call, f"messages[{index}].tool_calls[{place}]")
                for place, call in enumerate(message["tool_calls"])
            ]
        for key in ("reasoning_content", "reasoning"):
            if message.get(key):
                entry["reasoning_content"] = _checked_text(message[key], f"messages[{index}].{key}")
        plain.append(entry)
    return plain


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"messages[{index}].content must be text or a list of parts", field="messages")
    pieces = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            pieces.append(part)
        elif isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
            key = "text" if part.get("text") is not None else "refusal"
            value = "" if part.get(key) is None else part[key]
            pieces.append(_checked_text(value, f"messages[{index}].content[{place}].{key}"))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"messages[{index}].content has a part of type {kind!r}; this model takes text only", field="messages"
            )
    return "".join(pieces)


def _checked_text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{place} is {shorten(value)}, but must be text", field="messages")
    return value


def _tool_call(call: Any, place: str) -> Any:
    """Templates expect arguments as an object; clients send them as JSON text."""
    if not isinstance(call, Mapping):
        raise InvalidRequestError(f"{place} is {shorten(call)}, but must be an object", field="messages")
    if not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(json.JSONDecodeError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _cut_after(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut what the template put behind the last message."""
    last = str(messages[-1]["content"]).rstrip()
    position = text.rfind(last)
    if not last or position < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message whose text the template keeps", field="continue_final_message"
        )
    return text[: position + len(last)]


class _GenerationMark(Extension):
    """``{% generation %}`` .. ``{% endgeneration %}`` marks what the model wrote, for training; no more here."""

    tags = {"generation"}  # noqa: RUF012  the attribute is jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_clock = threading.local()
"""When the rendering of this thread has to end."""


def _tick() -> None:
    if time.monotonic() > _clock.ends_s:
        raise jinja2.TemplateError(f"it takes longer than {RENDER_LIMIT_S:g} s")


def _joined(pieces: Iterable[Any]) -> str:
    made, size = [], 0
    for piece in pieces:
        made.append(str(piece))
        size += len(made[-1])
        _check_size(size)
        _tick()
    return "".join(made)


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise jinja2.TemplateError(f"it makes more than {MAX_RENDERED_CHARS} characters")


def _weight(value: Any) -> int:
    """Characters of a value as text, at least; what is in it twice counts twice."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, dict | list | tuple):
        return 1
    total = len(value)
    for item in (*value, *value.values()) if isinstance(value, dict) else value:
        total += _weight(item)
        _check_size(total)
    return total


_PADDED = ("center", "ljust", "rjust", "zfill", "batch", "slice")
_TEXT_MAKERS = ("format", "format_map", "join", "replace", "expandtabs", "indent", "string", "tojson", *_PADDED)
_NUMBER = re.compile("[0-9]+")


def _check_text(name: str, value: Any, *given: Any) -> None:
    """Refuse a call of a filter or of a text's method, by the least that it would make, before it is made."""
    if name not in _TEXT_MAKERS:
        return
    size, others = _weight(value), [_weight(item) for item in given]
    number = max((abs(item) for item in given if isinstance(item, int)), default=0)
    if name == "join":
        # As a filter the parts come first, as a method the separator.
        parts, separator = (given[0], value) if isinstance(value, str) and given else (value, given[0] if given else "")
        size = _weight(parts) + (len(parts) if hasattr(parts, "__len__") else 0) * _weight(separator)
    elif name == "replace" and len(given) > 1:
        size += str(value).count(str(given[0])) * others[1]
    elif name in ("expandtabs", "indent"):
        size += (str(value).count("\t" if name == "expandtabs" else "\n") + 1) * max(number, *others, 8)
    elif name in ("format", "format_map"):
        size += sum(int(digits[:12]) for digits in _NUMBER.findall(str(value)))
        size += (str(value).count("{") + str(value).count("%")) * max(others, default=0)
        # Widths that are values themselves: %*d and {:{width}}.
        size += size * number if "*" in str(value) or "{" in str(value) else 0
    elif name in _PADDED or name == "tojson":
        size += number * (size if name == "tojson" else 1)
    _check_size(size)


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes no text beyond the limit."""

    @functools.wraps(made)
    def bounded(*args: Any, **options: Any) -> Any:
        _check_text(name, *args[hasattr(made, "jinja_pass_arg") :], *options.values())
        return made(*args, **options)

    return bounded


class _Sandbox(ImmutableSandboxedEnvironment):
    """One whose templates end in time, and whose values have a bound where they can grow fast."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would be too large before it is made."""
        sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(0, right))
        if operator == "+" and None not in sizes:
            _check_size(sum(size or 0 for size in sizes))
        for size, times in zip(sizes, (right, left), strict=True):
            if operator == "*" and size is not None and isinstance(times, int):
                _check_size(size * times)
        if operator == "%" and isinstance(left, str):
            _check_text("format", left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, made: Any, *args: Any, **options: Any) -> Any:
        """Refuse methods of texts whose text would be too large."""
        method = getattr(made, "__wrapped__", made)
        if isinstance(owner := getattr(method, "__self__", None), str):
            _check_text(method.__name__, owner, *args, *options.values())
        return super().call(context, made, *args, **options)

    def tick(self) -> str:
        """Called wherever a template repeats something."""
        _tick()
        return ""

    def joined(self, *pieces: Any) -> str:
        """What ``~`` makes."""
        return _joined(pieces)


class _Bounds(NodeTransformer):
    """Puts the calls of ``_Sandbox`` into a template."""

    def visit_For(self, node: Any) -> Any:
        """A look at the clock for each turn of a loop, and each call of a macro."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [], node.lineno), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: Any) -> Any:
        """``~`` is no operator that a sandbox sees."""
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    @staticmethod
    def _call(name: str, values: list[Any], line: int) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None, lineno=line)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMark]
    )
    environment.filters["tojson"] = _tojson
    for name in _TEXT_MAKERS:
        if name in environment.filters:
            environment.filters[name] = _bounded(name, environment.filters[name])
    # Fillers and printers of any size, which no prompt needs.
    for table, names in ((environment.filters, ("pprint", "urlize", "xmlattr")), (environment.globals, ("lipsum",))):
        for name in names:
            table.pop(name, None)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(_Bounds().visit(environment.parse(template)))
    except jinja2.TemplateSyntaxError as error:
        message = f"the chat template is wrong at line {error.lineno}: {error.message}"
        raise InvalidRequestError(message, field="chat_template") from error
    except (SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
        # Of Python, which jinja2 compiles to: nested too deeply, or a number that is none.
        message = f"the chat template cannot be compiled ({type(error).__name__}: {error})"
        raise InvalidRequestError(message, field="chat_template") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
