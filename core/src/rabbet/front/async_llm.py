"""The asynchronous front end: the server's, and anybody's who lives in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.schema import EngineConfig
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.client import EngineClient, make_client
from rabbet.errors import EngineDeadError
from rabbet.front.base import FrontBase, TrackedRequest
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import Prompt, TokenizedPrompt
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.outputs import RequestDelta
from rabbet.types.sampling import SamplingParams

__all__ = ["AsyncLLM"]

_LONG_TEXT_CHARS = 16_384


class AsyncLLM(FrontBase):
    """An engine behind an event loop. Made by ``from_config`` or ``from_model``."""

    def __init__(self, config: EngineConfig, client: EngineClient, tokenizer: Tokenizer | None = None) -> None:
        """Attach to a started client, inside the running event loop."""
        super().__init__(config, client, tokenizer)
        self._loop = asyncio.get_running_loop()
        self.on_engine_death: Callable[[EngineDeadError], None] | None = None
        client.listen(self._deltas_from_thread, self._death_from_thread)

    @classmethod
    async def from_config(
        cls,
        config: EngineConfig,
        *,
        is_server: bool = False,
        on_phase: Callable[[str], None] | None = None,
        log_level: str = "info",
        engine_process: bool = True,
    ) -> AsyncLLM:
        """Start an engine and wait until it serves, without blocking the loop.

        Args:
            config: What to run.
            is_server: Online serving has other default budgets than offline use.
            on_phase: Told the name of each phase of the start, in another thread.
            log_level: Of the engine process.
            engine_process: False runs the engine in a thread of this process, for debugging.

        Raises:
            RabbetError: What the engine said went wrong.
        """
        client = make_client(config, is_server=is_server, log_level=log_level, engine_process=engine_process)
        try:
            return cls(config, client, await asyncio.to_thread(cls.start, config, client, on_phase))
        except BaseException:
            # The thread of a cancelled start still waits; this ends its engine, and so the thread.
            await asyncio.to_thread(client.shutdown)
            raise

    @classmethod
    async def from_model(cls, model: str, **options: Any) -> AsyncLLM:
        """As ``from_config`` with keyword arguments as ``LLM`` takes them."""
        return await cls.from_config(engine_config_from_kwargs(model, **options))

    def _deltas_from_thread(self, deltas: list[RequestDelta]) -> None:
        try:
            self._loop.call_soon_threadsafe(self.on_deltas, deltas)
        except RuntimeError:
            # The loop is closed: nobody waits for anything any more.
            return

    def _death_from_thread(self, error: EngineDeadError) -> None:
        def tell() -> None:
            self.on_death(error)
            if self.on_engine_death is not None:
                self.on_engine_death(error)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            return

    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        clamp_max_tokens: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come, by ``sampling_params.output_kind``; the last one has ``finished``.

        Leaving the generator early aborts the request in the engine. A slow reader gets several tokens at once.

        Args:
            prompt: Text, token ids, a mapping, or what ``processor.tokenize`` made of one of these.
            sampling_params: The model's defaults if None.
            request_id: A name for ``abort`` and the outputs; made up if None. It need not be unique.
            priority: Lower goes first, under the priority policy.
            cache_salt: Only requests with the same salt share cached blocks.
            clamp_max_tokens: Lower a ``max_tokens`` beyond the context instead of refusing it.

        Raises:
            ClientError: Before the first output, if the request is wrong.
            OverloadedError: If too many requests wait.
            EngineDeadError: If the engine is gone, or dies before the end.
        """
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else await self.tokenize(prompt)
        if cache_salt is not None:
            tokens = replace(tokens, cache_salt=self.processor.check_salt(cache_salt))
        wake = asyncio.Event()
        sampling = sampling_params or self.get_default_sampling_params()
        tracked = self.submit(
            tokens, sampling, wake.set, request_id=request_id, priority=priority, clamp_max_tokens=clamp_max_tokens
        )
        try:
            while True:
                await wake.wait()
                wake.clear()
                output = self._next(tracked)
                if output is not None:
                    yield output
                if tracked.state.is_finished:
                    return
        finally:
            self.abandon(tracked)

    async def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """As ``processor.tokenize``; a long text does not block the event loop.

        Raises:
            InvalidRequestError: If the prompt is empty, of no known form, or holds ids outside the vocabulary.
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _LONG_TEXT_CHARS:
            return await asyncio.to_thread(self.processor.tokenize, prompt)
        return self.processor.tokenize(prompt)

    async def abort(self, request_id: str) -> None:
        """End every open request of that name; its generator gives what there is, with ``finish_reason`` ``abort``."""
        self.abort_request(request_id)

    @staticmethod
    def _next(tracked: TrackedRequest) -> RequestOutput | None:
        if tracked.failure is not None:
            raise tracked.failure
        return tracked.state.take()

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` unless the engine's loop is alive."""
        self.client.check_health()

    def stats(self) -> SchedulerStats | None:
        """The engine's newest numbers."""
        return self.client.stats

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while requests run."""
        return bool(await asyncio.wrap_future(self.client.call("reset_prefix_cache")))

    async def check_integrity(self) -> None:
        """Raise ``ServerError`` if the engine's books do not balance; for tests."""
        await asyncio.wrap_future(self.client.call("check_integrity"))

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """End the engine after its running requests, or after ``timeout_s``; idempotent."""
        await asyncio.to_thread(self.client.shutdown, timeout_s)
        # News that the reading thread handed over come first; then what is still open will never end by itself.
        self._loop.call_soon(self.on_death, EngineDeadError("the engine is shut down"))
        await asyncio.sleep(0)
