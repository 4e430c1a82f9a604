"""The suite of KV connectors: both halves in an engine whose cache is watched bit by bit, on a store that fails.

An author says in ``store_options`` how the connector is given a ``FaultyStore`` and a clock. Claims that are read:
``device``, ``role`` (``kv_both``, ``kv_producer``, ``kv_consumer``) and ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)  # fmt: skip

from rabbet.contracts.kv_connector import ConnectorQuery
from rabbet_sdk.conformance._connector_rig import LAYOUTS, Engine, Setup
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.fakes.clock import FakeClock
from rabbet_sdk.fakes.kv_store import FAULTS, FaultyStore

__all__ = ["KVConnectorConformance"]

PROMPT = list(range(1, 18))
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_LOST = ("drop", "truncate", "flip", "swap", "error", "evict")


def _options(store: FaultyStore, clock: FakeClock) -> Mapping[str, Any]:
    return {"store": store, "clock": clock, "timeout_s": KVConnectorConformance.deadline_s}


class KVConnectorConformance(SupportsConformance):
    """Subclass, name the plugin, set ``store_options`` if the connector calls its options otherwise.

    Attributes:
        store_options: ``(store, clock)`` to the options of a connector that works on this store and this clock.
        deadline_s: Seconds after which the connector gives up a transfer.
        num_runs: Runs of the state machine.
    """

    kind = "kv_connector"
    store_options: ClassVar[Callable[[FaultyStore, FakeClock], Mapping[str, Any]]] = staticmethod(_options)
    deadline_s: ClassVar[float] = 5.0
    num_runs: ClassVar[int] = 40
    knobs = SupportsConformance.knobs | {"store_options", "deadline_s", "num_runs"}

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Devices, roles and numbers of groups."""
        options = cls.store_options(FaultyStore(), FakeClock())
        found = []
        for device in ("cpu", "cuda"):
            for role in _ROLES:
                for groups in (1, 2):
                    query = ConnectorQuery(device_type=device, role=role, num_groups=groups, options=options)
                    gap = claims.missing({"device": device, "role": role})
                    found.append(Case(id=f"{device}-{role}-{groups}", value=query, unclaimed=gap))
        return found

    @classmethod
    def layout_cases(cls, claims: Claims) -> list[Case]:
        """Layouts, strides, block sizes and ranks of one logical cache."""
        found = []
        for layout in LAYOUTS:
            for size in (4, 2):
                for strided in (False, True):
                    for ranks in (1, 2):
                        setup = Setup(layout=layout, block_size=size, is_strided=strided, tensor_parallel_size=ranks)
                        name = f"{layout}-{size}-{'strided' if strided else 'dense'}-tp{ranks}"
                        found.append(Case(id=name, value=setup, unclaimed=claims.missing({"layout": layout})))
        return found

    @classmethod
    def fault_cases(cls, claims: Claims) -> list[Case]:
        """Every fault of the store."""
        return [Case(id=fault, value=fault) for fault in FAULTS]

    @pytest.fixture
    def world(self, subject: Subject) -> _World:
        """A store and a clock, and a maker of engines on them."""
        return _World(self, subject)

    @level(2)
    @cases("layout_cases")
    def test_blocks_come_back_bit_by_bit(self, world: _World, case: Case) -> None:
        """What one engine saved, another one of equal identity loads, under every layout, stride, block size."""
        world.engine(case.value).run("a", PROMPT)
        assert world.engine(case.value).run("b", PROMPT) == 16, "saved blocks were not loaded"

    @level(2)
    @cases("layout_cases")
    def test_engines_that_differ_share_nothing_wrong(self, world: _World, case: Case) -> None:
        """Another layout, block size, rank or model on the same store: no hit, or the same logical content."""
        world.engine(case.value).run("a", PROMPT)
        others = [Setup(layout=layout) for layout in LAYOUTS] + [Setup(block_size=2), Setup(model="tiny@2")]
        others += [Setup(tensor_parallel_size=2, rank=rank) for rank in (0, 1)]
        for number, other in enumerate(others):
            if other.model != case.value.model:
                assert world.engine(other).look(world.engine(other).request("c", PROMPT))[0] == 0, "another model's KV"
            else:
                # What is loaded is compared with the other engine's own values when the load ends.
                world.engine(other).run(f"b{number}", PROMPT)

    def test_hit_leaves_the_last_token_and_starts_after_the_local_one(self, world: _World) -> None:
        """Whole blocks, never the last known token, and nothing that the engine has already."""
        engine = world.engine()
        engine.run("a", PROMPT)
        for length, local, wanted in ((17, 0, 16), (16, 0, 12), (17, 8, 8), (17, 16, 0), (4, 0, 0), (5, 0, 4)):
            count, _ = engine.look(engine.request("b", PROMPT[:length]), local)
            assert count == wanted, f"{length} tokens, {local} local: a hit of {count}, there are {wanted}"
        assert engine.look(engine.request("c", [9, *PROMPT]))[0] == 0, "a hit for other tokens"

    def test_load_starts_after_the_local_hit(self, world: _World) -> None:
        """Blocks of the local hit are not touched; the rest goes where it belongs."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.admit(engine.request("b", PROMPT), num_local=8)
        engine.settle()
        assert engine.loaded.get("b") == 8

    def test_find_hit_has_no_effect(self, world: _World) -> None:
        """Asked and not allocated: nothing is loaded, nothing reported."""
        engine = world.engine()
        engine.run("a", PROMPT)
        calls = engine.store.num_calls
        engine.look(engine.request("b", PROMPT))
        result = engine.step()
        assert engine.store.num_calls == calls, "find_hit moved data"
        assert not (result.finished_loading or result.failed_block_ids)

    @pytest.mark.parametrize("first", [("s", None), (None, "lora"), (None, None)])
    @pytest.mark.parametrize("second", [("t", None), ("lora", None), (None, "s")])
    def test_salts_and_adapters_never_cross(
        self, world: _World, first: tuple[str | None, str | None], second: tuple[str | None, str | None]
    ) -> None:
        """Equal tokens under another salt or adapter are other blocks."""
        engine = world.engine()
        engine.run("a", PROMPT, *first)
        assert engine.look(engine.request("b", PROMPT, *second))[0] == 0, f"{second} was given blocks of {first}"
        assert engine.run("c", PROMPT, *first) == 16

    def test_transfers_are_told_once(self, world: _World) -> None:
        """A message is made once a plan; the next one is empty, and a step without tokens is a step."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.admit(engine.request("b", PROMPT))
        engine.settle()
        calls = engine.store.num_calls
        for _ in range(3):
            engine.step()
        assert engine.store.num_calls == calls, "a transfer was done twice"

    def test_halves_exchange_data_only(self, world: _World) -> None:
        """The scheduler half works in one process and the worker half in another: bytes and reports are enough."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.admit(engine.request("b", PROMPT))
        shared = [value for value in vars(engine.scheduler).values() if isinstance(value, dict | list | set)]
        theirs = [id(value) for value in vars(engine.worker).values()]
        assert not [value for value in shared if id(value) in theirs], "the halves share an object"
        transfer = engine.scheduler.build_transfer({})
        assert isinstance(transfer, bytes) and not transfer.startswith((b"\x80\x02", b"\x80\x04", b"\x80\x05"))
        other = world.engine()
        other.worker.start_step(bytes(bytearray(transfer)))
        for _ in range(int(self.deadline_s) + 2):
            report = other.worker.finish_step()
            world.clock.advance(1)
            if report.finished_loading:
                break
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=type(report)) == report
        assert report.finished_loading == ["b"], "a worker half of its own cannot do what the message says"

    @level(3)
    @cases("fault_cases")
    def test_faults_while_loading_cost_the_hit_only(self, world: _World, case: Case) -> None:
        """One block of one group comes badly: it is reported with request and group, or it is right after all."""
        engine = world.engine()
        engine.run("a", PROMPT)
        for number, position in enumerate((0, 3, 7)):
            engine.store.plan([*[""] * position, case.value])
            engine.run(f"b{number}", PROMPT)
            engine.store.heal()
            if case.value in _LOST:
                assert engine.failures[-1:] == [f"b{number}"], f"{case.value}: the load went well, they say"
            engine.run(f"again{number}", PROMPT)
            assert engine.free and len(engine.free) == engine.setup.num_blocks - 1, "blocks were not given back"

    @level(3)
    @cases("fault_cases")
    def test_faults_while_saving_cost_a_later_hit_only(self, world: _World, case: Case) -> None:
        """The blocks are given back, and what was stored badly is not loaded."""
        engine = world.engine()
        engine.store.plan([case.value] * 5)
        engine.run("a", PROMPT)
        engine.store.heal()
        engine.run("b", PROMPT)
        engine.run("c", PROMPT)
        assert len(engine.free) == engine.setup.num_blocks - 1, "blocks were not given back"

    @level(3)
    def test_nothing_waits_beyond_the_deadline(self, world: _World) -> None:
        """A store that hangs, and one that is lost: loads fail in time, with every block named."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.store.is_hanging = True
        engine.run("b", PROMPT)
        assert engine.failures == ["b"], "the store hangs, but the load went well"
        engine.store.is_hanging = False
        engine.run("c", PROMPT)
        live = engine.admit(engine.request("d", PROMPT))
        engine.store.is_lost = True
        engine.settle()
        assert live.is_failed, "the store is gone, but the load went well"
        assert engine.look(engine.request("e", PROMPT))[0] == 0, "a store that is gone has nothing"

    @level(3)
    def test_late_answers_write_nothing(self, world: _World) -> None:
        """After the deadline the blocks may be another's."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.admit(engine.request("b", PROMPT))
        engine.store.is_hanging = True
        engine.settle()
        engine.finish("b")
        engine.settle()
        engine.admit(engine.request("c", [7] * 17))
        engine.store.heal()
        for _ in range(3):
            engine.step()

    @level(3)
    def test_abort_while_loading_ends_the_load_once(self, world: _World) -> None:
        """The blocks stay until the load is over, which is told once; nothing of it is saved."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.admit(engine.request("b", PROMPT))
        engine.step()
        engine.admit(engine.request("c", PROMPT))
        for name in "bc":
            if name in engine.live:
                engine.finish(name)
        engine.settle()
        assert not engine.live and len(engine.free) == engine.setup.num_blocks - 1

    @level(3)
    def test_failed_blocks_are_not_saved(self, world: _World) -> None:
        """A request that ends with a failed load leaves nothing wrong in the store."""
        engine = world.engine()
        engine.run("a", PROMPT)
        for name in list(engine.store.entries):
            engine.store.entries[name] = b"x" * len(engine.store.entries[name])
        live = engine.admit(engine.request("b", PROMPT))
        engine.settle()
        live.request.num_computed_tokens = 16
        engine.finish("b")
        engine.settle()
        engine.run("c", PROMPT)

    @level(3)
    def test_preempted_requests_come_back(self, world: _World) -> None:
        """Blocks are taken away without a word, and the same id asks again."""
        engine = world.engine()
        engine.run("a", PROMPT)
        engine.admit(engine.request("b", PROMPT))
        engine.settle()
        for _ in range(2):
            engine.admit(engine.preempt("b"))
            engine.settle()
        engine.step("b")
        engine.finish("b")
        engine.settle()

    @level(3)
    def test_build_use_close_twice_and_share_no_state(self, world: _World, subject: Subject) -> None:
        """Close is idempotent, works while loads run, and an engine on another store knows nothing."""
        for _ in range(2):
            engine = world.engine()
            engine.run("a", PROMPT)
            engine.admit(engine.request("b", PROMPT))
            engine.step()
            engine.close()
        assert _World(self, subject).engine().run("b", PROMPT) == 0, "an engine on another store has a hit"
        assert world.engine().run("c", PROMPT) == 16, "closing one engine emptied the store"

    @level(3)
    def test_any_order_of_events(self, subject: Subject) -> None:
        """A state machine of hits, loads, saves, aborts, preemptions, ends, restarts and peer loss, under all faults."""
        suite = self

        class Machine(_Machine):
            def make_world(self) -> _World:
                return _World(suite, subject)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=self.num_runs, stateful_step_count=30, deadline=None, derandomize=True, database=None,
                phases=(Phase.generate,), suppress_health_check=list(HealthCheck), print_blob=False,
            ),
        )  # fmt: skip


class _World:
    """A store, a clock, and engines on them."""

    def __init__(self, suite: KVConnectorConformance, subject: Subject) -> None:
        self.suite, self.subject = suite, subject
        self.store, self.clock = FaultyStore(), FakeClock()

    def engine(self, setup: Setup | None = None) -> Engine:
        """One more engine."""
        roles = self.subject.claims.values("role") or _ROLES
        return Engine(
            self.subject.plugin_class, type(self.suite).store_options, self.store, self.clock, self.suite.deadline_s,
            setup, role="kv_both" if "kv_both" in roles else roles[0],
        )  # fmt: skip


class _Machine(RuleBasedStateMachine):
    """Two engines on one store; prompts share prefixes."""

    def make_world(self) -> _World:
        """A new store, and the plugin under test."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        """Two engines, and something to hit."""
        self.now = self.make_world()
        self.engines = [self.now.engine(), self.now.engine()]
        self.engines[0].run("first", PROMPT)
        self.count = 0

    @rule(
        which=st.integers(0, 1),
        length=st.sampled_from([17, 17, 16, 13, 9, 5, 3]),
        other=st.sampled_from([0, 0, 5, 9]),
        salt=st.sampled_from([False, False, True]),
    )
    def arrive(self, which: int, length: int, other: int, salt: bool) -> None:
        """A request: looked up, given blocks, loaded."""
        engine = self.engines[which]
        if len(engine.live) >= 4:
            return
        self.count += 1
        prompt = [*PROMPT[:other], *(99 + i for i in range(length - other))] if other else PROMPT[:length]
        engine.admit(engine.request(f"r{self.count}", prompt, "salt" if salt else None))

    @rule(which=st.integers(0, 1), seconds=st.sampled_from([0.0, 1.0, 3.0]))
    def step(self, which: int, seconds: float) -> None:
        """Everybody who can run does."""
        engine = self.engines[which]
        for live in engine.live.values():
            if live.is_failed and not live.is_ended:
                live.request.num_computed_tokens, live.is_failed = 0, False
                live.failed = [set() for _ in live.failed]
        engine.step(*self._ready(engine), seconds=seconds)

    @rule(which=st.integers(0, 1), pick=st.integers(0, 9))
    def finish(self, which: int, pick: int) -> None:
        """One ends, wherever it stands."""
        names = [name for name, live in self.engines[which].live.items() if not live.is_ended]
        if names:
            self.engines[which].finish(names[pick % len(names)])

    @rule(which=st.integers(0, 1), pick=st.integers(0, 9))
    def preempt(self, which: int, pick: int) -> None:
        """One that runs loses its blocks and comes back."""
        engine = self.engines[which]
        names = [n for n, live in engine.live.items() if not (live.is_ended or live.is_loading or live.is_failed)]
        if names:
            engine.admit(engine.preempt(names[pick % len(names)]))

    @rule(faults=st.lists(st.sampled_from(["", *FAULTS]), min_size=1, max_size=6))
    def fail(self, faults: list[str]) -> None:
        """The next requests of the store go wrong."""
        self.now.store.plan(faults)

    @rule(hangs=st.booleans())
    def hang(self, hangs: bool) -> None:
        """No answer, until further notice."""
        self.now.store.is_hanging = hangs

    @rule(is_lost=st.booleans())
    def lose_peer(self, is_lost: bool) -> None:
        """The store is gone, or back."""
        self.now.store.is_lost = is_lost

    @precondition(lambda self: self.count > 2)
    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        """An engine dies in the middle of everything; a new one takes its place."""
        self.engines[which].close()
        self.engines[which] = self.now.engine()

    @invariant()
    def books_balance(self) -> None:
        """Each block is free, or held by one request."""
        for engine in getattr(self, "engines", ()):
            held = [block for live in engine.live.values() for table in live.tables for block in table]
            assert sorted([*held, *engine.free]) == list(range(1, engine.setup.num_blocks))

    def teardown(self) -> None:
        """All end once the store works again; every block comes back."""
        if not hasattr(self, "engines"):
            return
        self.now.store.heal()
        for engine in self.engines:
            for live in engine.live.values():
                if not live.is_ended:
                    live.since_s = self.now.clock()
            for name in [name for name, live in engine.live.items() if not live.is_ended]:
                engine.finish(name)
            engine.settle()
            assert len(engine.free) == engine.setup.num_blocks - 1, "blocks were not given back"

    @staticmethod
    def _ready(engine: Engine) -> list[str]:
        return [
            name
            for name, live in engine.live.items()
            if not (live.is_ended or live.is_loading) and live.request.num_computed_tokens < len(live.request.token_ids)
        ]
