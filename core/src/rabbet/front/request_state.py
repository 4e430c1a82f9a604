"""A request at the front: its outputs grow from the engine's deltas into text, log probabilities and finish reasons."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rabbet.front.detok import Detokenizer, StopFinder
from rabbet.front.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.outputs import FinishReason, RequestDelta, TokenLogprobs
from rabbet.types.sampling import OutputKind, SamplingParams

__all__ = ["OutputState", "RequestState"]


@dataclass(slots=True)
class _News:
    """What one output got since it was last shown."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)


class OutputState:
    """One of the ``n`` outputs."""

    def __init__(
        self, index: int, sampling: SamplingParams, tokenizer: Tokenizer | None, prompt: Sequence[int]
    ) -> None:
        self.index = index
        self.sampling = sampling
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens, prompt_tail=prompt)
            if tokenizer is not None and sampling.detokenize
            else None
        )
        self._stops = StopFinder(sampling.stop, keep=sampling.include_stop_str_in_output)
        self.total = _News()
        self.news = _News()
        self.cumulative_logprob = 0.0
        self.has_logprobs = sampling.logprobs is not None or sampling.logprob_token_ids is not None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def feed(self, delta: RequestDelta) -> bool:
        """Take in a delta; True if a stop string was found and the engine must be told to end."""
        if self.finish_reason is not None:
            return False
        # The end token or stop id is no text, unless the caller wants to see what ended the output.
        is_stopped = delta.finish_reason is FinishReason.STOP and not self.sampling.include_stop_str_in_output
        last = len(delta.new_token_ids) - 1
        for position, token_id in enumerate(delta.new_token_ids):
            logprobs = delta.logprobs[position] if delta.logprobs else None
            self._feed_token(token_id, logprobs, is_text=not (is_stopped and position == last))
            if self._stops.found is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, self._stops.found
                return delta.finish_reason is None
        if delta.finish_reason is not None:
            self._show(self._detokenizer.flush() if self._detokenizer else "", is_last=True)
            if self._stops.found is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, self._stops.found
            else:
                self.finish_reason, self.stop_reason = delta.finish_reason.value, delta.stop_reason
            self.error = delta.error
        return False

    def fail(self, message: str) -> None:
        """End with an error, if it has not ended."""
        if self.finish_reason is None:
            self.finish_reason, self.error = FinishReason.ERROR.value, message

    def _feed_token(self, token_id: int, logprobs: TokenLogprobs | None, *, is_text: bool) -> None:
        self.total.token_ids.append(token_id)
        self.news.token_ids.append(token_id)
        if logprobs is not None:
            entry = self.decode_logprobs(logprobs)
            self.cumulative_logprob += logprobs.logprobs[0]
            self.total.logprobs.append(entry)
            self.news.logprobs.append(entry)
        if self._detokenizer is not None and is_text:
            self._show(self._detokenizer.feed([token_id]))

    def _show(self, text: str, *, is_last: bool = False) -> None:
        is_armed = len(self.total.token_ids) > self.sampling.min_tokens
        shown = self._stops.feed(text, is_armed=is_armed)
        if is_last and self._stops.found is None:
            shown += self._stops.flush()
        self.total.text += shown
        self.news.text += shown

    def decode_logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Id to ``Logprob``; the chosen token comes first."""
        return {
            token_id: Logprob(logprob, rank, self._tokenizer.token(token_id) if self._tokenizer else None)
            for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)
        }

    @property
    def has_news(self) -> bool:
        """Whether there is anything to show that was not shown."""
        return bool(self.news.token_ids or self.news.text or self.finish_reason)

    def output(self, *, is_delta: bool) -> CompletionOutput:
        """What to show; marks it as shown."""
        source, self.news = self.news if is_delta else self.total, _News()
        return CompletionOutput(
            index=self.index,
            text=source.text,
            token_ids=list(source.token_ids),
            cumulative_logprob=self.cumulative_logprob if self.has_logprobs else None,
            logprobs=list(source.logprobs) if self.has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


class RequestState:
    """A request with its ``n`` outputs. Used from one thread."""

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        default_interval: int = 1,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.outputs = [OutputState(i, sampling, tokenizer, prompt.token_ids) for i in range(sampling.n)]
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] if sampling.prompt_logprobs is not None else None
        )
        self.num_cached_tokens = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.metrics = RequestMetrics(arrival_time_s=time.time())
        self._preemptions = [0] * sampling.n
        self._last_finish: list[bool] = [False] * sampling.n
        self._is_final_shown = False
        self._interval = sampling.stream_interval or default_interval

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def feed(self, index: int, delta: RequestDelta) -> bool:
        """Take in news of one output; True if the engine must abort it (a stop string was found)."""
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.queued_s is not None and self.metrics.queued_s is None:
            self.metrics.queued_s = delta.queued_s
        if delta.new_token_ids and self.metrics.first_token_time_s is None:
            self.metrics.first_token_time_s = time.time()
        if delta.prompt_logprobs and self.prompt_logprobs is not None and index == 0:
            # After a preemption positions come a second time; only what is missing is taken.
            missing = len(self.prompt.token_ids) - len(self.prompt_logprobs)
            decode = self.outputs[0].decode_logprobs
            self.prompt_logprobs += [decode(entry) for entry in delta.prompt_logprobs[:missing]]
        if delta.kv_transfer_params is not None:
            self.kv_transfer_params = delta.kv_transfer_params
        self._preemptions[index] = max(self._preemptions[index], delta.num_preemptions)
        self.metrics.num_preemptions = sum(self._preemptions)
        must_abort = self.outputs[index].feed(delta)
        if self.is_finished:
            self.metrics.finished_time_s = time.time()
        return must_abort

    def fail(self, index: int, message: str) -> None:
        """End one output with an error, if it has not ended."""
        self.outputs[index].fail(message)
        if self.is_finished:
            self.metrics.finished_time_s = time.time()

    def take(self) -> RequestOutput | None:
        """What there is to show by ``output_kind`` and ``stream_interval``, or None. The last one has ``finished``."""
        kind, finished = self.sampling.output_kind, self.is_finished
        if self._is_final_shown or (kind is OutputKind.FINAL_ONLY and not finished):
            return None
        is_delta = kind is OutputKind.DELTA
        ready = [output for output in self.outputs if self._is_ready(output)]
        if not ready and not finished:
            return None
        for output in ready:
            self._last_finish[output.index] = output.finish_reason is not None
        self._is_final_shown = finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[output.output(is_delta=is_delta) for output in (ready if is_delta else self.outputs)],
            finished=finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _is_ready(self, output: OutputState) -> bool:
        """Whether there is news to show: its end (once), its first token, or ``stream_interval`` tokens."""
        if output.finish_reason is not None:
            return not self._last_finish[output.index]
        num_new, is_first = len(output.news.token_ids), len(output.total.token_ids) == len(output.news.token_ids)
        return output.has_news and (num_new >= self._interval or is_first)
