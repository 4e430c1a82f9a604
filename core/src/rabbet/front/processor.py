"""Turns a prompt and its parameters into engine requests; every limit is checked here, as the caller's error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rabbet._util.text import check_plain
from rabbet.errors import ClientError, ContextLengthError, InvalidRequestError, RequestFailedError, shorten
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams

__all__ = ["Processor", "Prompt", "TokenizedPrompt"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; the last two may hold ``cache_salt``."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_MAX_SALT_CHARS = 128
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as tokens, with its text where there was one."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class Processor:
    """Checks and tokenises for one engine."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._eos_token_ids = list(eos_token_ids)
        self._has_warned = False
        self.checks: list[tuple[str, Callable[[SamplingParams], None]]] = []
        self._bad_words_made: tuple[list[str], list[list[int]]] = ([], [])
        self._checked: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Tokens of a prompt in any of its forms.

        Raises:
            InvalidRequestError: If it is empty, of no known form, or holds ids outside the vocabulary.
        """
        salt = None
        if isinstance(prompt, Mapping):
            if unknown := sorted(str(key) for key in prompt if key not in _PROMPT_KEYS):
                shown = ", ".join(map(shorten, unknown[:4]))
                raise InvalidRequestError(
                    f"a prompt mapping holds {shown}; known are {', '.join(_PROMPT_KEYS)}", field="prompt"
                )
            salt = self._salt(prompt.get("cache_salt"))
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not known:
                raise InvalidRequestError("a prompt mapping needs 'prompt' or 'prompt_token_ids'", field="prompt")
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("the tokenizer is off (skip_tokenizer_init); give token ids", field="prompt")
            self._check_chars(prompt)
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if not ids:
                raise InvalidRequestError("prompt is empty", field="prompt", value=prompt)
            if add_special_tokens:
                self._warn_of_double_start(ids)
            return TokenizedPrompt(prompt, ids, salt)
        return TokenizedPrompt(None, self._ids(prompt), salt)

    def _check_chars(self, text: str) -> None:
        """Refuse a text that cannot fit, before the seconds that it would take to tokenise it."""
        if self.tokenizer is None or len(text) <= self.max_model_len:
            return
        least = -(-len(text) // self.tokenizer.max_token_chars)
        if least > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which are at least {least} tokens, but the context is "
                f"{self.max_model_len} tokens long; shorten the prompt",
                field="prompt",
            )

    def _warn_of_double_start(self, ids: Sequence[int]) -> None:
        if self._has_warned or self.tokenizer is None or len(ids) < 2 or ids[0] != ids[1]:
            return
        if ids[0] in self.tokenizer.special_ids:
            self._has_warned = True
            logger.warning(
                "a prompt starts with the token %r twice: its text has it and the tokenizer adds it; pass it without, "
                "or set add_special_tokens to false (said once)",
                self.tokenizer.token(ids[0]),
            )

    def _ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, list | tuple) or isinstance(prompt, str):
            raise InvalidRequestError(
                f"prompt is {shorten(prompt)}, but must be text or a list of token ids", field="prompt", value=prompt
            )
        if not prompt:
            raise InvalidRequestError("prompt is empty", field="prompt", value=[])
        for token_id in prompt:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt holds {shorten(token_id)}; token ids go from 0 to {self._vocab_size - 1}",
                    field="prompt",
                    value=token_id,
                )
        return list(prompt)

    @staticmethod
    def _salt(salt: Any) -> str | None:
        if salt is None:
            return None
        if not isinstance(salt, str) or not 1 <= len(salt) <= _MAX_SALT_CHARS or not salt.isprintable():
            raise InvalidRequestError(
                f"cache_salt must be printable text of 1 to {_MAX_SALT_CHARS} characters",
                field="cache_salt",
                value=salt,
            )
        return salt

    def check_salt(self, salt: Any) -> str | None:
        """A salt that may be used, or None.

        Raises:
            InvalidRequestError: If it is empty, too long, or not printable.
        """
        return self._salt(salt)

    def make_request(
        self,
        prompt: TokenizedPrompt,
        sampling: SamplingParams,
        *,
        request_id: str,
        arrival_time_s: float,
        priority: int = 0,
        clamp_max_tokens: bool = False,
    ) -> EngineRequest:
        """The engine's form of one request (``n`` is 1).

        Args:
            prompt: Its tokens.
            sampling: Its parameters.
            request_id: A fresh id.
            arrival_time_s: ``time.time()``.
            priority: Lower goes first.
            clamp_max_tokens: Lower a ``max_tokens`` beyond the context instead of refusing it.

        Raises:
            ContextLengthError: With limit, prompt tokens and asked output.
            InvalidRequestError: For ids outside the vocabulary and the like.
        """
        bad_words = self._bad_words(sampling.bad_words)
        self._check_once(sampling, bad_words)
        _check_free(priority, sampling.extra_args)
        num_prompt = len(prompt.token_ids)
        room = self.max_model_len - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, but the context is {self.max_model_len} tokens long and needs "
                "room for at least one output token; shorten the prompt",
                field="prompt",
                value=num_prompt,
            )
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if wanted > room and not clamp_max_tokens:
            raise ContextLengthError(
                f"max_tokens is {wanted} and the prompt has {num_prompt} tokens, but the context is "
                f"{self.max_model_len} tokens long; shorten the prompt, or ask for at most {room} tokens",
                field="max_tokens",
                value=wanted,
            )
        max_tokens = min(wanted, room)
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {sampling.min_tokens}, but only {max_tokens} tokens can be generated",
                field="min_tokens",
                value=sampling.min_tokens,
            )
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=self._bounded(sampling, max_tokens),
            max_tokens=max_tokens,
            eos_token_ids=[] if sampling.ignore_eos else self._eos_token_ids,
            bad_words_token_ids=bad_words,
            arrival_time_s=arrival_time_s,
            priority=priority,
            cache_salt=prompt.cache_salt,
        )

    def _check_once(self, sampling: SamplingParams, bad_words: list[list[int]]) -> None:
        """Check what belongs to the vocabulary. The prompts and outputs of a request share their lists: once is enough."""
        lists = (
            sampling.stop_token_ids, sampling.allowed_token_ids, sampling.logprob_token_ids, sampling.logit_bias,
            sampling.bad_words,
        )  # fmt: skip
        numbers = (
            sampling.logprobs, sampling.prompt_logprobs, sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos
        )  # fmt: skip
        known, same = self._checked
        if same == numbers and all(one is other for one, other in zip(lists, known, strict=True)):
            return
        sampling.check_against_model(vocab_size=self._vocab_size, max_logprobs=self._max_logprobs)
        self._ask_processors(sampling)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        if sampling.min_tokens and sampling.allowed_token_ids and ends.issuperset(sampling.allowed_token_ids):
            raise InvalidRequestError(
                f"min_tokens is {sampling.min_tokens}, but every one of allowed_token_ids ends the text",
                field="allowed_token_ids",
            )
        if self._can_run_out(sampling, bad_words, ends):
            raise InvalidRequestError(
                "bad_words and what else limits the choice leave no token to choose, at once or after some text; drop "
                "some of them, or allow more token ids",
                field="bad_words",
            )
        self._checked = (lists, numbers)

    def _can_run_out(self, sampling: SamplingParams, bad_words: list[list[int]], ends: set[int]) -> bool:
        """Whether there is a text after which every token that is allowed would complete a bad word, or end too early."""
        allowed = sampling.allowed_token_ids or range(self._vocab_size)
        if not bad_words or not {ids[-1] for ids in bad_words}.union(ends).issuperset(allowed):
            return False
        # A beginning that was generated bans the last token of its word, and with it all that are an end of it do.
        lasts: dict[tuple[int, ...], set[int]] = {}
        for ids in bad_words:
            lasts.setdefault(tuple(ids[:-1]), set()).add(ids[-1])
        never = lasts.pop((), set())
        lengths = sorted({len(begun) for begun in lasts})
        max_tokens = sampling.max_tokens or self.max_model_len
        left = {True: set(allowed) - never - ends, False: set(allowed) - never}
        for begun in ((), *lasts):
            free = left[len(begun) < sampling.min_tokens]
            if len(begun) < max_tokens and left[False].issuperset(begun):
                banned = [lasts[begun[-k:]] for k in lengths if k <= len(begun) and begun[-k:] in lasts]
                if sum(map(len, banned)) >= len(free) and not free.difference(*banned):
                    return True
        return False

    def _ask_processors(self, sampling: SamplingParams) -> None:
        for name, validate in self.checks:
            try:
                validate(sampling)
            except ClientError:
                raise
            except ValueError as error:
                raise InvalidRequestError(f"the logits processor {name}: {error}", field="extra_args") from error
            except BaseException as error:  # the edge of the plugin
                told = f"the logits processor {name} failed to check the request: {type(error).__name__}"
                raise RequestFailedError(told, plugin=f"logits_processor/{name}") from error

    def _bounded(self, sampling: SamplingParams, max_tokens: int) -> SamplingParams:
        """The same parameters with numbers that fit into a message, and without what only the front needs."""
        changes: dict[str, Any] = {}
        if sampling.max_tokens != max_tokens:
            changes["max_tokens"] = max_tokens
        if sampling.top_k > self._vocab_size:
            changes["top_k"] = 0
        if sampling.stream_interval is not None:
            changes["stream_interval"] = None
        return sampling.clone(**changes) if changes else sampling

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as it stands at the start of a text and after a space. All prompts of a request have the same words."""
        if not words:
            return []
        if self._bad_words_made[0] == words:
            return self._bad_words_made[1]
        if self.tokenizer is None:
            raise InvalidRequestError("bad_words needs the tokenizer, which is off", field="bad_words")
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                sequences[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        made = [list(ids) for ids in sequences if ids]
        self._bad_words_made = (list(words), made)
        return made


def _check_free(priority: Any, extra_args: Any) -> None:
    """What the engine does not look into, but has to be told in its messages."""
    for name, value, kind in (("priority", priority, int), ("extra_args", extra_args, dict | None)):
        try:
            if not isinstance(value, kind):
                raise ValueError(f"is {shorten(value)}, but must be {'an integer' if kind is int else 'a dict'}")
            check_plain(value)
        except ValueError as error:
            raise InvalidRequestError(f"{name} {error}", field=name, value=value) from None
