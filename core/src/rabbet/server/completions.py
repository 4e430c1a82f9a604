"""``POST /v1/completions``: text or token ids in, text out; one prompt or many, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rabbet.errors import InvalidRequestError
from rabbet.front.async_llm import AsyncLLM
from rabbet.front.base import derive_seed
from rabbet.front.outputs import CompletionOutput, RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.server.body import body_size, read_body
from rabbet.server.call import Call, truncated
from rabbet.server.early import check_completion, too_many_prompts
from rabbet.server.errors import json_response
from rabbet.server.logprobs import Row, TextOffsets, completion_logprobs, prompt_logprobs, prompt_offsets
from rabbet.server.protocol import CompletionRequest
from rabbet.server.sampling import check_entries, completion_sampling
from rabbet.server.state import ServerState
from rabbet.server.stream import DONE, EventStream, merge, until_disconnect

__all__ = ["create_completion"]

_CompletionCall = Call[CompletionRequest]


async def create_completion(request: Request, state: ServerState) -> Response:
    """Continue texts."""
    body = await read_body(request, CompletionRequest, state, early=check_completion)
    call = await _prepare(body, state, body_size(request))
    if body.stream:
        return EventStream(_stream(call), keep_alive_s=state.config.sse_keep_alive_interval_s)
    answer = await until_disconnect(request, _whole(call))
    return Response(status_code=499) if answer is None else json_response(answer)


async def _prepare(body: CompletionRequest, state: ServerState, size_bytes: int) -> _CompletionCall:
    llm = state.engine()
    model = state.check_model(body.model)
    if body.suffix:
        raise InvalidRequestError(
            "suffix is not supported: no model here fills in a middle; leave it out", field="suffix", value=body.suffix
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens is 0, which needs echo: true", field="max_tokens", value=0)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    base = completion_sampling(body, llm.sampling_defaults, state, is_echo_only=_is_echo_only(body))
    given = _prompts(body.prompt, state.config.max_prompts)
    if len(given) * body.n > state.config.max_outputs:
        raise InvalidRequestError(
            f"{len(given)} prompts with n = {body.n} are {len(given) * body.n} outputs, the limit is "
            f"{state.config.max_outputs} (--max-outputs); send fewer prompts at once",
            field="n",
            value=body.n,
        )
    check_entries(base, len(given) * body.n)
    prompts = await state.off_loop(size_bytes, lambda: [_tokens(item, body, base.max_tokens, llm) for item in given])
    # Each output of each prompt draws from a seed of its own; n outputs of one prompt take n in a row.
    sampling = [
        base if base.seed is None else base.clone(seed=derive_seed(base.seed, number * base.n))
        for number in range(len(prompts))
    ]
    for prompt, params in zip(prompts, sampling, strict=True):
        llm.check(prompt, params)
    return Call(
        body=body,
        state=state,
        model=model,
        prompts=prompts,
        sampling=sampling,
        completion_id=state.new_id("cmpl"),
        clamp_max_tokens=False,
    )


def _is_echo_only(body: CompletionRequest) -> bool:
    """The prompt and its log probabilities are wanted and no token: the engine makes one, and nobody sees it."""
    return body.max_tokens == 0 and body.echo


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
    if isinstance(prompt[0], int) and all(isinstance(item, int) for item in prompt):
        return [prompt]
    if len(prompt) > limit:
        raise too_many_prompts(len(prompt), limit)
    if not (all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt)):
        raise InvalidRequestError("prompt mixes texts and token ids; give lists of one kind", field="prompt")
    return list(prompt)


def _tokens(prompt: Any, body: CompletionRequest, max_tokens: int | None, llm: AsyncLLM) -> TokenizedPrompt:
    salt = llm.processor.check_salt(body.cache_salt)
    found = llm.processor.tokenize(prompt, add_special_tokens=body.add_special_tokens)
    found = truncated(found, body, llm.model_info.max_model_len - (max_tokens or 1))
    text = found.text
    if text is None and body.echo and llm.tokenizer is not None:
        text = llm.tokenizer.decode(found.token_ids, skip_special_tokens=False)
    return TokenizedPrompt(text, found.token_ids, salt)


async def _whole(call: _CompletionCall) -> dict[str, Any]:
    async def last(number: int) -> RequestOutput:
        final: RequestOutput | None = None
        async with aclosing(call.outputs(number)) as outputs:
            async for output in outputs:
                final = output
        assert final is not None, "a request ends with an output"
        return final

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(last(number)) for number in range(len(call.prompts))]
    results = [task.result() for task in tasks]
    answer = call.envelope("text_completion")
    answer["choices"] = [
        _choice(call, number, output, result) for number, result in enumerate(results) for output in result.outputs
    ]
    num_output = 0 if _is_echo_only(call.body) else sum(len(o.token_ids) for r in results for o in r.outputs)
    answer["usage"] = call.usage(num_output, sum(result.num_cached_tokens for result in results))
    return answer


def _choice(call: _CompletionCall, number: int, output: CompletionOutput, result: RequestOutput) -> dict[str, Any]:
    body, prompt = call.body, call.prompts[number]
    shown = _shown(call, output)
    choice: dict[str, Any] = {
        "index": number * body.n + output.index,
        "text": (prompt.text or "") + shown.text if body.echo else shown.text,
        "logprobs": None,
        "finish_reason": shown.finish_reason,
        "stop_reason": shown.stop_reason,
    }
    if body.logprobs is not None:
        ids, rows = shown.token_ids, list[Row | None](shown.logprobs or ())
        start = len(prompt.text or "") if body.echo else 0
        offsets, _ = _output_offsets(call, number).after(start, ids)
        if body.echo:
            ids, rows = [*prompt.token_ids, *ids], [*_prompt_rows(result), *rows]
            offsets = [*prompt_offsets(prompt.token_ids, prompt.text or "", call.tokenizer), *offsets]
        # A stop string cuts text away whose tokens are counted.
        offsets = [min(offset, len(choice["text"])) for offset in offsets]
        choice["logprobs"] = completion_logprobs(
            ids, rows, offsets=offsets, as_ids=call.as_ids, tokenizer=call.tokenizer
        )
    if body.prompt_logprobs is not None and result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    if body.return_token_ids:
        choice |= {"token_ids": shown.token_ids, "prompt_token_ids": prompt.token_ids}
    return choice


def _shown(call: _CompletionCall, output: CompletionOutput) -> CompletionOutput:
    """The output as the client may see it."""
    if not _is_echo_only(call.body):
        return output
    return CompletionOutput(index=output.index, finish_reason="length" if output.finished else None, logprobs=[])


def _output_offsets(call: _CompletionCall, number: int) -> TextOffsets:
    skip = call.sampling[number].skip_special_tokens
    return TextOffsets(call.tokenizer, skip_special_tokens=skip, prompt=call.prompts[number].token_ids)


def _prompt_rows(result: RequestOutput) -> list[Row | None]:
    return result.prompt_logprobs or [None] * len(result.prompt_token_ids)


async def _stream(call: _CompletionCall) -> AsyncGenerator[bytes, None]:
    writer = call.writer("text_completion")
    streams = [_PromptStream(call, number) for number in range(len(call.prompts))]
    async with aclosing(merge([call.outputs(number) for number in range(len(streams))])) as news:
        async for number, output in news:
            streams[number].take_in(output)
            for choice in streams[number].choices():
                counts = call.usage(*_totals(streams)) if call.is_continuous else None
                yield writer.chunk([choice], counts)
    if call.wants_usage:
        yield writer.chunk([], call.usage(*_totals(streams)))
    yield DONE


def _totals(streams: list[_PromptStream]) -> tuple[int, int]:
    return sum(stream.num_output for stream in streams), sum(stream.num_cached for stream in streams)


class _PromptStream:
    """The chunks of one prompt's outputs; with ``echo``, first the prompt for each of them."""

    def __init__(self, call: _CompletionCall, number: int) -> None:
        self._call = call
        self._number = number
        self._waiting: list[CompletionOutput] = []
        self._prompt_rows: list[Row | None] = []
        self._needs_echo = call.body.echo
        start = len(call.prompts[number].text or "") if call.body.echo else 0
        self._ends = [start] * call.body.n
        self._offsets = [_output_offsets(call, number) for _ in range(call.body.n)]
        self._is_first = [True] * call.body.n
        self.num_output = 0
        self.num_cached = 0

    def take_in(self, output: RequestOutput) -> None:
        """Take in news."""
        self.num_cached = max(self.num_cached, output.num_cached_tokens)
        self._waiting += [_shown(self._call, item) for item in output.outputs]
        self._prompt_rows = output.prompt_logprobs or []

    def choices(self) -> list[dict[str, Any]]:
        """What can be shown now. The prompt's log probabilities may be known later than a first token of another output."""
        body, prompt = self._call.body, self._call.prompts[self._number]
        if self._needs_echo and body.logprobs is not None and len(self._prompt_rows) < len(prompt.token_ids):
            return []
        found = []
        if self._needs_echo:
            self._needs_echo = False
            found += [self._echo(index) for index in range(body.n)]
        found += [choice for item in self._waiting if (choice := self._chunk(item)) is not None]
        self._waiting.clear()
        return found

    def _echo(self, index: int) -> dict[str, Any]:
        prompt = self._call.prompts[self._number]
        offsets = prompt_offsets(prompt.token_ids, prompt.text or "", self._call.tokenizer)
        logprobs = self._logprobs(prompt.token_ids, self._prompt_rows, offsets)
        return self._choice(index, prompt.text or "", logprobs)

    def _chunk(self, item: CompletionOutput) -> dict[str, Any] | None:
        self.num_output += len(item.token_ids)
        logprobs = None
        if item.token_ids:
            offsets, self._ends[item.index] = self._offsets[item.index].after(self._ends[item.index], item.token_ids)
            logprobs = self._logprobs(item.token_ids, item.logprobs or (), offsets)
        wants_ids = self._call.body.return_token_ids
        if not (item.text or item.finished or logprobs is not None or wants_ids):
            return None
        choice = self._choice(item.index, item.text, logprobs)
        if item.finished:
            choice |= {"finish_reason": item.finish_reason, "stop_reason": item.stop_reason}
        if wants_ids:
            choice["token_ids"] = item.token_ids
            if self._is_first[item.index]:
                choice["prompt_token_ids"] = self._call.prompts[self._number].token_ids
        self._is_first[item.index] = False
        return choice

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        public = self._number * self._call.body.n + index
        return {"index": public, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}

    def _logprobs(self, token_ids: list[int], rows: Any, offsets: list[int]) -> dict[str, Any] | None:
        call = self._call
        if call.body.logprobs is None:
            return None
        return completion_logprobs(token_ids, rows, offsets=offsets, as_ids=call.as_ids, tokenizer=call.tokenizer)
