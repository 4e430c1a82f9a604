"""Lists that are far too long are refused by a look at their text: before validation, before a million objects are made."""

from __future__ import annotations

import msgspec

from rabbet.errors import ContextLengthError, InvalidRequestError
from rabbet.server.state import ServerState

__all__ = ["MAX_TOOLS", "check_chat", "check_completion", "too_many_messages", "too_many_prompts", "too_many_tools"]

MAX_TOOLS = 1024
_items = msgspec.json.Decoder(list[msgspec.Raw])


def check_chat(fields: dict[str, msgspec.Raw], state: ServerState) -> None:
    """Refuse too many messages and tools.

    Raises:
        InvalidRequestError: With count and limit.
    """
    limit = state.engine().model_info.max_model_len
    count = _count(fields.get("messages"), limit)
    if count > limit:
        raise too_many_messages(count, limit)
    count = _count(fields.get("tools"), MAX_TOOLS)
    if count > MAX_TOOLS:
        raise too_many_tools(count)


def check_completion(fields: dict[str, msgspec.Raw], state: ServerState) -> None:
    """Refuse too many prompts, and token ids that cannot fit and are not to be truncated.

    Raises:
        InvalidRequestError: With count and limit.
    """
    text = _list_text(fields.get("prompt"))
    if text is None:
        return
    if text[1:].lstrip()[:1].isdigit():
        limit, count = state.engine().model_info.max_model_len, text.count(b",") + 1
        # Without texts and lists inside, each comma stands between two ids.
        if count > limit and not (b'"' in text or b"[" in text[1:] or "truncate_prompt_tokens" in fields):
            raise ContextLengthError(
                f"the prompt has {count} tokens, but the context is {limit} tokens long and needs room for at least one "
                "output token; shorten the prompt",
                field="prompt",
                value=count,
            )
        return
    limit = state.config.max_prompts
    count = _count(fields.get("prompt"), limit)
    if count > limit:
        raise too_many_prompts(count, limit)


def _list_text(raw: msgspec.Raw | None) -> bytes | None:
    """The text of a list; None for anything else."""
    text = bytes(raw).strip() if raw is not None else b""
    return text if text.startswith(b"[") else None


def _count(raw: msgspec.Raw | None, limit: int) -> int:
    """Items of a list; 0 where there are few, or where it is none."""
    text = _list_text(raw)
    if text is None or text.count(b",") < limit:
        return 0
    if b'"' not in text and text[1:].lstrip()[:1] == b"[":
        # Without texts each bracket opens a list. Lists in the inner ones are counted too: they would be refused anyway.
        return text.count(b"[") - 1
    return len(_items.decode(text))


def too_many_messages(count: int, limit: int) -> InvalidRequestError:
    """The error for a conversation with more messages than the context has tokens."""
    text = f"messages holds {count} messages, more than the {limit} tokens of the context; shorten the conversation"
    return InvalidRequestError(text, field="messages", value=count)


def too_many_tools(count: int) -> InvalidRequestError:
    """The error for a list of tools that is too long."""
    return InvalidRequestError(f"tools holds {count} tools, the limit is {MAX_TOOLS}", field="tools", value=count)


def too_many_prompts(count: int, limit: int) -> InvalidRequestError:
    """The error for more prompts than one request may hold."""
    text = f"prompt holds {count} prompts, the limit is {limit} (--max-prompts)"
    return InvalidRequestError(text, field="prompt", value=count)
