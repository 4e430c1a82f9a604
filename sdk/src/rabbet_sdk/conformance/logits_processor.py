"""The suite of logits processors: a row is its request's alone, slots are used again, drafts and preemptions leave nothing.

An author says in ``wishes`` what requests may ask of the processor, and in ``refused`` what they may not. The reference
of most tests is a fresh processor with one request and one row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from rabbet.contracts.logits_processor import LogitsBatch, LogitsProcessorContext
from rabbet.errors import ClientError
from rabbet.types.sampling import SamplingParams
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.outcome import level, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.environment import child_environment

__all__ = ["LogitsProcessorConformance"]

_SLOTS = 7
_FRONT = """
import sys
from rabbet.registry.catalog import Catalog
from rabbet.registry.loader import load_entry
from rabbet.types.sampling import SamplingParams
name, owner = sys.argv[1:]
entries = Catalog.scan().entries
found = next(e for e in entries if (e.kind, e.name, e.distribution) == ("logits_processor", name, owner))
load_entry(found).validate(SamplingParams())
print(" ".join(m for m in ("torch", "triton") if m in sys.modules))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A request in the middle of its output."""

    sampling: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    seed: int


def _no_repeat_last(
    logits_V: torch.Tensor, sampling: SamplingParams, _prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """What the template promises."""
    span = (sampling.extra_args or {}).get("no_repeat_last", 0)
    banned = set(list(output)[max(0, len(output) - min(span, len(logits_V) - 1)) :])
    values = [float("-inf") if token in banned else value for token, value in enumerate(logits_V.tolist())]
    return torch.tensor(values, dtype=torch.float64)


class LogitsProcessorConformance(PluginConformance):
    """Subclass, name the plugin, say what requests may ask of it.

    Attributes:
        wishes: Fields of ``SamplingParams`` of requests whose rows change; at least two that differ.
        plain: Those of a request that asks for nothing, whose rows stay; None if the processor changes every row.
        refused: Those that ``validate`` has to refuse.
        expected: ``(logits_V, sampling, prompt, output)`` to float64 [V], computed in another way; None leaves it out.
        vocab_size: V.
    """

    kind = "logits_processor"
    wishes: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"extra_args": {"no_repeat_last": 2}},
        {"extra_args": {"no_repeat_last": 5}, "temperature": 0.0},
        {"extra_args": {"no_repeat_last": 64}},
    )
    plain: ClassVar[Mapping[str, Any] | None] = {}
    refused: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"extra_args": {"no_repeat_last": -1}},
        {"extra_args": {"no_repeat_last": "two"}},
        {"extra_args": {"no_repeat_last": 65}},
    )
    expected: ClassVar[Callable[..., torch.Tensor] | None] = staticmethod(_no_repeat_last)
    vocab_size: ClassVar[int] = 40
    knobs = PluginConformance.knobs | {"wishes", "plain", "refused", "expected", "vocab_size"}

    def _build(self, subject: Subject) -> Any:
        context = LogitsProcessorContext(
            device=torch.device(self.device), max_num_requests=_SLOTS, vocab_size=self.vocab_size,
            options=dict(self.options),
        )  # fmt: skip
        return subject.plugin_class(context)

    def _requests(self) -> list[_Request]:
        """Each wish with outputs of several lengths, between requests that ask for nothing."""
        chance = random.Random(11)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(chance.randrange(self.vocab_size) for _ in range(count))

        every = tuple(range(self.vocab_size))
        found: list[_Request] = []
        for wish in [*self.wishes, *([self.plain] if self.plain is not None else [])]:
            for output in (ids(12), (), ids(1), ids(30), (*every, *ids(3)), every[:1] * 9):
                found.append(
                    _Request(sampling=SamplingParams(**wish), prompt=ids(5), output=output, seed=len(found) + 1)
                )
        return chance.sample(found, len(found))

    def _logits(self, request: _Request) -> torch.Tensor:
        generator = torch.Generator().manual_seed(request.seed)
        return torch.randn(self.vocab_size, generator=generator) * 3

    def _add(self, processor: Any, slot: int, request: _Request) -> None:
        processor.add(slot, request.sampling, list(request.prompt))

    def _apply(
        self, processor: Any, rows: Sequence[tuple[int, _Request]], logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One step; the result on the host, [B, V]."""
        if logits is None:
            logits = torch.stack([self._logits(request) for _, request in rows])
        batch = LogitsBatch(
            logits_BV=logits.to(self.device).clone(),
            slots=[slot for slot, _ in rows],
            output_token_ids=[list(request.output) for _, request in rows],
        )
        result = processor.apply(batch)
        assert isinstance(result, torch.Tensor), f"apply gave {type(result).__name__}; the contract asks for a tensor"
        assert result.shape == logits.shape, f"apply gave {tuple(result.shape)} for {tuple(logits.shape)}"
        assert result.dtype == torch.float32, f"apply gave {result.dtype}; logits are float32"
        return result.detach().cpu().clone()

    def _alone(self, subject: Subject, request: _Request) -> torch.Tensor:
        """The row [V] of a fresh processor that knows this request only."""
        processor = self._build(subject)
        self._add(processor, 3, request)
        return self._apply(processor, [(3, request)])[0]

    def _same(self, subject: Subject, got: torch.Tensor, request: _Request, what: str) -> None:
        alone = self._alone(subject, request)
        if not torch.equal(got, alone):
            token = int((got != alone).nonzero()[0])
            raise AssertionError(f"{what}: logit {token} is {got[token]:g}, alone it is {alone[token]:g}; {request}")

    @level(2)
    def test_rows_are_what_is_promised(self, subject: Subject) -> None:
        """Against ``expected`` in float64, within four roundings of float32."""
        if self.expected is None:
            unclaimed("no reference is given (expected)")
        for request in self._requests():
            logits = self._logits(request)
            exact = type(self).expected(logits.double(), request.sampling, request.prompt, request.output)  # type: ignore[misc]
            got = self._alone(subject, request).double()
            near = (got - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact.abs().clamp(min=1)
            wrong = (~(near | (got == exact))).nonzero().flatten().tolist()
            assert not wrong, f"tokens {wrong}: got {got[wrong].tolist()}, expected {exact[wrong].tolist()}; {request}"

    def test_wishes_have_an_effect_and_others_none(self, subject: Subject) -> None:
        """Each wish changes a row, each differs from the first, and rows of requests that ask for nothing stay."""
        changed: dict[str, list[bool]] = {}
        for request in self._requests():
            is_other = not torch.equal(self._alone(subject, request), self._logits(request))
            changed.setdefault(str(request.sampling), []).append(is_other)
        for wish in self.wishes:
            assert any(changed[str(SamplingParams(**wish))]), f"{dict(wish)} changes nothing"
        if self.plain is not None:
            assert not any(changed[str(SamplingParams(**self.plain))]), "changes rows of requests that ask for nothing"

    def test_a_token_is_left(self, subject: Subject) -> None:
        """The highest logit is finite and none is NaN: from such a row nothing could be drawn, and its request fails."""
        for request in self._requests():
            got = self._alone(subject, request)
            is_good = bool(got.amax().isfinite()) and not bool(got.isnan().any())
            assert is_good, f"highest {got.amax():g}, {int(got.isnan().sum())} NaN: {request}"

    def test_greedy_rows_may_skip_only_what_keeps_the_likeliest(self, subject: Subject) -> None:
        """With ``is_argmax_invariant`` the likeliest token is the same before and after."""
        assert isinstance(subject.plugin_class.is_argmax_invariant, bool)
        if not subject.plugin_class.is_argmax_invariant:
            unclaimed("is_argmax_invariant")
        for request in self._requests():
            before, after = int(self._logits(request).argmax()), int(self._alone(subject, request).argmax())
            assert before == after, (
                f"the likeliest token was {before} and is {after}, so greedy tokens differ: {request}"
            )

    def test_a_row_depends_on_its_request_alone(self, subject: Subject) -> None:
        """Any slots, any order, any neighbours, bit by bit; the neighbours' logits are tame, or extreme."""
        requests = self._requests()
        for seed in range(8):
            chance = random.Random(seed)
            chosen, slots = chance.sample(requests, _SLOTS - 1), chance.sample(range(_SLOTS), _SLOTS - 1)
            rows = list(zip(slots, chosen, strict=True))
            for extreme in (None, 1e4, float("-inf")):
                processor = self._build(subject)
                for slot, request in chance.sample(rows, len(rows)):
                    self._add(processor, slot, request)
                mine = chance.randrange(len(rows))
                logits = torch.stack([self._logits(request) for _, request in rows])
                if extreme is not None:
                    others = [i for i in range(len(rows)) if i != mine]
                    logits[others, 1:] = extreme
                got = self._apply(processor, rows, logits)
                for i, (slot, request) in enumerate(rows):
                    if i == mine or extreme is None:
                        self._same(subject, got[i], request, f"row {i}, slot {slot}, neighbours {extreme}")

    def test_verified_drafts_are_rows_of_one_slot(self, subject: Subject) -> None:
        """Each with the tokens before it; there may be more rows than requests."""
        requests = [request for request in self._requests() if len(request.output) >= 9][:3]
        processor = self._build(subject)
        for slot, request in enumerate(requests):
            self._add(processor, slot, request)
        rows = [
            (slot, replace(request, output=request.output[:length], seed=100 + length))
            for slot, request in enumerate(requests)
            for length in range(4, 10)
        ]
        assert len(rows) > _SLOTS
        for i, (got, (slot, request)) in enumerate(zip(self._apply(processor, rows), rows, strict=True)):
            self._same(subject, got, request, f"row {i}, {len(request.output)} tokens of slot {slot}")

    @level(3)
    def test_rejected_drafts_leave_nothing(self, subject: Subject) -> None:
        """Output may grow by several tokens, be shorter again and go on in another way: rejection and recomputation."""
        for request in [request for request in self._requests() if len(request.output) >= 9]:
            processor = self._build(subject)
            self._add(processor, 0, request)
            turned = tuple(self.vocab_size - 1 - token for token in request.output)
            steps = (request.output, request.output[:4], (*request.output[:4], *turned[:2]), (), turned, request.output)
            for number, output in enumerate(steps):
                now = replace(request, output=output)
                self._same(subject, self._apply(processor, [(0, now)])[0], now, f"step {number}")

    @level(3)
    def test_slots_are_used_again(self, subject: Subject) -> None:
        """Nothing of a request is left for the next one of its slot, also where the first one never had a row."""
        requests = self._requests()
        stays, processor = requests[0], self._build(subject)
        self._add(processor, 1, stays)
        for number, (first, second) in enumerate(zip(requests, [*requests[5:], *requests[:5]], strict=True)):
            self._add(processor, 2, first)
            if number % 2:
                self._apply(processor, [(2, first), (1, stays)])
            processor.remove(2)
            self._add(processor, 2, second)
            got = self._apply(processor, [(1, stays), (2, second)])
            self._same(subject, got[1], second, f"in the slot of {first.sampling.extra_args}")
            self._same(subject, got[0], stays, "beside a slot that is used again")
            processor.remove(2)

    @level(3)
    def test_two_processors_share_no_state(self, subject: Subject) -> None:
        """Two engines in one process have the same slots."""
        requests = self._requests()
        for mine, other in pairwise(requests):
            first, second = self._build(subject), self._build(subject)
            self._add(first, 0, mine)
            self._add(second, 0, other)
            self._same(subject, self._apply(first, [(0, mine)])[0], mine, "another processor has the slot too")
            second.remove(0)
            self._same(subject, self._apply(first, [(0, mine)])[0], mine, "another processor's request has gone")

    def test_batch_belongs_to_the_engine(self, subject: Subject) -> None:
        """Lists and parameters stay as they are, and nothing of a batch is looked at after the call."""
        for request in self._requests():
            processor, prompt, sampling = self._build(subject), list(request.prompt), copy.deepcopy(request.sampling)
            processor.add(0, sampling, prompt)
            assert prompt == list(request.prompt), "add changed the prompt"
            slots, output = [0], list(request.output)
            batch = LogitsBatch(
                logits_BV=self._logits(request)[None].to(self.device), slots=slots, output_token_ids=[output]
            )
            result = processor.apply(batch)
            assert (slots, output) == ([0], list(request.output)), "apply changed slots or output_token_ids"
            assert sampling == request.sampling, "the request's parameters have changed"
            # The engine uses the memory again.
            for tensor in (batch.logits_BV, result):
                tensor.fill_(float("nan"))
            output[:] = [0] * len(output)
            self._same(subject, self._apply(processor, [(0, request)])[0], request, "after the last batch was wiped")

    def test_all_ranks_agree(self, subject: Subject) -> None:
        """Each rank draws for itself, so that logits may not hang on a process's own random numbers."""
        requests = self._requests()[:_SLOTS]
        state, torch_state = random.getstate(), torch.get_rng_state()
        found = []
        try:
            for rank in range(2):
                random.seed(rank)
                torch.manual_seed(rank)
                processor = self._build(subject)
                for slot, request in enumerate(requests):
                    self._add(processor, slot, request)
                found.append(self._apply(processor, list(enumerate(requests))))
        finally:
            random.setstate(state)
            torch.set_rng_state(torch_state)
        assert torch.equal(found[0], found[1]), "ranks with other random states get other logits"

    def test_requests_are_checked(self, subject: Subject) -> None:
        """``validate`` takes the wishes and what other processors' requests hold, and refuses the rest by name."""
        validate = subject.plugin_class.validate
        for fields in (*self.wishes, *([self.plain] if self.plain is not None else []), {"extra_args": {"other": [1]}}):
            validate(SamplingParams(**fields))
        for fields in self.refused:
            with pytest.raises((ClientError, ValueError)) as raised:
                validate(SamplingParams(**fields))
            names = list((fields.get("extra_args") or fields).keys())
            assert any(name in str(raised.value) for name in names), f"{names} stand not in: {raised.value}"

    def test_front_end_needs_no_torch(self, subject: Subject) -> None:
        """``validate`` runs in the front process, which has no torch."""
        entry = subject.entry
        done = subprocess.run(
            [sys.executable, "-c", _FRONT, entry.name, entry.distribution],
            env=child_environment(),
            capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert not done.stdout.strip(), f"the front process imported {done.stdout.strip()}"

    @level(3)
    def test_requests_that_are_gone_cost_no_memory(self, subject: Subject) -> None:
        """2,000 requests through one slot leave less than 128 KiB."""
        processor, requests = self._build(subject), self._requests()

        def run(count: int) -> None:
            for number in range(count):
                request = requests[number % len(requests)]
                processor.add(number % _SLOTS, replace(request.sampling), [1000 + number] * 500)
                if number % 16 == 0:
                    self._apply(processor, [(number % _SLOTS, request)])
                processor.remove(number % _SLOTS)

        run(200)
        gc.collect()
        tracemalloc.start()
        try:
            run(2000)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert grown < 128 << 10, f"{grown} bytes more after 2,000 requests that are gone"
