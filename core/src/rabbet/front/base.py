"""What both front ends share: a ready engine, its tokenizer, its defaults, and the routing of deltas to requests."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rabbet.config.schema import EngineConfig
from rabbet.engine.client import EngineClient
from rabbet.errors import ConfigError, EngineDeadError, InvalidRequestError, OverloadedError, RabbetError
from rabbet.front.chat import render_chat
from rabbet.front.defaults import sampling_defaults
from rabbet.front.processor import Processor, TokenizedPrompt
from rabbet.front.request_state import RequestState
from rabbet.front.tokenizer import Tokenizer, load_tokenizer, tokenizer_directory
from rabbet.types.outputs import RequestDelta
from rabbet.types.sampling import SamplingParams

__all__ = ["FrontBase", "ModelInfo", "TrackedRequest", "derive_seed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What is served.

    Attributes:
        names: Names that requests may use; the first is reported.
        max_model_len: Longest context.
        vocab_size: Ids go from 0 to this minus 1.
        num_blocks: Blocks of the KV cache.
        block_size: Tokens a block.
        capacity_tokens: Tokens that the KV cache holds.
        max_concurrency: Requests of the longest context that fit at once.
        digest: Of the composition.
        tampered: Who changed core, and where.
        dtype: Of the computation.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    capacity_tokens: int
    max_concurrency: float
    digest: str
    dtype: str
    tampered: tuple[str, ...] = ()


@dataclass(slots=True)
class TrackedRequest:
    """A request and whom to tell of its news."""

    state: RequestState
    notify: Callable[[], None]
    engine_ids: list[str]
    failure: RabbetError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.failure is not None or self.state.is_finished


class FrontBase:
    """A started engine. Not used by itself."""

    def __init__(self, config: EngineConfig, client: EngineClient, tokenizer: Tokenizer | None = None) -> None:
        """Read what the ready ``client`` says of the model, and its tokenizer unless ``start`` has."""
        resolved, info = client.resolved, client.info
        assert resolved is not None and info is not None, "the client must have been started"
        self.config = config
        self.client = client
        model = config.model
        self.tokenizer = tokenizer or _read_tokenizer(config, resolved.files.tokenizer_dir)
        self.chat_template = resolved.files.chat_template or (self.tokenizer.chat_template if self.tokenizer else None)
        self.sampling_defaults = sampling_defaults(model, resolved.files.generation_config)
        self.processor = Processor(
            self.tokenizer,
            vocab_size=resolved.vocab_size,
            max_model_len=info.max_model_len,
            max_logprobs=model.max_logprobs,
            eos_token_ids=resolved.eos_token_ids,
        )
        self.processor.checks = [
            (decision.name, resolved.composition.load("logits_processor", decision.scope).validate)
            for decision in resolved.composition.decisions
            if decision.kind == "logits_processor"
        ]
        self._stream_interval = config.scheduler.stream_interval
        self.model_info = ModelInfo(
            names=tuple(model.served_model_name) or (resolved.files.name,),
            max_model_len=info.max_model_len,
            vocab_size=resolved.vocab_size,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            capacity_tokens=info.capacity_tokens,
            max_concurrency=info.max_concurrency,
            digest=resolved.composition.digest,
            dtype=resolved.dtype,
        )
        self._composition = resolved.composition
        self.settle()
        self._tracked: dict[str, tuple[TrackedRequest, int]] = {}
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)

    @staticmethod
    def start(
        config: EngineConfig, client: EngineClient, on_phase: Callable[[str], None] | None = None
    ) -> Tokenizer | None:
        """Start the engine, and read the tokenizer before and not after it has loaded the weights.

        Returns:
            The tokenizer; None if it is switched off.

        Raises:
            ConfigError: If it is missing or not readable.
            RabbetError: What the engine said went wrong.
        """
        found: list[Tokenizer | None] = []
        # What is wrong in them without the model is said before it is loaded.
        sampling_defaults(config.model, {})
        if config.model.tokenizer or config.model.skip_tokenizer_init:
            # It does not depend on the model: nothing needs to be started, or downloaded, for it.
            found.append(_read_tokenizer(config, None))
            client.start(on_phase)
        else:
            client.start(on_phase, lambda directory: found.append(_read_tokenizer(config, directory)))
        return found[0]

    def settle(self) -> None:
        """Take in what was changed in core by now; asked again once hooks were told that the engine is ready.

        Raises:
            PluginPolicyError: If anything was, under ``--plugins-strict``.
        """
        settled = self._composition.settled(is_strict=self.config.plugins.strict)
        tampered = tuple(f"{owner}: {place}" for owner, place in settled.tampered)
        self.model_info = replace(self.model_info, digest=settled.digest, tampered=tampered)

    # ---- prompts

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation as text; it holds its special tokens, so none are added when it is tokenised.

        Raises:
            InvalidRequestError: If the model has no chat template, or the messages do not fit it.
        """
        template = chat_template or self.chat_template
        if template is None or self.tokenizer is None:
            raise InvalidRequestError(
                "this model has no chat template; pass one with --chat-template, or use completions", field="messages"
            )
        return render_chat(
            template,
            messages,
            special_tokens=self.tokenizer.special_tokens,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> TokenizedPrompt:
        """A conversation as tokens; options are those of ``render_chat``."""
        return self.processor.tokenize(self.render_chat(messages, **options), add_special_tokens=False)

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters for requests that name none: the model's own defaults."""
        return SamplingParams(**self.sampling_defaults)

    # ---- requests

    def submit(
        self,
        prompt: TokenizedPrompt,
        sampling: SamplingParams,
        notify: Callable[[], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        clamp_max_tokens: bool = False,
    ) -> TrackedRequest:
        """Check and send a request, as ``n`` requests of the engine; ``notify`` is called after each news.

        Raises:
            ClientError: If anything about it is wrong; nothing was sent then.
            EngineDeadError: If there is no engine.
        """
        public_id = request_id or f"req-{self._prefix}-{next(self._numbers)}"
        now = time.time()
        requests = []
        for index in range(sampling.n):
            # Ids of the engine are ours alone: what a client calls its request never becomes a key.
            engine_id = f"{self._prefix}-{next(self._numbers)}"
            requests.append(
                self.processor.make_request(
                    prompt,
                    _one_output(sampling, index),
                    request_id=engine_id,
                    arrival_time_s=now,
                    priority=priority,
                    clamp_max_tokens=clamp_max_tokens,
                )
            )
        state = RequestState(public_id, prompt, sampling, self.tokenizer, default_interval=self._stream_interval)
        tracked = TrackedRequest(state, notify, [request.request_id for request in requests])
        for index, request in enumerate(requests):
            self._tracked[request.request_id] = (tracked, index)
        try:
            for request in requests:
                self.client.add(request)
        except BaseException:
            self.abandon(tracked)
            raise
        return tracked

    def check(self, prompt: TokenizedPrompt, sampling: SamplingParams, *, clamp_max_tokens: bool = False) -> None:
        """Raise what ``submit`` would raise for a wrong request, and send nothing."""
        self.processor.make_request(
            prompt,
            _one_output(sampling, 0),
            request_id="",
            arrival_time_s=0.0,
            clamp_max_tokens=clamp_max_tokens,
        )

    def forget(self, tracked: TrackedRequest) -> None:
        """Stop listening to a request."""
        for engine_id in tracked.engine_ids:
            self._tracked.pop(engine_id, None)

    def abandon(self, tracked: TrackedRequest) -> None:
        """Stop listening and let the engine end what is unfinished."""
        unfinished = [engine_id for engine_id in tracked.engine_ids if engine_id in self._tracked]
        self.forget(tracked)
        if unfinished:
            self.client.abort(unfinished)

    def abort_request(self, request_id: str) -> int:
        """End every open request that its caller named so, with what it has so far; returns how many outputs end."""
        ids = [key for key, (tracked, _) in self._tracked.items() if tracked.state.request_id == request_id]
        if ids:
            self.client.abort(ids)
        return len(ids)

    def on_deltas(self, deltas: Sequence[RequestDelta]) -> None:
        """Route news to requests. News of requests that were given up are dropped."""
        touched: dict[int, TrackedRequest] = {}
        aborts: list[str] = []
        for delta in deltas:
            found = self._tracked.get(delta.request_id)
            if found is None:
                continue
            tracked, index = found
            must_abort = self._feed(tracked, index, delta)
            if must_abort:
                aborts.append(delta.request_id)
            if must_abort or delta.finish_reason is not None:
                self._tracked.pop(delta.request_id, None)
            touched[id(tracked)] = tracked
        if aborts:
            self.client.abort(aborts)
        for tracked in touched.values():
            tracked.notify()

    def _feed(self, tracked: TrackedRequest, index: int, delta: RequestDelta) -> bool:
        """Give one delta to its request; True if the engine must end it because we have what we want, or failed."""
        if delta.error_kind is not None:
            tracked.failure = _refusal(delta)
            self.abandon(tracked)
            return False
        try:
            return tracked.state.feed(index, delta)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a tokenizer that fails or panics on some ids must not end the others' streams
            logger.exception("reading the output of request %s failed", tracked.state.request_id)
            tracked.state.fail(index, f"the output could not be turned into text ({type(error).__name__})")
            return delta.finish_reason is None

    def on_death(self, error: EngineDeadError) -> None:
        """Every open request ends with the error."""
        open_requests = {id(tracked): tracked for tracked, _ in self._tracked.values()}
        self._tracked.clear()
        for tracked in open_requests.values():
            tracked.failure = error
            for index in range(len(tracked.state.outputs)):
                tracked.state.fail(index, str(error))
            tracked.notify()

    @property
    def num_open_requests(self) -> int:
        """Engine requests without an end yet."""
        return len(self._tracked)


def _read_tokenizer(config: EngineConfig, directory: Path | str | None) -> Tokenizer | None:
    """The tokenizer that ``--tokenizer`` names, else that in the model's directory."""
    model = config.model
    if model.skip_tokenizer_init:
        return None
    if model.tokenizer:
        directory = tokenizer_directory(
            model.tokenizer,
            revision=model.tokenizer_revision,
            download_dir=config.load.download_dir,
            is_offline=config.load.is_offline,
        )
    if directory is None:
        raise ConfigError(
            f"the model {model.model} has no tokenizer; name one with --tokenizer, or serve token ids alone with "
            "--skip-tokenizer-init",
            field="model.tokenizer",
        )
    return load_tokenizer(Path(directory), mode=model.tokenizer_mode, trust_remote_code=model.trust_remote_code)


def _refusal(delta: RequestDelta) -> RabbetError:
    """The exception for a request that the engine did not accept."""
    message = delta.error or "the engine refused the request"
    return OverloadedError(message) if delta.error_kind == "OverloadedError" else InvalidRequestError(message)


def derive_seed(seed: int, offset: int) -> int:
    """The seed of the ``offset``-th sample of a seed: itself for 0, and others for others.

    Never -1, which would mean no seed at all.
    """
    return seed if offset == 0 else (seed + offset) % (1 << 63)


def _one_output(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of output ``index`` of ``n``: a seed of its own, prompt log probabilities once."""
    if sampling.n == 1:
        return sampling
    changes: dict[str, Any] = {"n": 1}
    if sampling.seed is not None:
        changes["seed"] = derive_seed(sampling.seed, index)
    if index > 0:
        changes["prompt_logprobs"] = None
        changes["skip_reading_prefix_cache"] = False
    return sampling.clone(**changes)
