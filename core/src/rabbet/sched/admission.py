"""Refuses requests that can never be served, with the number that could be."""

from __future__ import annotations

from rabbet.contracts.scheduler import SchedulerContext
from rabbet.errors import ContextLengthError, InvalidRequestError
from rabbet.kv.groups import longest_context
from rabbet.types.request import EngineRequest

__all__ = ["check_request", "longest_request", "unseen_tokens"]


def unseen_tokens(context: SchedulerContext) -> int:
    """Tokens of one request that may be planned before a result is taken in: a step's, or two steps' when async."""
    return context.max_num_batched_tokens * (2 if context.is_async else 1)


def longest_request(context: SchedulerContext) -> int:
    """Most tokens, prompt and output, of one request: the context, or what the whole pool holds if that is less.

    A request ends with ``LENGTH`` there. Without this limit one that outgrows the pool would be preempted and computed
    anew for ever.
    """
    cache = context.cache
    return longest_context(cache.groups, cache.num_blocks, context.max_model_len, unseen_tokens(context))


def check_request(request: EngineRequest, context: SchedulerContext, max_len: int) -> None:
    """Refuse what can never be served.

    Args:
        request: The request.
        context: The scheduler's limits.
        max_len: ``longest_request`` of them.

    Raises:
        InvalidRequestError: Naming the count and the limit; ``ContextLengthError`` if it is the context's.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt < 1:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", field="prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {request.max_tokens}, but must be at least 1", field="max_tokens", value=request.max_tokens
        )
    if num_prompt >= context.max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but the context holds {context.max_model_len}, output included; "
            f"at most {context.max_model_len - 1} fit",
            field="prompt",
            value=num_prompt,
        )
    if num_prompt >= max_len:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens, but the KV cache of {context.cache.num_blocks - 1} blocks holds "
            f"{max_len} of one request, output included; at most {max(0, max_len - 1)} fit",
            field="prompt",
            value=num_prompt,
        )
    if not context.is_chunked_prefill and num_prompt > context.max_num_batched_tokens:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens, but a step computes {context.max_num_batched_tokens} and chunked "
            f"prefill is off; at most {context.max_num_batched_tokens} fit",
            field="prompt",
            value=num_prompt,
        )
