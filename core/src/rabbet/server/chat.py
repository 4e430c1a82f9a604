"""``POST /v1/chat/completions``: a conversation in, the next message out, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rabbet.errors import InvalidRequestError
from rabbet.front.outputs import CompletionOutput, Logprob, RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.server.body import read_body
from rabbet.server.errors import json_response
from rabbet.server.protocol import ChatCompletionRequest
from rabbet.server.sampling import chat_sampling
from rabbet.server.state import ServerState
from rabbet.server.stream import DONE, event, event_stream, until_disconnect
from rabbet.server.usage import usage
from rabbet.types.sampling import SamplingParams

__all__ = ["create_chat_completion", "template_options"]


@dataclass(slots=True)
class _Call:
    """One request, checked."""

    body: ChatCompletionRequest
    state: ServerState
    model: str
    prompt: TokenizedPrompt
    sampling: SamplingParams
    completion_id: str
    created: int

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object around choices."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """What the engine makes of it."""
        return self.state.generate(
            self.prompt,
            self.sampling,
            request_id=self.body.request_id,
            priority=self.body.priority,
            clamp_max_tokens=True,
        )

    def usage(self, num_output: int, num_cached: int) -> dict[str, Any]:
        """Token counts."""
        details = num_cached if self.state.config.enable_prompt_tokens_details else None
        return usage(len(self.prompt.token_ids), num_output, num_cached=details)


async def create_chat_completion(request: Request, state: ServerState) -> Response:
    """The route."""
    body = await read_body(request, ChatCompletionRequest, state.stats)
    call = _prepare(body, state)
    if body.stream:
        return event_stream(_stream(call), keep_alive_s=state.config.sse_keep_alive_interval_s)
    answer = await until_disconnect(request, _whole(call))
    return Response(status_code=499) if answer is None else json_response(answer)


def template_options(state: ServerState, body: Any) -> dict[str, Any]:
    """Template, variables and switches that a body with messages asks for.

    Raises:
        InvalidRequestError: If it brings a template and the operator did not allow that.
    """
    if body.chat_template is not None and not state.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template in a request is refused unless the server runs with --trust-request-chat-template",
            field="chat_template",
        )
    variables = {**state.config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
    if "chat_template" in variables or "tokenize" in variables:
        raise InvalidRequestError(
            "chat_template_kwargs may not hold chat_template or tokenize", field="chat_template_kwargs"
        )
    effort = getattr(body, "reasoning_effort", None)
    if isinstance(effort, str):
        variables.setdefault("reasoning_effort", effort)
    if body.add_generation_prompt and body.continue_final_message and "add_generation_prompt" in body.model_fields_set:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other", field="continue_final_message"
        )
    return {
        "tools": body.tools,
        "chat_template": body.chat_template,
        "variables": variables,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }


def _prepare(body: ChatCompletionRequest, state: ServerState) -> _Call:
    llm = state.engine()
    model = state.check_model(body.model)
    _check_tools(body)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    salt = llm.processor.check_salt(body.cache_salt)
    tokens = llm.chat_prompt(body.messages, **template_options(state, body))
    prompt = TokenizedPrompt(tokens.text, tokens.token_ids, salt)
    sampling = chat_sampling(body, llm.sampling_defaults, state.config)
    try:
        llm.check(prompt, sampling, clamp_max_tokens=True)
    except InvalidRequestError as error:
        if error.field == "logprobs":
            # Chat's own name for the number of alternatives.
            raise InvalidRequestError(f"top_{error}", field="top_logprobs", value=error.value) from None
        raise
    return _Call(body, state, model, prompt, sampling, state.new_id("chatcmpl"), int(time.time()))


def _check_tools(body: ChatCompletionRequest) -> None:
    if body.tools is not None and not body.tools:
        raise InvalidRequestError("tools is empty; leave it out", field="tools", value=[])
    if body.tool_choice is not None and body.tool_choice != "none" and not body.tools:
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice", value=body.tool_choice)
    if body.tools and body.tool_choice != "none":
        raise InvalidRequestError(
            "tools need a tool parser plugin (--enable-auto-tool-choice --tool-call-parser NAME), and none is installed; "
            'tool_choice "none" shows the tools to the model without calling them',
            field="tools",
        )


async def _whole(call: _Call) -> dict[str, Any]:
    final: RequestOutput | None = None
    async for output in call.outputs():
        final = output
    assert final is not None, "a request ends with an output"
    choices = [_choice(call, output) for output in final.outputs]
    answer = call.envelope("chat.completion", choices)
    answer["usage"] = call.usage(sum(len(o.token_ids) for o in final.outputs), final.num_cached_tokens)
    if final.prompt_logprobs is not None:
        from rabbet.server.completions import _prompt_logprobs

        answer["prompt_logprobs"] = _prompt_logprobs(final.prompt_logprobs)
    if call.body.return_token_ids:
        answer["prompt_token_ids"] = call.prompt.token_ids
    return answer


def _choice(call: _Call, output: CompletionOutput) -> dict[str, Any]:
    text = output.text
    if call.body.echo and call.body.messages:
        text = str(call.body.messages[-1].get("content") or "") + text
    choice: dict[str, Any] = {
        "index": output.index,
        "message": {"role": call.state.config.response_role, "content": text},
        "logprobs": _logprobs(call, output),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if call.body.return_token_ids:
        choice["token_ids"] = output.token_ids
    return choice


def _logprobs(call: _Call, output: CompletionOutput) -> dict[str, Any] | None:
    """The chat form: an entry a token, with its bytes and alternatives."""
    if not call.body.logprobs or output.logprobs is None:
        return None
    given = call.body.return_tokens_as_token_ids
    as_ids = call.state.config.return_tokens_as_token_ids if given is None else given
    count = call.body.top_logprobs or 0
    entries = []
    for token_id, row in zip(output.token_ids, output.logprobs, strict=True):
        # The chosen token stands first; where it is among the alternatives its rank says at which place.
        alternatives = sorted(row.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))[:count]
        entries.append(
            _entry(token_id, row[token_id], as_ids=as_ids)
            | {"top_logprobs": [_entry(key, value, as_ids=as_ids) for key, value in alternatives]}
        )
    return {"content": entries}


def _entry(token_id: int, value: Logprob, *, as_ids: bool) -> dict[str, Any]:
    text = value.decoded_token or ""
    return {
        "token": f"token_id:{token_id}" if as_ids else text,
        "logprob": value.logprob,
        "bytes": list(text.encode("utf-8", "surrogatepass")),
    }


async def _stream(call: _Call) -> AsyncGenerator[bytes, None]:
    body, config = call.body, call.state.config
    options = body.stream_options
    wants_usage = config.enable_force_include_usage or (options is not None and options.include_usage)
    continuous = options is not None and options.continuous_usage_stats and wants_usage
    kind = "chat.completion.chunk"
    num_output = cached = 0
    for index in range(body.n):
        delta = {"role": config.response_role, "content": ""}
        first = call.envelope(kind, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        if continuous:
            first["usage"] = call.usage(0, 0)
        yield event(first)
    async for output in call.outputs():
        cached = max(cached, output.num_cached_tokens)
        for item in output.outputs:
            num_output += len(item.token_ids)
            choice: dict[str, Any] = {
                "index": item.index,
                "delta": {"content": item.text} if item.text else {},
                "logprobs": _logprobs(call, item),
                "finish_reason": item.finish_reason,
            }
            if not item.text and item.finish_reason is None and choice["logprobs"] is None:
                continue
            if item.finish_reason is not None:
                choice["stop_reason"] = item.stop_reason
            if body.return_token_ids:
                choice["token_ids"] = item.token_ids
            chunk = call.envelope(kind, [choice])
            if continuous:
                chunk["usage"] = call.usage(num_output, cached)
            yield event(chunk)
    if wants_usage:
        yield event(call.envelope(kind, []) | {"usage": call.usage(num_output, cached)})
    yield DONE
