"""Decides whether a request ends with the token that it just got."""

from __future__ import annotations

from rabbet.types.outputs import FinishReason
from rabbet.types.request import Request
from rabbet.types.sampling import RepetitionDetection

__all__ = ["check_stop"]


def check_stop(request: Request, max_len: int) -> FinishReason | None:
    """The reason to end after the last known token, or None. Sets ``stop_reason`` for stop ids and repetition.

    Order: end token, stop id, length, repetition. Below ``min_tokens`` only length counts: the sampler masks the end
    tokens there, and one that comes all the same (it was the only id allowed) is a token like any other.

    Args:
        request: With the new token as its last.
        max_len: Most tokens that prompt and output may have together.
    """
    spec, sampling = request.spec, request.spec.sampling
    token_id = request.token_ids[-1]
    num_output = request.num_output_tokens
    has_minimum = num_output >= sampling.min_tokens
    if has_minimum and not sampling.ignore_eos and token_id in spec.eos_token_ids:
        return FinishReason.STOP
    if has_minimum and token_id in sampling.stop_token_ids:
        request.stop_reason = token_id
        return FinishReason.STOP
    if num_output >= spec.max_tokens or request.num_known_tokens >= max_len:
        return FinishReason.LENGTH
    detection = sampling.repetition_detection
    if detection is not None and has_minimum and _repeats(request, detection):
        request.stop_reason = "repetition_detected"
        return FinishReason.REPETITION
    return None


def _repeats(request: Request, detection: RepetitionDetection) -> bool:
    """Whether the generated tail is one pattern ``min_count`` times in a row."""
    tail = request.token_ids
    num_output = request.num_output_tokens
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > num_output:
            return False
        if all(tail[-i] == tail[-i - size] for i in range(1, span - size + 1)):
            return True
    return False
