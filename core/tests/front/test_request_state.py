"""A request's outputs grow from deltas: text, stops, log probabilities, what is shown when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rabbet.front.outputs import RequestOutput
from rabbet.front.processor import TokenizedPrompt
from rabbet.front.request_state import RequestState
from rabbet.front.tokenizer import Tokenizer
from rabbet.types.outputs import FinishReason, RequestDelta, TokenLogprobs
from rabbet.types.sampling import OutputKind, SamplingParams


def state_of(tokenizer: Tokenizer | None, **sampling: Any) -> RequestState:
    return RequestState("r", TokenizedPrompt("p", [1, 2, 3]), SamplingParams(**sampling), tokenizer)


def delta_of(text: str | list[int], finish: FinishReason | None = None, **fields: Any) -> RequestDelta:
    ids = list(text.encode()) if isinstance(text, str) else text
    return RequestDelta(request_id="e", new_token_ids=ids, finish_reason=finish, **fields)


def final(state: RequestState) -> RequestOutput:
    output = state.take()
    assert output is not None and output.finished
    return output


def test_cumulative_outputs_hold_everything_so_far(byte_level: Tokenizer) -> None:
    state = state_of(byte_level)
    state.feed(0, delta_of("ab"))
    first = state.take()
    assert state.take() is None, "no news, no output"
    state.feed(0, delta_of("c", FinishReason.LENGTH))
    assert first is not None and first.outputs[0].text == "ab" and not first.finished
    assert final(state).outputs[0].text == "abc"
    assert state.take() is None


def test_deltas_of_a_slow_reader_are_merged(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, output_kind=OutputKind.DELTA)
    for letter in "abc":
        state.feed(0, delta_of(letter))
    (first,) = state.take().outputs  # type: ignore[union-attr]
    assert first.text == "abc" and first.token_ids == [97, 98, 99]
    state.feed(0, delta_of("d", FinishReason.LENGTH))
    (last,) = final(state).outputs
    assert last.text == "d" and last.finish_reason == "length"


@pytest.mark.parametrize("kind", [OutputKind.DELTA, OutputKind.CUMULATIVE])
def test_an_interval_holds_back_all_but_the_first_and_the_last(byte_level: Tokenizer, kind: OutputKind) -> None:
    state, shown = state_of(byte_level, output_kind=kind, stream_interval=3), []
    for index in range(8):
        state.feed(0, delta_of("a", FinishReason.LENGTH if index == 7 else None))
        shown.append(state.take() is not None)
    assert shown == [True, False, False, True, False, False, True, True]


def test_only_the_end_is_shown_if_asked(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, output_kind=OutputKind.FINAL_ONLY)
    state.feed(0, delta_of("ab"))
    assert state.take() is None
    state.feed(0, delta_of("c", FinishReason.LENGTH))
    assert final(state).outputs[0].token_ids == [97, 98, 99]


@pytest.mark.parametrize("keep", [True, False])
def test_a_stop_string_across_tokens_ends_the_output_and_aborts(byte_level: Tokenizer, keep: bool) -> None:
    state = state_of(byte_level, stop=["END"], include_stop_str_in_output=keep)
    assert not state.feed(0, delta_of("the E"))
    assert not state.feed(0, delta_of("N"))
    assert state.feed(0, delta_of("Dxy"))
    output = final(state).outputs[0]
    assert output.text == ("the END" if keep else "the ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "END")
    assert bytes(output.token_ids) == b"the END", "tokens of the stop string count, what comes after does not"
    assert not state.feed(0, delta_of("more", FinishReason.ABORT)), "nothing after the end"


def test_a_stop_string_in_the_last_delta_needs_no_abort(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, stop=["b"])
    assert not state.feed(0, delta_of("ab", FinishReason.LENGTH))
    assert final(state).outputs[0].finish_reason == "stop"


def test_half_a_stop_string_at_the_end_is_text(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, stop=["END!"])
    state.feed(0, delta_of("the EN"))
    assert state.take().outputs[0].text == "the "  # type: ignore[union-attr]
    state.feed(0, delta_of("D", FinishReason.LENGTH))
    output = final(state).outputs[0]
    assert output.text == "the END" and output.finish_reason == "length"


def test_a_stop_string_does_not_end_before_min_tokens(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, stop=["x"], min_tokens=4, max_tokens=9)
    assert not state.feed(0, delta_of("axbx"))
    assert state.feed(0, delta_of("cx"))
    assert final(state).outputs[0].text == "axbxc"


@pytest.mark.parametrize(("keep", "text"), [(False, "hi"), (True, "hi!")])
def test_the_stop_id_is_a_token_but_no_text(byte_level: Tokenizer, keep: bool, text: str) -> None:
    state = state_of(byte_level, stop_token_ids=[33], include_stop_str_in_output=keep)
    state.feed(0, delta_of("hi!", FinishReason.STOP, stop_reason=33))
    output = final(state).outputs[0]
    assert (output.text, output.token_ids[-1], output.stop_reason) == (text, 33, 33)


def test_bytes_pending_at_the_end_come_once(byte_level: Tokenizer) -> None:
    state, shown = state_of(byte_level, output_kind=OutputKind.DELTA), []
    for token_id, finish in [(0x61, None), (0xE2, None), (0x82, FinishReason.LENGTH)]:
        state.feed(0, delta_of([token_id], finish))
        shown.append(state.take())
    assert "".join(item.outputs[0].text for item in shown if item) == "a\ufffd"
    assert [item.outputs[0].text for item in shown if item][-1] == "\ufffd"


def test_logprobs_and_their_sum(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, logprobs=1)
    logprobs = [TokenLogprobs(token_ids=[97, 98], logprobs=[-0.5, -1.0], ranks=[1, 2]) for _ in range(2)]
    state.feed(0, delta_of("aa", FinishReason.LENGTH, logprobs=logprobs))
    output = final(state).outputs[0]
    assert output.cumulative_logprob == -1.0 and output.logprobs is not None and len(output.logprobs) == 2
    assert list(output.logprobs[0]) == [97, 98] and output.logprobs[0][98].decoded_token == "b"
    assert state_of(byte_level).outputs[0].output(is_delta=False).logprobs is None


def test_prompt_logprobs_start_with_none_and_come_once(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, prompt_logprobs=0)
    entry = TokenLogprobs(token_ids=[2], logprobs=[-1.0], ranks=[3])
    state.feed(0, delta_of([], prompt_logprobs=[entry]))
    state.feed(0, delta_of("a", FinishReason.LENGTH, prompt_logprobs=[entry, entry]))
    prompt_logprobs = final(state).prompt_logprobs
    assert prompt_logprobs is not None and len(prompt_logprobs) == 3 and prompt_logprobs[0] is None


def test_every_output_of_several_ends_once(byte_level: Tokenizer) -> None:
    state = state_of(byte_level, n=3, output_kind=OutputKind.DELTA)
    ends: list[int] = []
    for step, index in itertools.product(range(4), range(3)):
        state.feed(index, delta_of("a", FinishReason.LENGTH if step == index + 1 else None))
        if (output := state.take()) is not None:
            ends += [item.index for item in output.outputs if item.finish_reason]
    assert ends == [0, 1, 2]


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    state = state_of(None, detokenize=False)
    state.feed(0, delta_of("ab", FinishReason.LENGTH))
    assert final(state).outputs[0].text == "" and final_tokens(state) == [97, 98]


def final_tokens(state: RequestState) -> list[int]:
    return state.outputs[0].total.token_ids


def test_an_output_that_failed_stays_failed(byte_level: Tokenizer) -> None:
    state = state_of(byte_level)
    state.feed(0, delta_of("a"))
    state.fail(0, "why")
    state.feed(0, delta_of("b", FinishReason.LENGTH))
    output = final(state).outputs[0]
    assert (output.finish_reason, output.error, output.text) == ("error", "why", "a")
