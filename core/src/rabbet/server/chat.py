"""``POST /v1/chat/completions``: a conversation in, the next message out, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rabbet.errors import InvalidRequestError, shorten
from rabbet.front.async_llm import AsyncLLM
from rabbet.front.chat import normalise_messages
from rabbet.front.outputs import CompletionOutput, RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.server.body import read_body
from rabbet.server.call import Call, truncated
from rabbet.server.early import MAX_TOOLS, check_chat, too_many_messages, too_many_tools
from rabbet.server.errors import json_response
from rabbet.server.logprobs import chat_logprobs, prompt_logprobs
from rabbet.server.parsing import Message, TextParser
from rabbet.server.protocol import ChatCompletionRequest, TokenizeRequest
from rabbet.server.sampling import chat_sampling, check_entries
from rabbet.server.state import ServerState
from rabbet.server.stream import DONE, EventStream, until_disconnect

__all__ = ["chat_prompt", "create_chat_completion"]

_ChatCall = Call[ChatCompletionRequest]


async def create_chat_completion(request: Request, state: ServerState) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatCompletionRequest, state, early=check_chat)
    call = await _prepare(body, state)
    if body.stream:
        return EventStream(_stream(call), keep_alive_s=state.config.sse_keep_alive_interval_s)
    answer = await until_disconnect(request, _whole(call))
    return Response(status_code=499) if answer is None else json_response(answer)


async def _prepare(body: ChatCompletionRequest, state: ServerState) -> _ChatCall:
    llm = state.engine()
    model = state.check_model(body.model)
    state.parsers.check(body)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    salt = llm.processor.check_salt(body.cache_salt)
    sampling = chat_sampling(body, llm.sampling_defaults, state)
    check_entries(sampling, sampling.n)
    # In a thread however short: the time that a template takes is its author's to choose.
    tokens = await asyncio.to_thread(chat_prompt, body, state, llm)
    room = llm.model_info.max_model_len - 1
    tokens = truncated(tokens, body, room)
    prompt = TokenizedPrompt(tokens.text, tokens.token_ids, salt)
    try:
        llm.check(prompt, sampling, clamp_max_tokens=True)
    except InvalidRequestError as error:
        if error.field == "logprobs":
            # Chat's own name for the number of alternatives.
            raise InvalidRequestError(f"top_{error}", field="top_logprobs", value=error.value) from None
        if error.field == "prompt":
            error.field = "messages"
        raise
    return Call(
        body=body,
        state=state,
        model=model,
        prompts=[prompt],
        sampling=[sampling],
        completion_id=state.new_id("chatcmpl"),
        clamp_max_tokens=True,
    )


def chat_prompt(body: ChatCompletionRequest | TokenizeRequest, state: ServerState, llm: AsyncLLM) -> TokenizedPrompt:
    """The tokens of a conversation; a template writes its own special tokens, so none are added unless asked for.

    Raises:
        InvalidRequestError: If the messages, the template or its values cannot be used.
    """
    messages = body.messages or []
    if len(messages) > llm.model_info.max_model_len:
        raise too_many_messages(len(messages), llm.model_info.max_model_len)
    if body.tools is not None and len(body.tools) > MAX_TOOLS:
        raise too_many_tools(len(body.tools))
    if body.chat_template is not None and not state.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template in a request is refused unless the server runs with --trust-request-chat-template",
            field="chat_template",
        )
    if body.continue_final_message and body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other", field="continue_final_message"
        )
    text = llm.render_chat(
        messages,
        tools=body.tools,
        chat_template=body.chat_template,
        variables=_variables(body, state),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    try:
        return llm.processor.tokenize(text, add_special_tokens=bool(body.add_special_tokens))
    except InvalidRequestError as error:
        if error.field == "prompt":
            error.field = "messages"
        raise


def _variables(body: ChatCompletionRequest | TokenizeRequest, state: ServerState) -> dict[str, Any]:
    """Values for the template: the server's, over them the request's."""
    values = {**state.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    for name in ("chat_template", "tokenize"):
        if name in values:
            raise InvalidRequestError(f"chat_template_kwargs may not hold {name}", field="chat_template_kwargs")
    effort = body.reasoning_effort if isinstance(body, ChatCompletionRequest) else None
    if isinstance(effort, dict):
        effort = effort.get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequestError(
                f"reasoning_effort is {shorten(effort)}, but must be text", field="reasoning_effort", value=effort
            )
        values.setdefault("reasoning_effort", effort)
    return values


def _echoed(body: ChatCompletionRequest) -> str:
    """With ``echo``, an answer begins with the text of the last message."""
    return str(normalise_messages(body.messages[-1:])[0]["content"]) if body.echo else ""


async def _whole(call: _ChatCall) -> dict[str, Any]:
    final: RequestOutput | None = None
    async with aclosing(call.outputs()) as outputs:
        async for output in outputs:
            final = output
    assert final is not None, "a request ends with an output"
    answer = call.envelope("chat.completion")
    answer["choices"] = [_choice(call, output) for output in final.outputs]
    answer["usage"] = call.usage(sum(len(o.token_ids) for o in final.outputs), final.num_cached_tokens)
    if final.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(final.prompt_logprobs)
    if call.body.return_token_ids:
        answer["prompt_token_ids"] = call.prompts[0].token_ids
    return answer


def _choice(call: _ChatCall, output: CompletionOutput) -> dict[str, Any]:
    parser = call.state.parsers.make(call.body, call.tokenizer)
    message = Message(call.state.config.response_role)
    message.add(parser.feed(output.text, output.token_ids))
    message.add(parser.finish())
    choice: dict[str, Any] = {
        "index": output.index,
        "message": message.whole(_echoed(call.body)),
        "logprobs": _logprobs(call, output),
        "finish_reason": _reason(output, parser),
        "stop_reason": output.stop_reason,
    }
    if call.body.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


def _reason(output: CompletionOutput, parser: TextParser) -> str | None:
    return "tool_calls" if output.finish_reason == "stop" and parser.has_calls else output.finish_reason


def _logprobs(call: _ChatCall, output: CompletionOutput) -> dict[str, Any] | None:
    if not call.body.logprobs or output.logprobs is None:
        return None
    return chat_logprobs(
        output.token_ids,
        output.logprobs,
        count=call.body.top_logprobs or 0,
        as_ids=call.as_ids,
        tokenizer=call.tokenizer,
    )


async def _stream(call: _ChatCall) -> AsyncGenerator[bytes, None]:
    writer = call.writer("chat.completion.chunk")
    streams = [_ChoiceStream(call, index) for index in range(call.body.n)]
    num_output = cached = 0
    is_first = True
    async with aclosing(call.outputs()) as outputs:
        async for output in outputs:
            cached = max(cached, output.num_cached_tokens)
            if is_first:
                is_first = False
                for stream in streams:
                    yield writer.chunk([stream.first()], call.usage(0, cached) if call.is_continuous else None)
            for item in output.outputs:
                num_output += len(item.token_ids)
                choice = streams[item.index].chunk(item)
                if choice is not None:
                    yield writer.chunk([choice], call.usage(num_output, cached) if call.is_continuous else None)
    if call.wants_usage:
        yield writer.chunk([], call.usage(num_output, cached))
    yield DONE


class _ChoiceStream:
    """The chunks of one output."""

    def __init__(self, call: _ChatCall, index: int) -> None:
        self._call = call
        self._index = index
        self._parser = call.state.parsers.make(call.body, call.tokenizer)
        self._message = Message(call.state.config.response_role)
        self._is_first = True

    def first(self) -> dict[str, Any]:
        """The chunk with the role."""
        delta = {"role": self._call.state.config.response_role, "content": _echoed(self._call.body)}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, item: CompletionOutput) -> dict[str, Any] | None:
        """The chunk of some news, or None if there is nothing to say of it yet."""
        piece = self._parser.feed(item.text, item.token_ids) if item.text else None
        delta = self._message.delta(piece) if piece is not None else {}
        if item.finish_reason is not None:
            _append(delta, self._message.delta(self._parser.finish()))
        logprobs = _logprobs(self._call, item)
        wants_ids = self._call.body.return_token_ids
        if not delta and item.finish_reason is None and logprobs is None and not wants_ids:
            return None
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _reason(item, self._parser) if item.finish_reason is not None else None,
        }
        if item.finish_reason is not None:
            choice["stop_reason"] = item.stop_reason
        if wants_ids:
            choice["token_ids"] = item.token_ids
            if self._is_first:
                choice["prompt_token_ids"] = self._call.prompts[0].token_ids
        self._is_first = False
        return choice


def _append(delta: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        delta[key] = delta[key] + value if key in delta else value
