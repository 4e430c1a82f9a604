"""The asynchronous front end: the server's, and anybody's who lives in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.schema import EngineConfig
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.client import EngineClient
from rabbet.errors import EngineDeadError
from rabbet.front.base import FrontBase, TrackedRequest
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import Prompt, TokenizedPrompt
from rabbet.types.outputs import RequestDelta
from rabbet.types.sampling import SamplingParams

__all__ = ["AsyncLLM"]


class AsyncLLM(FrontBase):
    """An engine behind an event loop. Made by ``from_config`` or ``from_model``."""

    def __init__(self, config: EngineConfig, client: EngineClient) -> None:
        """Attach to a started client, inside the running event loop."""
        super().__init__(config, client)
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
    ) -> AsyncLLM:
        """Start an engine and wait until it serves, without blocking the loop.

        Raises:
            RabbetError: What the engine said went wrong.
        """
        client = EngineClient(config, is_server=is_server, log_level=log_level)
        try:
            await asyncio.to_thread(client.start, on_phase)
        except asyncio.CancelledError:
            await asyncio.to_thread(client.shutdown)
            raise
        return cls(config, client)

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
        clamp_max_tokens: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request as they come, by ``sampling_params.output_kind``; the last one has ``finished``.

        Leaving the generator early aborts the request in the engine. A slow reader gets several tokens at once.

        Raises:
            ClientError: Before the first output, if the request is wrong.
            EngineDeadError: If the engine is gone, or dies before the end.
        """
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else self.processor.tokenize(prompt)
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
