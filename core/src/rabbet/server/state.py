"""What all routes of one server share."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from rabbet.config.schema import ServerConfig
from rabbet.contracts.observability import RequestRecord
from rabbet.errors import EngineDeadError, OverloadedError, RequestFailedError
from rabbet.front.async_llm import AsyncLLM
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.metrics.stats import FrontStats
from rabbet.registry import HookBus
from rabbet.server.errors import model_not_found
from rabbet.types.sampling import SamplingParams

__all__ = ["ServerState"]


@dataclass(slots=True)
class ServerState:
    """One server.

    Attributes:
        config: Its options.
        llm: The engine, once it is ready.
        stats: Counters.
        hooks: Who listens.
        is_draining: New requests are refused.
        started_s: When the server began, for ``created``.
        running: Requests under way.
    """

    config: ServerConfig
    llm: AsyncLLM | None = None
    stats: FrontStats = field(default_factory=FrontStats)
    hooks: HookBus | None = None
    is_draining: bool = False
    started_s: int = field(default_factory=lambda: int(time.time()))
    running: int = 0

    def engine(self) -> AsyncLLM:
        """The engine, if it takes requests.

        Raises:
            OverloadedError: While the server starts or stops.
            EngineDeadError: If the engine is gone.
        """
        if self.llm is None:
            raise OverloadedError("the server is starting; try again", retry_after_s=2)
        if self.is_draining:
            raise OverloadedError("the server is shutting down", retry_after_s=10)
        return self.llm

    def check_model(self, name: str | None) -> str:
        """The name to report.

        Raises:
            ModelNotFoundError: If the request names a model that is not served.
        """
        names = self.engine().model_info.names
        if name is not None and name not in names:
            raise model_not_found(name, names)
        return name or names[0]

    async def generate(
        self, prompt: TokenizedPrompt, sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, counted.

        Raises:
            RequestFailedError: If an output ended with an error.
        """
        llm = self.engine()
        started = last = time.monotonic()
        first: float | None = None
        num_tokens = 0
        reason = "abort"
        output: RequestOutput | None = None
        self.running += 1
        try:
            async for output in llm.generate(prompt, sampling, **options):
                now = time.monotonic()
                count = sum(len(item.token_ids) for item in output.outputs)
                if first is None and count:
                    first = now - started
                elif count and sampling.output_kind.value == "delta":
                    self.stats.observe_gap(now - last, count)
                last = now
                num_tokens = num_tokens + count if sampling.output_kind.value == "delta" else count
                failed = next((item for item in output.outputs if item.finish_reason == "error"), None)
                if failed is not None:
                    reason = "error"
                    raise RequestFailedError(failed.error or "the request failed in the engine")
                if output.finished:
                    reason = output.outputs[0].finish_reason or "stop"
                yield output
        except EngineDeadError:
            reason = "error"
            raise
        finally:
            self.running -= 1
            self._record(llm, prompt, output, reason, started, first, num_tokens)

    def _record(
        self,
        llm: AsyncLLM,
        prompt: TokenizedPrompt,
        output: RequestOutput | None,
        reason: str,
        started: float,
        first: float | None,
        num_tokens: int,
    ) -> None:
        metrics = output.metrics if output else None
        record = RequestRecord(
            request_id=output.request_id if output else "",
            model=llm.model_info.names[0],
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=output.num_cached_tokens if output else 0,
            num_output_tokens=num_tokens,
            finish_reason=reason,
            queued_s=(metrics.queued_s or 0.0) if metrics else 0.0,
            time_to_first_token_s=first,
            total_s=time.monotonic() - started,
        )
        self.stats.observe_request(record)
        if self.hooks is not None:
            self.hooks.call("on_request_finished", record=record)

    @staticmethod
    def new_id(prefix: str) -> str:
        """A fresh public id."""
        return f"{prefix}-{secrets.token_hex(12)}"
