"""What a request may be, and what its refusal says."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rabbet.errors import ContextLengthError, InvalidRequestError
from rabbet.front.processor import Processor, TokenizedPrompt
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams


@pytest.fixture
def processor(byte_level: Tokenizer) -> Processor:
    return Processor(byte_level, vocab_size=300, max_model_len=20, max_logprobs=5, eos_token_ids=[256])


def make(processor: Processor, num_prompt: int, clamp: bool = False, **sampling: Any) -> EngineRequest:
    prompt = TokenizedPrompt(None, [1] * num_prompt)
    return processor.make_request(
        prompt, SamplingParams(**sampling), request_id="r", arrival_time_s=0.0, clamp_max_tokens=clamp
    )


@pytest.mark.parametrize("prompt", ["hi", {"prompt": "hi"}, {"prompt_token_ids": [257, 104, 105]}, [257, 104, 105]])
def test_all_forms_of_a_prompt_are_the_same_tokens(processor: Processor, prompt: Any) -> None:
    assert processor.tokenize(prompt).token_ids == [257, 104, 105]


def test_tokens_may_come_with_their_text_and_a_salt(processor: Processor) -> None:
    prompt = processor.tokenize({"prompt": "ignored", "prompt_token_ids": [5], "cache_salt": "s"})
    assert prompt.token_ids == [5] and prompt.cache_salt == "s"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": None}, "needs"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ([1, "a"], "token ids go from 0 to 299"),
        ([True], "token ids"),
        ([1.5], "token ids"),
        ([-1], "token ids"),
        ([300], "token ids"),
        ([1 << 63], "token ids"),
        (5, "must be text or a list"),
        ("\ud800", "surrogates"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "a\nb"}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "x" * 1000}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
    ],
)
def test_wrong_prompts_are_refused(processor: Processor, prompt: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        processor.tokenize(prompt)
    assert len(str(caught.value)) < 250


def test_an_empty_text_without_a_start_token_is_refused(processor: Processor) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        processor.tokenize("", add_special_tokens=False)


def test_a_text_far_too_long_is_refused_before_it_is_tokenised(
    processor: Processor, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_level, "encode", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(ContextLengthError, match="context is 20 tokens"):
        processor.tokenize("x" * 1_000_000)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "clamp", "expected"),
    [(8, None, False, 12), (8, 12, False, 12), (8, 13, True, 12), (19, None, False, 1), (8, 1 << 80, True, 12)],
)
def test_room_for_output(
    processor: Processor, num_prompt: int, max_tokens: int | None, clamp: bool, expected: int
) -> None:
    request = make(processor, num_prompt, clamp, max_tokens=max_tokens)
    assert request.max_tokens == request.sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "clamp", "field"),
    [(20, None, True, "prompt"), (30, 5, True, "prompt"), (8, 13, False, "max_tokens"), (19, 2, False, "max_tokens")],
)
def test_what_does_not_fit_names_limit_prompt_and_output(
    processor: Processor, num_prompt: int, max_tokens: int | None, clamp: bool, field: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        make(processor, num_prompt, clamp, max_tokens=max_tokens)
    assert caught.value.field == field and caught.value.code == "context_length_exceeded"
    assert "20" in str(caught.value) and str(num_prompt) in str(caught.value)
    assert field == "prompt" or str(max_tokens) in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"logprobs": 6}, "at most 5"),
        ({"prompt_logprobs": -1}, "at most 5"),
        ({"stop_token_ids": [300]}, "0 to 299"),
        ({"logit_bias": {-1: 2.0}}, "0 to 299"),
        ({"allowed_token_ids": [1 << 40]}, "0 to 299"),
        ({"min_tokens": 13, "max_tokens": None}, "only 12 tokens"),
        ({"min_tokens": 10**9, "max_tokens": None}, "only 12 tokens"),
    ],
)
def test_parameters_that_the_model_cannot_serve(processor: Processor, sampling: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        make(processor, 8, **sampling)


def test_numbers_of_any_size_fit_into_a_message(processor: Processor) -> None:
    from rabbet.engine.messages import Add, encode

    request = make(processor, 8, True, max_tokens=10**30, top_k=10**30, stream_interval=10**30)
    assert encode(Add(request=request))


def test_tokens_that_all_end_the_text_cannot_be_all_that_is_allowed_before_min_tokens(processor: Processor) -> None:
    for options in ({"stop_token_ids": [7, 8], "allowed_token_ids": [7]}, {"allowed_token_ids": [256]}):
        with pytest.raises(InvalidRequestError, match="min_tokens is 2, but every one of allowed_token_ids") as caught:
            make(processor, 1, max_tokens=4, min_tokens=2, **options)
        assert caught.value.field == "allowed_token_ids"
        make(processor, 1, max_tokens=4, **options)
    make(processor, 1, max_tokens=4, min_tokens=2, allowed_token_ids=[256], ignore_eos=True)
    make(processor, 1, max_tokens=4, min_tokens=2, allowed_token_ids=[256, 5])


def test_end_tokens_go_along_unless_they_are_ignored(processor: Processor) -> None:
    assert make(processor, 1, max_tokens=1).eos_token_ids == [256]
    assert make(processor, 1, max_tokens=1, ignore_eos=True).eos_token_ids == []


def test_bad_words_stand_at_the_start_and_after_a_space(processor: Processor) -> None:
    request = make(processor, 1, max_tokens=1, bad_words=["ab"])
    assert request.bad_words_token_ids == [[97, 98], [261, 98]]


def test_bad_words_of_many_prompts_are_tokenised_once(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = processor.tokenizer
    assert tokenizer is not None
    texts: list[str] = []
    encode = tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    requests = [make(processor, 1, max_tokens=1, bad_words=["ab", "cd"]) for _ in range(5)]
    assert len({str(request.bad_words_token_ids) for request in requests}) == 1
    assert len([text for text in texts if "ab" in text]) == 2
    assert make(processor, 1, max_tokens=1, bad_words=["cd"]).bad_words_token_ids == requests[0].bad_words_token_ids[2:]


def test_a_doubled_start_token_is_said_once(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        processor.tokenize("<start>hi")
    assert len(caplog.records) == 1 and "twice" in caplog.text
    processor.tokenize("<start>hi", add_special_tokens=False)


def test_without_a_tokenizer_only_tokens_are_taken() -> None:
    processor = Processor(None, vocab_size=300, max_model_len=20, max_logprobs=5, eos_token_ids=[])
    assert processor.tokenize([1]).token_ids == [1]
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        processor.tokenize("text")
    with pytest.raises(InvalidRequestError, match="bad_words"):
        make(processor, 1, max_tokens=1, bad_words=["x"])


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, True),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a"]}, False),
        ({"allowed_token_ids": [97], "bad_words": ["aa"]}, True),
        ({"allowed_token_ids": [97], "bad_words": ["aa"], "max_tokens": 1}, False),
        ({"allowed_token_ids": [97, 98], "bad_words": ["aa", "ab"]}, True),
        ({"allowed_token_ids": [97, 98], "bad_words": ["ab", "ba"]}, False),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "bb"]}, True),
        ({"allowed_token_ids": [97, 98], "bad_words": ["b", "bba", "aa"]}, True),
        ({"allowed_token_ids": [97], "bad_words": ["ba"]}, False),
        ({"allowed_token_ids": [97, 256], "bad_words": ["a"]}, False),
        ({"allowed_token_ids": [97, 256], "bad_words": ["a"], "min_tokens": 1}, True),
        ({"allowed_token_ids": [97, 256], "bad_words": ["aa"], "min_tokens": 1}, False),
        ({"allowed_token_ids": [97, 256], "bad_words": ["aa"], "min_tokens": 2}, True),
    ],
    ids=str,
)
def test_bad_words_must_leave_a_token(processor: Processor, options: dict[str, Any], is_refused: bool) -> None:
    """After any text that can come: what is left is counted for each beginning of a bad word."""
    options = {"max_tokens": 4} | options
    if not is_refused:
        make(processor, 1, **options)
        return
    with pytest.raises(InvalidRequestError, match="bad_words .* leave no token") as caught:
        make(processor, 1, **options)
    assert caught.value.field == "bad_words"


def test_bad_words_of_a_whole_vocabulary_are_refused(byte_level: Tokenizer) -> None:
    small = Processor(byte_level, vocab_size=100, max_model_len=20, max_logprobs=5, eos_token_ids=[])
    words = [byte_level.token(i) for i in range(33, 100)]
    with pytest.raises(InvalidRequestError, match="leave no token"):
        make(
            small,
            1,
            max_tokens=2,
            bad_words=[chr(i) for i in range(1, 100) if i != 32] + ["x"],
            allowed_token_ids=[*range(33, 100)],
        )
    make(small, 1, max_tokens=2, bad_words=words)


def test_many_bad_words_and_allowed_ids_are_checked_once_and_soon(byte_level: Tokenizer) -> None:
    """Of one request: its prompts and outputs share the lists."""
    processor = Processor(byte_level, vocab_size=262, max_model_len=20, max_logprobs=5, eos_token_ids=[256])
    looks = 0

    class Counted(list[int]):
        def __iter__(self) -> Any:
            nonlocal looks
            looks += 1
            return super().__iter__()

    sampling = SamplingParams(
        max_tokens=4,
        n=4,
        temperature=1.0,
        allowed_token_ids=Counted([97, 98]),
        bad_words=["ab" * k for k in range(1, 90)],
    )
    by_now = None
    for seed in range(50):
        processor.make_request(
            TokenizedPrompt(None, [1]), sampling.clone(n=1, seed=seed), request_id="r", arrival_time_s=0.0
        )
        by_now = by_now or looks
    assert looks == by_now
