"""The suite of logits processors on the twin, and its reference by hand."""

from __future__ import annotations

import torch
from rabbet_sdk.conformance import LogitsProcessorConformance
from rabbet_sdk.conformance.logits_processor import _no_repeat_last

from rabbet.types.sampling import SamplingParams


class TestStrict(LogitsProcessorConformance):
    plugin = "logits_processor/strict"


def test_reference_by_hand() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    low = float("-inf")
    two, many = (SamplingParams(extra_args={"no_repeat_last": span}) for span in (2, 9))
    assert _no_repeat_last(logits, two, [0], [2, 0, 0]).tolist() == [low, 2.0, 3.0]
    assert _no_repeat_last(logits, many, [0], [2, 1, 0]).tolist() == [low, low, 3.0]
    assert _no_repeat_last(logits, SamplingParams(), [0], [2]).tolist() == logits.tolist()
