"""Messages: typed, bounded, and nothing else gets through."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet.engine.messages import (
    Abort,
    Add,
    Deltas,
    Heartbeat,
    Shutdown,
    Utility,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from rabbet.engine.transport import Receiver, connect
from rabbet.types.outputs import FinishReason, RequestDelta, TokenLogprobs
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams, StructuredOutputsParams
from rabbet.worker.directory import SocketDirectory


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], Receiver]]:
    """A socket to write to and the receiver at its other end."""
    directory, context = SocketDirectory(), zmq.Context()
    inbox = connect(context, zmq.PULL, directory.address("to-engine"), bind=True)
    outbox = connect(context, zmq.PUSH, directory.address("to-engine"), bind=False)
    yield outbox, Receiver(inbox, decode_to_engine)
    outbox.close(0)
    inbox.close(0)
    context.term()
    directory.close()


def receive(receiver: Receiver, count: int) -> list[object]:
    messages: list[object] = []
    deadline = time.monotonic() + 10
    while len(messages) < count:
        # Nothing at all may come of a wait: what came was dropped.
        assert time.monotonic() < deadline, "nothing came"
        messages += receiver.receive(1.0)
    return messages


def test_a_request_travels_whole() -> None:
    sampling = SamplingParams(
        seed=-5,
        logit_bias={3: -2.5},
        stop=["x"],
        structured_outputs=StructuredOutputsParams(choice=["a"]),
        max_tokens=9,
    )
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling=sampling, max_tokens=9, cache_salt="s")
    assert decode_to_engine(encode(Add(request=request))) == Add(request=request)


def test_deltas_travel_whole() -> None:
    logprobs = [TokenLogprobs(token_ids=[1, 2], logprobs=[-0.5, -1.0], ranks=[1, 2])]
    delta = RequestDelta(
        request_id="r",
        new_token_ids=[1],
        logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        stop_reason="x",
        queued_s=0.5,
    )
    assert decode_from_engine(encode(Deltas(deltas=[delta]))) == Deltas(deltas=[delta])


def test_rubbish_is_dropped_with_one_line_and_the_rest_arrives(
    pair: tuple[zmq.Socket[bytes], Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    outbox, receiver = pair
    caplog.set_level(logging.WARNING)
    rubbish = [
        b"",
        b"\xc1",
        pickle.dumps({"a": 1}),
        encode(["Shutdown", "soon"]),
        encode(["Nothing", 1]),
        encode({"type": "Shutdown", "timeout_s": 1.0}),
        encode(Heartbeat(busy_s=0.0, stats=None)),  # type: ignore[arg-type]
        b"\x91" * 5000,
    ]
    for data in rubbish:
        outbox.send(data)
    outbox.send_multipart([encode(Abort(request_ids=["a"])), b"more"])
    outbox.send(encode(Abort(request_ids=["r"])))
    assert receive(receiver, 1) == [Abort(request_ids=["r"])]
    assert receiver.num_dropped == len(rubbish) + 1
    assert len(caplog.records) == 1


def test_parameters_out_of_range_are_no_message(pair: tuple[zmq.Socket[bytes], Receiver]) -> None:
    """Whoever writes to the socket cannot get past the checks of ``SamplingParams``."""
    outbox, receiver = pair
    request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), max_tokens=1)
    outbox.send(encode(Add(request=request)).replace(b"\xabtemperature\xcb\x3f\xf0", b"\xabtemperature\xcb\xff\xf0"))
    outbox.send(encode(Shutdown(timeout_s=1.0)))
    assert receive(receiver, 1) == [Shutdown(timeout_s=1.0)]
    assert receiver.num_dropped == 1


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_what_the_receiver_expects(data: bytes) -> None:
    receiver = Receiver(_Once([data]), decode_to_engine)  # type: ignore[arg-type]
    assert all(isinstance(item, Add | Abort | Utility | Shutdown) for item in receiver.receive(0.0))


class _Once:
    """A socket with a few messages."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    def recv_multipart(self, _flags: int) -> list[bytes]:
        if not self._messages:
            raise zmq.Again
        return [self._messages.pop()]
