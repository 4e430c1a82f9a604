"""The offline front end: prompts in, outputs in the same order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.schema import EngineConfig
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.engine.client import EngineClient
from rabbet.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from rabbet.front.base import FrontBase, TrackedRequest
from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import Prompt, TokenizedPrompt
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.outputs import RequestDelta
from rabbet.types.sampling import OutputKind, SamplingParams

__all__ = ["LLM"]

_WAIT_S = 0.2


class LLM:
    """A model for offline use; a context manager that frees everything.

    The engine runs in a process of its own, started by the constructor and ended by ``close``.

        with LLM("smollm2") as llm:
            print(llm.generate("Hello")[0].outputs[0].text)
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Start an engine.

        Args:
            model: Directory, file, hub name or short name.
            **options: Any option of ``rabbet serve`` that concerns the engine, by its name with underscores:
                ``dtype``, ``max_model_len``, ``num_gpu_blocks_override``, ``attention_backend``,
                ``speculative_config={...}``, ...

        Raises:
            ConfigError: For unknown or contradictory options.
            RabbetError: What the engine said went wrong.
        """
        options.setdefault("disable_log_stats", True)
        self._start(engine_config_from_kwargs(model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a finished configuration."""
        self = cls.__new__(cls)
        self._start(config)
        return self

    def _start(self, config: EngineConfig) -> None:
        self._closed = True
        self.config = config
        client = EngineClient(self.config, is_server=False, log_level="warning")
        client.start()
        try:
            self._front = FrontBase(self.config, client)
        except BaseException:
            client.shutdown()
            raise
        self._closed = False
        self._lock = threading.Lock()
        self._news = threading.Event()
        client.listen(self._on_deltas, self._on_death)

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
                is used as seed + position, so that equal prompts differ and a second call repeats.
            use_tqdm: Show a progress bar; or a callable that makes one.
            priority: One for all, or one a prompt.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ClientError: If a prompt or parameter is wrong; nothing is generated then.
            RequestFailedError: If a request failed in the engine.
            EngineDeadError: If the engine died.
        """
        items = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[arg-type]
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
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        tracked: list[TrackedRequest] = []
        done = threading.Semaphore(0)
        try:
            with self._lock:
                for prompt, sampling, rank in zip(prompts, params, priorities, strict=True):
                    tracked.append(self._submit(prompt, sampling, done, rank))
            self._wait(tracked, done, use_tqdm)
        except BaseException:
            # Ctrl+C, a bad prompt in the middle, a dead engine: nothing is left running.
            with self._lock:
                for request in tracked:
                    self._front.abandon(request)
            raise
        return [self._result(request) for request in tracked]

    def _submit(
        self, prompt: TokenizedPrompt, sampling: SamplingParams, done: threading.Semaphore, priority: int
    ) -> TrackedRequest:
        request: list[TrackedRequest] = []

        def notify() -> None:
            if request and request[0].state.is_finished:
                done.release()

        request.append(self._front.submit(prompt, sampling, notify, priority=priority))
        return request[0]

    def _wait(self, tracked: Sequence[TrackedRequest], done: threading.Semaphore, use_tqdm: Any) -> None:
        bar = _progress(use_tqdm, len(tracked))
        try:
            finished = 0
            while finished < len(tracked):
                if done.acquire(timeout=_WAIT_S):
                    finished += 1
                    if bar is not None:
                        bar.update(1)
                else:
                    self._front.client.check_health()
        finally:
            if bar is not None:
                bar.close()

    @staticmethod
    def _result(request: TrackedRequest) -> RequestOutput:
        if request.failure is not None:
            raise request.failure
        output = request.state.take()
        assert output is not None, "a finished request has an output"
        for item in output.outputs:
            if item.finish_reason == "error":
                raise RequestFailedError(item.error or "the request failed", request_id=output.request_id)
        return output

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        given = given if given is not None else self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            # One object for many prompts: each gets noise of its own.
            params = [
                given if given.seed is None else given.clone(seed=(given.seed + i) % (1 << 63)) for i in range(count)
            ]
        else:
            params = list(given)
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

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them: a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return True
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def _progress(use_tqdm: Any, total: int) -> Any:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="requests")
    import sys

    from tqdm import tqdm

    return tqdm(total=total, desc="requests", unit="req", disable=None, file=sys.stderr)
