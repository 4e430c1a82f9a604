"""``POST /v1/completions``: text or token ids in, text out; one prompt or many, whole or streamed."""

from __future__ import annotations

import asyncio
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
from rabbet.server.protocol import CompletionRequest
from rabbet.server.sampling import completion_sampling
from rabbet.server.state import ServerState
from rabbet.server.stream import DONE, event, event_stream, until_disconnect
from rabbet.server.usage import usage
from rabbet.types.sampling import SamplingParams

__all__ = ["create_completion"]


@dataclass(slots=True)
class _Call:
    """One request, checked."""

    body: CompletionRequest
    state: ServerState
    model: str
    prompts: list[TokenizedPrompt]
    sampling: list[SamplingParams]
    completion_id: str
    created: int
    is_echo_only: bool

    @property
    def as_ids(self) -> bool:
        """Whether tokens are shown as ``token_id:N``."""
        given = self.body.return_tokens_as_token_ids
        return self.state.config.return_tokens_as_token_ids if given is None else given

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object around choices."""
        return {
            "id": self.completion_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def outputs(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt."""
        return self.state.generate(
            self.prompts[index],
            self.sampling[index],
            request_id=self.body.request_id,
            priority=self.body.priority,
        )


async def create_completion(request: Request, state: ServerState) -> Response:
    """The route."""
    body = await read_body(request, CompletionRequest, state.stats)
    call = _prepare(body, state)
    if body.stream:
        chunks = _stream(call)
        return event_stream(chunks, keep_alive_s=state.config.sse_keep_alive_interval_s)
    answer = await until_disconnect(request, _whole(call))
    return Response(status_code=499) if answer is None else json_response(answer)


def _prepare(body: CompletionRequest, state: ServerState) -> _Call:
    llm = state.engine()
    model = state.check_model(body.model)
    if body.suffix is not None:
        raise InvalidRequestError("suffix is not supported: this model does not fill in the middle", field="suffix")
    is_echo_only = body.max_tokens == 0 and body.echo
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens is 0, which needs echo: true", field="max_tokens", value=0)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    salt = llm.processor.check_salt(body.cache_salt)
    prompts = []
    for prompt in _prompts(body.prompt, state.config.max_prompts):
        tokens = llm.processor.tokenize(prompt, add_special_tokens=body.add_special_tokens)
        text = tokens.text
        if body.echo and text is None and llm.tokenizer is not None:
            text = llm.tokenizer.decode(tokens.token_ids, skip_special_tokens=False)
        prompts.append(TokenizedPrompt(text, tokens.token_ids, salt))
    base = completion_sampling(body, llm.sampling_defaults, state.config, is_echo_only=is_echo_only)
    sampling = [base if base.seed is None else base.clone(seed=base.seed + i) for i in range(len(prompts))]
    for prompt, params in zip(prompts, sampling, strict=True):
        llm.check(prompt, params)
    return _Call(
        body=body,
        state=state,
        model=model,
        prompts=prompts,
        sampling=sampling,
        completion_id=state.new_id("cmpl"),
        created=int(time.time()),
        is_echo_only=is_echo_only,
    )


def _prompts(prompt: Any, limit: int) -> list[Any]:
    """The prompts of a request: one text, one list of ids, or a list of either.

    Raises:
        InvalidRequestError: If there are none, too many, or texts and ids are mixed.
    """
    if prompt is None:
        raise InvalidRequestError("prompt is missing", field="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is empty", field="prompt", value=[])
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if len(prompt) > limit:
        raise InvalidRequestError(
            f"prompt holds {len(prompt)} prompts, the limit is {limit} (--max-prompts)",
            field="prompt",
            value=len(prompt),
        )
    if not (all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt)):
        raise InvalidRequestError("prompt mixes texts and token ids; give lists of one kind", field="prompt")
    return list(prompt)


async def _whole(call: _Call) -> dict[str, Any]:
    async def last(index: int) -> RequestOutput:
        final: RequestOutput | None = None
        async for output in call.outputs(index):
            final = output
        assert final is not None, "a request ends with an output"
        return final

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(last(i)) for i in range(len(call.prompts))]
    results = [task.result() for task in tasks]
    choices = []
    for number, result in enumerate(results):
        for output in result.outputs:
            choices.append(_choice(call, number, output, result))
    answer = call.envelope(choices)
    num_prompt = sum(len(prompt.token_ids) for prompt in call.prompts)
    num_output = 0 if call.is_echo_only else sum(len(o.token_ids) for r in results for o in r.outputs)
    cached = sum(result.num_cached_tokens for result in results)
    answer["usage"] = usage(
        num_prompt, num_output, num_cached=cached if call.state.config.enable_prompt_tokens_details else None
    )
    return answer


def _choice(call: _Call, number: int, output: CompletionOutput, result: RequestOutput) -> dict[str, Any]:
    body, prompt = call.body, call.prompts[number]
    text, reason = ("", "length") if call.is_echo_only else (output.text, output.finish_reason)
    token_ids = [] if call.is_echo_only else output.token_ids
    choice: dict[str, Any] = {
        "index": number * body.n + output.index,
        "text": (prompt.text or "") + text if body.echo else text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": None if call.is_echo_only else output.stop_reason,
    }
    if body.logprobs is not None:
        entries = [] if call.is_echo_only else list(output.logprobs or ())
        choice["logprobs"] = _logprobs(call, number, token_ids, entries, result if body.echo else None)
    if body.prompt_logprobs is not None and result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(result.prompt_logprobs)
    if body.return_token_ids:
        choice |= {"token_ids": token_ids, "prompt_token_ids": prompt.token_ids}
    return choice


def _prompt_logprobs(entries: list[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            str(key): {"logprob": value.logprob, "rank": value.rank, "decoded_token": value.decoded_token}
            for key, value in entry.items()
        }
        for entry in entries
    ]


def _logprobs(
    call: _Call,
    number: int,
    token_ids: list[int],
    entries: list[dict[int, Logprob]],
    echoed: RequestOutput | None,
    offset: int = 0,
) -> dict[str, Any]:
    """The completions form: parallel lists over (with echo: prompt and) generated tokens."""
    tokenizer = call.state.engine().tokenizer
    ids: list[int] = list(token_ids)
    rows: list[dict[int, Logprob] | None] = list(entries)
    if echoed is not None:
        ids = [*call.prompts[number].token_ids, *ids]
        rows = [*(echoed.prompt_logprobs or [None] * len(call.prompts[number].token_ids)), *rows]
    tokens, values, top, offsets = [], [], [], []
    for token_id, row in zip(ids, rows, strict=True):
        text = tokenizer.token(token_id) if tokenizer else ""
        shown = f"token_id:{token_id}" if call.as_ids else text
        offsets.append(offset)
        offset += len(text)
        tokens.append(shown)
        values.append(row[token_id].logprob if row else None)
        top.append(_alternatives(call, row) if row else None)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def _alternatives(call: _Call, row: dict[int, Logprob]) -> dict[str, float]:
    """Alternatives by text; where two ids read the same, later ones are shown by id so that none is lost."""
    found: dict[str, float] = {}
    for token_id, entry in row.items():
        text = f"token_id:{token_id}" if call.as_ids else entry.decoded_token or ""
        found[text if text not in found else f"token_id:{token_id}"] = entry.logprob
    return found


async def _stream(call: _Call) -> AsyncGenerator[bytes, None]:
    """Chunks of all prompts as they come."""
    body = call.body
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for output in call.outputs(index):
                queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:  # handed to the one who streams
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(pump(i)) for i in range(len(call.prompts))]
    num_output = cached = 0
    offsets: dict[int, int] = {}
    wants_usage = _wants_usage(call)
    continuous = body.stream_options is not None and body.stream_options.continuous_usage_stats and wants_usage
    num_prompt = sum(len(prompt.token_ids) for prompt in call.prompts)
    try:
        if body.echo:
            for number in range(len(call.prompts)):
                for index in range(body.n):
                    yield event(call.envelope([_echo_choice(call, number, index)]))
        left = len(tasks)
        while left:
            number, item = await queue.get()
            if item is None:
                left -= 1
                continue
            if isinstance(item, Exception):
                raise item
            cached = max(cached, item.num_cached_tokens)
            for output in item.outputs:
                num_output += 0 if call.is_echo_only else len(output.token_ids)
                chunk = call.envelope([_chunk_choice(call, number, output, offsets)])
                if continuous:
                    chunk["usage"] = usage(num_prompt, num_output)
                yield event(chunk)
        if wants_usage:
            details = cached if call.state.config.enable_prompt_tokens_details else None
            yield event(call.envelope([]) | {"usage": usage(num_prompt, num_output, num_cached=details)})
        yield DONE
    finally:
        for task in tasks:
            task.cancel()


def _wants_usage(call: _Call) -> bool:
    options = call.body.stream_options
    return call.state.config.enable_force_include_usage or (options is not None and options.include_usage)


def _echo_choice(call: _Call, number: int, index: int) -> dict[str, Any]:
    return {
        "index": number * call.body.n + index,
        "text": call.prompts[number].text or "",
        "logprobs": None,
        "finish_reason": None,
    }


def _chunk_choice(call: _Call, number: int, output: CompletionOutput, offsets: dict[int, int]) -> dict[str, Any]:
    is_silent = call.is_echo_only
    index = number * call.body.n + output.index
    choice: dict[str, Any] = {
        "index": index,
        "text": "" if is_silent else output.text,
        "logprobs": None,
        "finish_reason": ("length" if is_silent else output.finish_reason) if output.finished else None,
        "stop_reason": None if is_silent else output.stop_reason,
    }
    if call.body.logprobs is not None and not is_silent:
        start = offsets.get(index, len(call.prompts[number].text or "") if call.body.echo else 0)
        choice["logprobs"] = _logprobs(call, number, output.token_ids, list(output.logprobs or ()), None, start)
        offsets[index] = start + len(output.text)
    if call.body.return_token_ids and not is_silent:
        choice["token_ids"] = output.token_ids
    return choice
