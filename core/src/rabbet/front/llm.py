"""The offline front end: prompts in, outputs in the same order."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.schema import EngineConfig
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.client import make_client
from rabbet.errors import EngineDeadError, InvalidRequestError, RequestFailedError, shorten
from rabbet.front.base import FrontBase, TrackedRequest, derive_seed
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import Prompt, TokenizedPrompt
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.outputs import RequestDelta
from rabbet.types.sampling import OutputKind, SamplingParams

__all__ = ["LLM"]

logger = logging.getLogger(__name__)
_LOOK_S = 5.0
_HUNG_S = 120.0


class LLM:
    """A model for offline use; a context manager that frees everything.

    The engine runs in a process of its own, started by the constructor and ended by ``close``. Several threads may use
    one ``LLM``, and one process may have several.

        with LLM("smollm2") as llm:
            print(llm.generate("Hello")[0].outputs[0].text)
    """

    def __init__(self, model: str, *, engine_process: bool = True, **options: Any) -> None:
        """Start an engine.

        Args:
            model: Directory, file, hub name or short name.
            engine_process: False runs the engine in a thread of this process, for debugging and for plugins that are
                registered in the main script.
            **options: Any option of ``rabbet serve`` that concerns the engine, by its name with underscores:
                ``dtype``, ``max_model_len``, ``num_gpu_blocks_override``, ``attention_backend``,
                ``speculative_config={...}``, ...

        Raises:
            ConfigError: For unknown or contradictory options.
            RabbetError: What the engine said went wrong.
        """
        options.setdefault("disable_log_stats", True)
        self._start(engine_config_from_kwargs(model, **options), engine_process=engine_process)

    @classmethod
    def from_config(cls, config: EngineConfig, *, engine_process: bool = True) -> LLM:
        """The same from a finished configuration."""
        self = cls.__new__(cls)
        self._start(config, engine_process=engine_process)
        return self

    def _start(self, config: EngineConfig, *, engine_process: bool) -> None:
        self._closed = True
        self.config = config
        client = make_client(self.config, is_server=False, log_level=_log_level(), engine_process=engine_process)
        try:
            self._front = FrontBase(self.config, client, FrontBase.start(self.config, client))
        except BaseException:
            client.shutdown()
            raise
        self._closed = False
        self._lock = threading.Lock()
        # Weakly: the reader lives as long as the engine, and an LLM that nobody holds ends it.
        on_deltas, on_death = weakref.WeakMethod(self._on_deltas), weakref.WeakMethod(self._on_death)
        client.listen(lambda deltas: _call(on_deltas(), deltas), lambda error: _call(on_death(), error))

    # ---- what runs in the reader thread

    def _on_deltas(self, deltas: list[RequestDelta]) -> None:
        with self._lock:
            self._front.on_deltas(deltas)

    def _on_death(self, error: EngineDeadError) -> None:
        with self._lock:
            self._front.on_death(error)

    # ---- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | int = 0,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: One prompt or a list: text, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``.
            sampling_params: One for all, or one a prompt; the model's defaults if None. A seed that all prompts share
                is used as seed + position * n, and output j of a prompt adds j: so equal prompts differ, and a second
                call repeats. ``max_tokens`` beyond the context is lowered to what fits.
            use_tqdm: Show a progress bar; or a callable that makes one.
            priority: One for all, or one a prompt.

        Returns:
            One output a prompt, in the order of the prompts. An output that failed in the engine has the
            ``finish_reason`` ``error`` and says why in ``error``; a warning is logged.

        Raises:
            ClientError: If a prompt or parameter is wrong; nothing is generated then.
            RequestFailedError: If every request failed in the engine.
            EngineDeadError: If the engine died.
        """
        items: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        tokens = [self._front.processor.tokenize(item) for item in items]
        return self._run(tokens, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Arguments and errors as ``generate``; ids are those of the server."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        tokens = [
            self._front.chat_prompt(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(tokens, sampling_params, use_tqdm=use_tqdm)

    def _run(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | int = 0,
    ) -> list[RequestOutput]:
        self._check_open()
        params = self._params(sampling_params, len(prompts))
        priorities = list(priority) if isinstance(priority, Sequence) else [priority] * len(prompts)
        if len(priorities) != len(prompts):
            raise InvalidRequestError(
                f"{len(priorities)} priorities were given for {len(prompts)} prompts; give one, or one a prompt",
                field="priority",
            )
        for prompt, sampling in zip(prompts, params, strict=True):
            self._front.check(prompt, sampling, clamp_max_tokens=True)
        tracked: list[TrackedRequest] = []
        done: queue.SimpleQueue[TrackedRequest] = queue.SimpleQueue()
        try:
            for prompt, sampling, rank in zip(prompts, params, priorities, strict=True):
                # One at a time: between two the reader may take in news.
                with self._lock:
                    tracked.append(self._submit(prompt, sampling, done, rank))
            self._wait(len(tracked), done, use_tqdm)
        except BaseException:
            # Ctrl+C, a dead engine: nothing is left running.
            with self._lock:
                for request in tracked:
                    self._front.abandon(request)
            raise
        return self._results(tracked)

    def _submit(
        self, prompt: TokenizedPrompt, sampling: SamplingParams, done: queue.SimpleQueue[TrackedRequest], priority: int
    ) -> TrackedRequest:
        request: list[TrackedRequest] = []

        def notify() -> None:
            if request and request[0].is_over:
                done.put(request[0])

        request.append(self._front.submit(prompt, sampling, notify, priority=priority, clamp_max_tokens=True))
        return request[0]

    def _next(self, done: queue.SimpleQueue[TrackedRequest]) -> TrackedRequest:
        """The next request that is over; an engine that hangs is given up after a while."""
        unhealthy_since_s: float | None = None
        while True:
            try:
                return done.get(timeout=_LOOK_S)
            except queue.Empty:
                try:
                    self._front.client.check_health()
                    unhealthy_since_s = None
                except EngineDeadError:
                    now = time.monotonic()
                    unhealthy_since_s = unhealthy_since_s or now
                    if now - unhealthy_since_s > _HUNG_S:
                        raise

    def _wait(self, count: int, done: queue.SimpleQueue[TrackedRequest], use_tqdm: bool | Callable[..., Any]) -> None:
        """Until every request is over; the death of the engine ends all of them."""
        with _Progress(use_tqdm, count) as progress:
            for _ in range(count):
                request = self._next(done)
                if request.failure is not None:
                    raise request.failure
                progress.add(request)

    @staticmethod
    def _results(tracked: Sequence[TrackedRequest]) -> list[RequestOutput]:
        outputs = [output for request in tracked if (output := request.state.take()) is not None]
        assert len(outputs) == len(tracked), "a finished request has an output"
        errors = [item.error for output in outputs for item in output.outputs if item.finish_reason == "error"]
        if errors and len(errors) == sum(len(output.outputs) for output in outputs):
            raise RequestFailedError(errors[0] or "the request failed", request_id=outputs[0].request_id)
        if errors:
            logger.warning("%d outputs failed; the first: %s", len(errors), errors[0])
        return outputs

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        given = given if given is not None else self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            # One object for many prompts: each gets noise of its own.
            seed = given.seed
            params = [
                given if seed is None or i == 0 else given.clone(seed=derive_seed(seed, i * given.n))
                for i in range(count)
            ]
        else:
            params = list(given) if isinstance(given, Sequence) else [given]
            if wrong := next((item for item in params if not isinstance(item, SamplingParams)), None):
                raise InvalidRequestError(
                    f"sampling_params is {shorten(wrong)}, but must be SamplingParams or a list of them",
                    field="sampling_params",
                )
            if len(params) != count:
                raise InvalidRequestError(
                    f"{len(params)} sampling_params were given for {count} prompts; give one, or one a prompt",
                    field="sampling_params",
                )
        return [item.clone(output_kind=OutputKind.FINAL_ONLY) for item in params]

    # ---- the rest

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults."""
        return self._front.get_default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            InvalidRequestError: If it is off.
        """
        if self._front.tokenizer is None:
            raise InvalidRequestError("the tokenizer is off (skip_tokenizer_init)", field="tokenizer")
        return self._front.tokenizer

    def get_metrics(self) -> SchedulerStats:
        """The engine's numbers, now."""
        from msgspec import convert

        self._check_open()
        return convert(self._front.client.call("stats").result(), SchedulerStats)

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while requests run."""
        self._check_open()
        return bool(self._front.client.call("reset_prefix_cache").result())

    @property
    def model_info(self) -> Any:
        """What is served: context, KV cache, digest."""
        return self._front.model_info

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("this LLM is closed")

    def close(self) -> None:
        """End the engine and free everything; idempotent."""
        if not self._closed:
            self._closed = True
            self._front.client.shutdown()
            # Another thread may still wait for what will never come.
            self._on_death(EngineDeadError("this LLM was closed"))

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


def _call(function: Callable[[Any], None] | None, value: Any) -> None:
    if function is not None:
        function(value)


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them: a list of integers is one prompt."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return True
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def _log_level() -> str:
    """The level of this process's logger: the engine says as much as we do."""
    level = logging.getLogger("rabbet").getEffectiveLevel()
    names = ((logging.DEBUG, "debug"), (logging.INFO, "info"), (logging.WARNING, "warning"))
    return next((name for limit, name in names if level <= limit), "error")


class _Progress:
    """The progress bar of one call: requests done, tokens a second. Quiet where nobody looks at a terminal."""

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        self._bar: Any = None
        self._num_tokens = 0
        self._began_s = time.monotonic()
        if callable(use_tqdm):
            self._bar = use_tqdm(total=total, desc="requests")
        elif use_tqdm:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=total, desc="requests", unit="req", disable=None, file=sys.stderr)

    def add(self, request: TrackedRequest) -> None:
        """One more request is over."""
        if self._bar is None:
            return
        self._num_tokens += sum(len(output.total.token_ids) for output in request.state.outputs)
        if hasattr(self._bar, "set_postfix_str"):
            speed = self._num_tokens / max(time.monotonic() - self._began_s, 1e-9)
            self._bar.set_postfix_str(f"{speed:.1f} tok/s", refresh=False)
        self._bar.update(1)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
