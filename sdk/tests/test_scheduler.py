"""The suite of schedulers on the twin, and its oracles by hand."""

from __future__ import annotations

from rabbet_sdk.conformance import SchedulerConformance
from rabbet_sdk.conformance._scheduler_rig import EOS, Ledger, answer, make_request, next_token

from rabbet.types.outputs import FinishReason
from rabbet.types.request import Request
from rabbet.types.sampling import RepetitionDetection


class TestStrict(SchedulerConformance):
    plugin = "scheduler/strict"


def test_answers_end_where_the_request_says() -> None:
    prompt = [next(n for n in range(40) if next_token([n]) == EOS)]
    assert answer(make_request("a", prompt)) == ([EOS], FinishReason.STOP)
    longer, reason = answer(make_request("a", prompt, min_tokens=2))
    assert longer[0] == EOS and len(longer) > 1 and reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert answer(make_request("a", prompt, 1, ignore_eos=True)) == ([EOS], FinishReason.LENGTH)
    rule = RepetitionDetection(max_pattern_size=1, min_count=2)
    output, reason = answer(make_request("a", prompt, 500, ignore_eos=True, repetition_detection=rule), 10**6)
    assert reason is FinishReason.LENGTH or output[-1] == output[-2]
    assert len(answer(make_request("a", prompt, 500, ignore_eos=True), 11)[0]) == 10


def test_blocks_are_found_again_by_what_stands_before_them() -> None:
    kv = Ledger(6)

    def request(name: str, tokens: list[int], salt: str | None = None) -> Request:
        spec = make_request(name, tokens, cache_salt=salt)
        return Request(spec=spec, token_ids=list(tokens), seed=0)

    first = request("a", [1] * 9)
    assert kv.allocate(first, 9) == [[1, 2, 3]] and kv.usage == 0.6
    kv.commit(first, 9)
    assert kv.find_hit(request("b", [1] * 9)).block_ids == ((1, 2),)
    # The last known token is computed anew, whatever is cached.
    assert kv.find_hit(request("b", [1] * 8)).num_tokens == 4
    assert kv.find_hit(request("b", [1] * 9, "salt")).num_tokens == 0
    assert kv.allocate(request("c", [2] * 12), 12) is None
    kv.release(first)
    assert kv.num_free_blocks == 5
    hit = kv.find_hit(request("b", [1] * 9))
    assert (hit.num_tokens, hit.num_idle_blocks) == (8, 2)
    # Whoever takes the blocks ends what was found in them.
    assert kv.allocate(request("c", [2] * 20), 20) is not None
    assert kv.find_hit(request("b", [1] * 9)).num_tokens == 0
