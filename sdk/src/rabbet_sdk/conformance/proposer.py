"""Suite of speculative proposers.

Claims: ``device``, ``dtype``, ``target_architecture``, ``vocab_size``, ``num_speculative_tokens`` (each: leave it out to
claim all) and ``features`` with ``async`` (works without tokens on the host).

Shapes: B requests, T tokens, N hidden size, V vocabulary, k drafts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from rabbet.contracts.proposer import DraftBatch, ProposerContext, ProposerQuery
from rabbet.types.sampling import SamplingParams
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.oracles.sampling import assert_drawn_from

__all__ = ["ProposerConformance"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A request: its accepted tokens, the drafts that it wants, its seed."""

    name: str
    tokens: tuple[int, ...]
    most: int
    seed: int = 1
    temperature: float = 1.0


class ProposerConformance(SupportsConformance):
    """Subclass it, set ``plugin``; for a draft model also what its checkpoint needs (``knobs``).

    Attributes:
        vocab_size: The target's, V.
        hidden_size: The target's, N.
        num_speculative_tokens: Most drafts a request, k; at least 2.
        target_architecture: The target's.
        target: The loaded target model, for heads that share its embedding.
        build_context: What ``ProposerContext.build_context`` holds.
    """

    kind = "proposer"
    vocab_size: ClassVar[int] = 48
    hidden_size: ClassVar[int] = 16
    num_speculative_tokens: ClassVar[int] = 4
    target_architecture: ClassVar[str] = "LlamaForCausalLM"
    target: ClassVar[Any] = None
    build_context: ClassVar[Any] = None
    knobs = SupportsConformance.knobs | {
        "vocab_size", "hidden_size", "num_speculative_tokens", "target_architecture", "target", "build_context"
    }  # fmt: skip

    @classmethod
    def _query(cls, **changes: Any) -> ProposerQuery:
        query = ProposerQuery(
            device_type=cls.device, arch="", dtype="float32", target_architecture=cls.target_architecture,
            vocab_size=cls.vocab_size, num_speculative_tokens=cls.num_speculative_tokens, is_async=False,
            options=cls.options,
        )  # fmt: skip
        return replace(query, **changes)

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Each axis on its own."""
        axes: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("async", {"is_async": True})]
        axes += [(f"dtype_{dtype}", {"dtype": dtype}) for dtype in ("float16", "bfloat16")]
        axes += [(f"vocab_{size}", {"vocab_size": size}) for size in (cls.vocab_size + 1, 2 * cls.vocab_size)]
        axes += [(f"k_{k}", {"num_speculative_tokens": k}) for k in (1, 2, 8)]
        axes += [("architecture", {"target_architecture": "NobodyKnowsThisForCausalLM"})]
        found = []
        for name, changes in axes:
            query = cls._query(**changes)
            facts = {
                key: getattr(query, key)
                for key in ("dtype", "vocab_size", "num_speculative_tokens", "target_architecture")
            }
            missing = claims.missing({**facts, "device": query.device_type}, ["async"] if query.is_async else [])
            found.append(Case(id=name, value=query, unclaimed=missing))
        return found

    @classmethod
    def async_cases(cls, claims: Claims) -> list[Case]:
        """The one mode that a proposer may leave out."""
        return [Case(id="async", value=True, unclaimed=claims.missing({}, ["async"]))]

    def _build(self, subject: Subject, *, is_async: bool = False) -> Any:
        context = ProposerContext(
            query=self._query(is_async=is_async), device=torch.device(self.device), max_num_requests=64,
            max_model_len=256, target=self.target, build_context=self.build_context,
        )  # fmt: skip
        proposer = subject.plugin_class(context)
        proposer.load()
        specs = proposer.kv_cache_specs()
        assert isinstance(specs, dict), f"kv_cache_specs gave {type(specs).__name__}; the contract asks for a dict"
        proposer.warm_up()
        return proposer

    def _batch(
        self, proposer: Any, rows: Sequence[_Row], *, finished: Sequence[str] = (), is_async: bool = False
    ) -> DraftBatch:
        """A batch after a step that accepted each row's last token and rejected two drafts behind it.

        Hidden states of rejected tokens are NaN: nothing may come of them.
        """
        device, count = torch.device(self.device), len(rows)
        hidden: list[torch.Tensor] = []
        last: list[int] = []
        for row in rows:
            generator = torch.Generator().manual_seed(sum((i + 1) * t for i, t in enumerate(row.tokens[-8:])))
            last.append(3 * len(last))
            hidden += [torch.randn(1, self.hidden_size, generator=generator)]
            hidden += [torch.full((2, self.hidden_size), float("nan"))]
        sampled = torch.full((count, self.num_speculative_tokens + 1), -1, dtype=torch.int64)
        for i, row in enumerate(rows):
            sampled[i, 0] = row.tokens[-1]
        states = torch.cat(hidden) if hidden else torch.zeros(0, self.hidden_size)
        return DraftBatch(
            request_ids=[row.name for row in rows],
            token_ids=None if is_async else [list(row.tokens) for row in rows],
            num_tokens=[len(row.tokens) for row in rows],
            max_drafts=[row.most for row in rows],
            sampled_ids=sampled.to(device),
            num_sampled=torch.ones(count, dtype=torch.int32, device=device),
            hidden_states=states.to(device) if proposer.needs_hidden_states else None,
            last_token_index=torch.tensor(last, dtype=torch.int64, device=device),
            finished_request_ids=list(finished),
            sampling=[SamplingParams(temperature=row.temperature, seed=row.seed) for row in rows],
        )  # fmt: skip

    def _propose(self, proposer: Any, rows: Sequence[_Row], **more: Any) -> list[list[int]]:
        return self._drafts(proposer.propose(self._batch(proposer, rows, **more)), rows)

    def _drafts(self, result: Any, rows: Sequence[_Row]) -> list[list[int]]:
        """Drafts of each row, whichever form they have; checks that form."""
        host, device = result.token_ids, result.device_token_ids
        assert (host is None) != (device is None), "give token_ids or device_token_ids, one of them"
        if device is not None:
            assert device.dtype == torch.int64 and device.ndim == 2, f"device_token_ids: {device.dtype} {device.shape}"
            host = []
            for ids in device.tolist():
                kept = [token for token in ids if token != -1]
                assert ids[: len(kept)] == kept, f"a draft stands behind a -1: {ids}"
                host.append(kept)
        assert len(host) == len(rows), f"drafts for {len(host)} rows; the batch has {len(rows)}"
        return [list(ids) for ids in host]

    def _rows(self) -> list[_Row]:
        """Rows of every shape: repeating, random, one token, as long as the model allows; some want no drafts."""
        chance, k, size = random.Random(5), self.num_speculative_tokens, self.vocab_size
        noise = [tuple(chance.randrange(size) for _ in range(length)) for length in (40, 256 - k)]
        texts = [(1, 2, 3, 4, 5, 6, 7, 8) * 3 + (1, 2), (5, 9) * 6, noise[0], (7,), (3, 3, 3, 3, 3, 3, 3), noise[1]]
        texts += [(11, 12, 13, 14, 15, 16, 11, 12), (5, 6, 40, 41, 42, 43, 44, 45, 5, 6)]
        mosts = (k, 1, k, k, k - 1, k, 0, k)
        return [
            _Row(name=f"r{i}", tokens=tuple(token % size for token in text), most=most, seed=i + 1)
            for i, (text, most) in enumerate(zip(texts, mosts, strict=True))
        ]

    def test_drafts_are_in_the_vocabulary(self, subject: Subject) -> None:
        """Ids from 0 to V - 1."""
        rows = self._rows()
        for row, drafts in zip(rows, self._propose(self._build(subject), rows), strict=True):
            outside = [token for token in drafts if not 0 <= token < self.vocab_size]
            assert not outside, f"row {row.name}: ids {outside} are outside of the vocabulary of {self.vocab_size}"

    def test_no_more_drafts_than_wanted(self, subject: Subject) -> None:
        """``max_drafts`` is a limit for each row; 0 means none."""
        rows = self._rows()
        for row, drafts in zip(rows, self._propose(self._build(subject), rows), strict=True):
            assert len(drafts) <= row.most, f"row {row.name}: {len(drafts)} drafts, at most {row.most} are wanted"

    def test_number_of_drafts_may_change(self, subject: Subject) -> None:
        """Each step has its own limits: fewer give the beginning of more, in whatever order they come."""
        proposer, rows, k = self._build(subject), self._rows(), self.num_speculative_tokens
        whole = self._propose(self._build(subject), [replace(row, most=k) for row in rows])
        for most in (1, k, 0, 2, k):
            drafts = self._propose(proposer, [replace(row, most=most) for row in rows])
            assert drafts == [ids[:most] for ids in whole], f"with {most} wanted after another number: {drafts}"

    def test_an_empty_batch_is_no_fault(self, subject: Subject) -> None:
        """A step may end all requests."""
        proposer = self._build(subject)
        self._propose(proposer, self._rows())
        assert self._propose(proposer, [], finished=[row.name for row in self._rows()]) == []

    def test_rows_may_change_places(self, subject: Subject) -> None:
        """Drafts follow the request, not the row, also from one step to the next."""
        rows, proposer = self._rows(), self._build(subject)
        expected = dict(zip((row.name for row in rows), self._propose(proposer, rows), strict=True))
        for seed in range(3):
            mixed = random.Random(seed).sample(rows, len(rows))
            assert self._propose(proposer, mixed) == [expected[row.name] for row in mixed]

    def test_a_row_depends_on_its_request_alone(self, subject: Subject) -> None:
        """The same drafts alone and among others."""
        rows = self._rows()
        together = self._propose(self._build(subject), rows)
        for row, drafts in zip(rows, together, strict=True):
            alone = self._propose(self._build(subject), [row])
            assert alone == [drafts], f"row {row.name}: {drafts} among others, {alone[0]} alone"

    @level(3)
    def test_a_finished_request_leaves_nothing(self, subject: Subject) -> None:
        """An id that comes again is another request."""
        proposer, rows = self._build(subject), self._rows()
        self._propose(proposer, rows)
        self._propose(proposer, [], finished=[row.name for row in rows])
        again = [replace(row, tokens=other.tokens) for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
        assert self._propose(proposer, again) == self._propose(self._build(subject), again)

    @level(3)
    def test_a_preempted_request_comes_back(self, subject: Subject) -> None:
        """Rows that miss steps and come back longer draft as if they had never been away."""
        proposer, rows = self._build(subject), self._rows()
        self._propose(proposer, rows)
        self._propose(proposer, rows[3:])
        later = [replace(row, tokens=(*row.tokens[:246], 9, 2, 9)) for row in rows]
        assert self._propose(proposer, later) == self._propose(self._build(subject), later)

    @level(3)
    def test_rejected_drafts_leave_nothing(self, subject: Subject) -> None:
        """Where the target took another token than the draft, the next drafts are those of a fresh proposer."""
        proposer, rows = self._build(subject), self._rows()
        for step in range(4):
            drafts = self._propose(proposer, rows)
            assert drafts == self._propose(self._build(subject), rows), f"step {step}: rejected drafts had an effect"
            wrong = [((ids[0] if ids else step) + 1) % self.vocab_size for ids in drafts]
            rows = [
                replace(row, tokens=(*row.tokens, token)[-240:] if len(row.tokens) > 240 else (*row.tokens, token))
                for row, token in zip(rows, wrong, strict=True)
            ]

    @level(3)
    def test_two_instances_share_no_state(self, subject: Subject) -> None:
        """Two engines of one process do not know of each other."""
        first, second = self._build(subject), self._build(subject)
        rows = self._rows()
        other = [replace(row, tokens=row.tokens[::-1]) for row in rows]
        self._propose(first, rows)
        # Under names that nobody used: state that is shared would hold the others already.
        expected = self._propose(self._build(subject), [replace(row, name=f"new {row.name}") for row in other])
        assert self._propose(second, other) == expected, "what one instance was given changes another one's drafts"

    def test_inputs_stay_as_they_are(self, subject: Subject) -> None:
        """The batch is the engine's."""
        proposer = self._build(subject)
        batch = self._batch(proposer, self._rows())
        before = copy.deepcopy(batch)
        proposer.propose(batch)
        for name in ("request_ids", "token_ids", "num_tokens", "max_drafts", "finished_request_ids"):
            assert getattr(batch, name) == getattr(before, name), f"propose changed {name}"
        for name in ("sampled_ids", "num_sampled", "hidden_states", "last_token_index"):
            now, then = getattr(batch, name), getattr(before, name)
            same = now is then or torch.equal(now.nan_to_num(), then.nan_to_num())
            assert same, f"propose changed {name}"

    def test_all_ranks_propose_the_same(self, subject: Subject) -> None:
        """Drafts do not hang on a process's own random numbers; the request's seed gives them."""
        rows, found = self._rows(), []
        state, torch_state = random.getstate(), torch.get_rng_state()
        try:
            for rank in range(3):
                random.seed(rank)
                torch.manual_seed(rank)
                found.append(self._propose(self._build(subject), rows))
        finally:
            random.setstate(state)
            torch.set_rng_state(torch_state)
        assert found[0] == found[1] == found[2], "ranks with other random states propose other drafts"

    @cases("async_cases")
    def test_works_without_tokens_on_the_host(self, subject: Subject, case: Case) -> None:
        """In asynchronous steps ``token_ids`` is None; drafts are the same and stay on the device."""
        proposer, rows = self._build(subject, is_async=True), self._rows()
        result = proposer.propose(self._batch(proposer, rows, is_async=case.value))
        assert result.device_token_ids is not None, "asynchronous drafts belong on the device"
        assert self._drafts(result, rows) == self._propose(self._build(subject), rows)

    @level(2)
    def test_reported_q_is_a_distribution(self, subject: Subject) -> None:
        """float32 [B, k, V]; where a draft stands it is not negative, sums to 1 and has weight at the draft."""
        proposer, rows = self._build(subject), self._rows()
        result = proposer.propose(self._batch(proposer, rows))
        q = result.probabilities
        if q is None:
            return
        drafts = self._drafts(result, rows)
        most = max(len(ids) for ids in drafts)
        assert q.dtype == torch.float32, f"probabilities are {q.dtype}; the contract asks for float32"
        assert q.ndim == 3 and (q.shape[0], q.shape[2]) == (len(rows), self.vocab_size), f"shape {tuple(q.shape)}"
        assert q.shape[1] >= most, f"probabilities for {q.shape[1]} drafts; a row has {most}"
        for i, ids in enumerate(drafts):
            for j, token in enumerate(ids):
                total = float(q[i, j].double().sum())
                assert bool((q[i, j] >= 0).all()) and abs(total - 1) < 1e-4, f"row {i}, draft {j}: q sums to {total:g}"
                assert float(q[i, j, token]) > 0, f"row {i}, draft {j}: q is 0 at the token {token} that was drawn"

    @level(2)
    def test_reported_q_is_what_was_drawn_from(self, subject: Subject) -> None:
        """χ² over 1,920 seeds: verification keeps the target's distribution only with the true q.

        Without ``probabilities`` drafts are deterministic, so that all seeds must give the same.
        """
        for temperature in (0.0, 0.5, 1.0):
            proposer, k = self._build(subject), self.num_speculative_tokens
            seen = torch.zeros(k, self.vocab_size, dtype=torch.float64)
            expected = torch.zeros_like(seen)
            drafts: list[list[int]] = []
            for start in range(0, 1920, 64):
                rows = [
                    _Row(name=f"q{seed}", tokens=(1, 2, 3, 1, 2), most=k, seed=seed, temperature=temperature)
                    for seed in range(start, start + 64)
                ]
                result = proposer.propose(self._batch(proposer, rows))
                found = self._drafts(result, rows)
                drafts += found
                if result.probabilities is not None:
                    for i, ids in enumerate(found):
                        for j, token in enumerate(ids):
                            seen[j, token] += 1
                            expected[j] += result.probabilities[i, j].double().cpu()
            if not expected.any():
                assert all(ids == drafts[0] for ids in drafts), "drafts vary with the seed, but no q is reported"
                continue
            for j in range(k):
                assert_drawn_from(seen[j], expected[j], f"temperature {temperature}, draft {j}")
