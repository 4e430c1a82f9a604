"""What all routes of one server share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rabbet.config.schema import ServerConfig
from rabbet.contracts.observability import RequestRecord, StatLogger
from rabbet.errors import ClientError, EngineDeadError, OverloadedError, RequestFailedError
from rabbet.front.async_llm import AsyncLLM
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.metrics.stats import FrontStats
from rabbet.registry import HookBus
from rabbet.server.errors import model_not_found
from rabbet.server.parsing import Parsers
from rabbet.types.sampling import OutputKind, SamplingParams

__all__ = ["ServerState"]

logger = logging.getLogger(__name__)
_LONG_BODY_BYTES = 16 << 10
_MAX_NOTED = 64
_T = TypeVar("_T")


@dataclass(slots=True)
class ServerState:
    """One server.

    Attributes:
        config: Its options.
        llm: The engine, once it is ready.
        stats: Counters.
        hooks: Who listens.
        parsers: For reasoning and tool calls.
        has_grammar: A grammar plugin is in use, so that the shape of answers can be asked for.
        stat_loggers: Plugins that get the numbers, by name and owner.
        is_draining: New requests are refused.
        is_dead: The engine died.
        started_s: When the server began, for ``created``.
        running: Prompts under way.
    """

    config: ServerConfig
    llm: AsyncLLM | None = None
    stats: FrontStats = field(default_factory=FrontStats)
    hooks: HookBus | None = None
    parsers: Parsers = field(default_factory=Parsers)
    has_grammar: bool = False
    stat_loggers: dict[str, StatLogger] = field(default_factory=dict)
    is_draining: bool = False
    is_dead: bool = False
    started_s: int = field(default_factory=lambda: int(time.time()))
    running: int = 0
    _noted: set[str] = field(default_factory=set)

    def engine(self) -> AsyncLLM:
        """The engine, if it takes requests.

        Raises:
            OverloadedError: While the server starts or stops.
            EngineDeadError: When the engine has died.
        """
        if self.is_dead:
            self.stats.rejections["engine_dead"] += 1
            raise EngineDeadError("the engine is not available")
        if self.llm is None:
            self.stats.rejections["starting"] += 1
            raise OverloadedError("the server is starting; try again", retry_after_s=2)
        if self.is_draining:
            self.stats.rejections["draining"] += 1
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

    def note_unknown(self, names: list[str]) -> None:
        """Count ignored fields of a request, and tell once of each; names come from clients, so they are bounded."""
        self.stats.unknown_fields += len(names)
        for name in names:
            if name not in self._noted and len(self._noted) < _MAX_NOTED:
                self._noted.add(name)
                logger.warning("the request field %r is not known and ignored (said once)", name[:64])

    async def off_loop(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """Do the work of tokenising a body: at once if it is small, in a thread if others would have to wait."""
        return await asyncio.to_thread(work) if size_bytes > _LONG_BODY_BYTES else work()

    async def generate(
        self, prompt: TokenizedPrompt, sampling: SamplingParams, *, public_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt, counted.

        Args:
            prompt: Its tokens.
            sampling: Its parameters.
            public_id: What the answer is called, for the log.
            **options: Of ``AsyncLLM.generate``.

        Raises:
            RequestFailedError: If an output ended with an error.
        """
        llm = self.engine()
        watch = _Watch(sampling.output_kind is OutputKind.DELTA)
        self.running += 1
        try:
            async with aclosing(llm.generate(prompt, sampling, **options)) as outputs:
                async for output in outputs:
                    watch.see(output, self.stats)
                    yield output
        except OverloadedError:
            self.stats.rejections["queue_full"] += 1
            watch.reason = None
            raise
        except ClientError:
            watch.reason = None
            raise
        except (EngineDeadError, RequestFailedError):
            watch.reason = "error"
            raise
        finally:
            self.running -= 1
            if watch.reason is not None:
                self.stats.observe_params(sampling.n, sampling.max_tokens)
                self._record(watch.record(public_id, llm.model_info.names[0], prompt))

    def _record(self, record: RequestRecord) -> None:
        self.stats.observe_request(record)
        self.tell(lambda listener: listener.on_request(record))
        if self.hooks is not None:
            self.hooks.call("on_request_finished", record=record)
        if self.config.enable_log_requests:
            first = record.time_to_first_token_s
            logger.info(
                "%s: %s, %d prompt tokens (%d cached), %d generated, queued %.3f s, first token %s, total %.3f s",
                record.request_id,
                record.finish_reason,
                record.num_prompt_tokens,
                record.num_cached_tokens,
                record.num_output_tokens,
                record.queued_s,
                "never" if first is None else f"{first:.3f} s",
                record.total_s,
            )

    def tell(self, call: Callable[[StatLogger], None]) -> None:
        """Call every stat logger; one that raises is left out from then on."""
        for owner, listener in list(self.stat_loggers.items()):
            try:
                call(listener)
            except BaseException:  # a plugin may raise anything, and must not end a request or the server
                logger.exception("the stat logger %s failed and is left out", owner)
                self.stats.plugin_failures[owner] += 1
                del self.stat_loggers[owner]

    @staticmethod
    def new_id(prefix: str) -> str:
        """A fresh public id."""
        return f"{prefix}-{secrets.token_hex(12)}"


class _Watch:
    """Looks at the outputs of one request as they pass."""

    def __init__(self, is_delta: bool) -> None:
        self._is_delta = is_delta
        self._started = self._last = time.monotonic()
        self._first: float | None = None
        self._num_tokens = 0
        self._of_output: dict[int, int] = {}
        self._output: RequestOutput | None = None
        self.reason: str | None = "abort"

    def see(self, output: RequestOutput, stats: FrontStats) -> None:
        """Take in an output.

        Raises:
            RequestFailedError: If one of its outputs ended with an error.
        """
        now = time.monotonic()
        count = sum(len(item.token_ids) for item in output.outputs)
        if count and self._first is None:
            # A whole answer comes at its end; the front noted when its first token came.
            times = output.metrics
            noted = times.first_token_time_s - times.arrival_time_s if times and times.first_token_time_s else None
            self._first = now - self._started if noted is None or self._is_delta else noted
        elif count and self._is_delta:
            stats.observe_gap(now - self._last, count)
        self._last, self._output = now, output
        self._num_tokens = self._num_tokens + count if self._is_delta else count
        for item in output.outputs:
            so_far = self._of_output.get(item.index, 0) if self._is_delta else 0
            self._of_output[item.index] = so_far + len(item.token_ids)
        failed = next((item for item in output.outputs if item.finish_reason == "error"), None)
        if failed is not None:
            raise RequestFailedError(failed.error or "the request failed in the engine")
        if output.finished:
            self.reason = output.outputs[0].finish_reason or "stop"

    def record(self, public_id: str, model: str, prompt: TokenizedPrompt) -> RequestRecord:
        """What happened."""
        output = self._output
        return RequestRecord(
            request_id=public_id,
            model=model,
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=output.num_cached_tokens if output else 0,
            num_output_tokens=self._num_tokens,
            finish_reason=self.reason or "abort",
            queued_s=(output.metrics.queued_s or 0.0) if output and output.metrics else 0.0,
            time_to_first_token_s=self._first,
            total_s=time.monotonic() - self._started,
            num_preemptions=output.metrics.num_preemptions if output and output.metrics else 0,
            most_output_tokens=max(self._of_output.values(), default=0),
        )
