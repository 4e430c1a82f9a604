"""The suite of attention backends.

Claims of a manifest that it reads (a key that is left out restricts nothing, a feature has to be named):

* ``device``, ``arch``, ``dtype``: as in ``AttentionQuery``.
* ``kv_cache_dtype``: names of KV-cache dtypes; ``auto`` is the model's own dtype. What stored numbers are says the installed
  plugin of the name (``round_trip``); ``fp8_e4m3`` and ``fp8_e5m2`` are known without one.
* ``head_dim``: sizes of query and key heads; ``block_size``: tokens a block.
* ``kv_layout``: names that ``kv_layout`` may give.
* ``features``: of ``gqa``, ``sliding_window``, ``soft_cap``, ``sinks``, ``alibi``, ``mixed_batch`` (decodes and chunks in one
  step), ``non_causal``, ``graphs`` (batches of ``graph_support`` can be captured), ``log_sum_exp``, ``batch_invariant`` (a
  request's outputs are bitwise the same whatever shares its step and however it is cut into chunks), ``uneven_head_dim_v``.

Keys and values go in and outputs come out through ``forward`` alone, so that every layout can be tested; what must stay
untouched is compared byte by byte, whatever it means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rabbet.contracts.attention import GraphSupport
from rabbet_sdk.conformance._attention_graphs import Static, captured, held
from rabbet_sdk.conformance._attention_rig import Rig, Setup
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unavailable
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.numerics import assert_within

__all__ = ["AttentionConformance"]

_SENTINEL = 777.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A setup and the batch that it is tried with: (tokens before, tokens now) of each request."""

    setup: Setup
    history: tuple[tuple[int, int], ...]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equal, NaN included."""
    return torch.equal(_bytes(left), _bytes(right))


class AttentionConformance(SupportsConformance):
    """Subclass, name the plugin, done. See the module for claims."""

    kind = "attention"

    @classmethod
    def base(cls, claims: Claims) -> Setup:
        """The plainest setup that is claimed: the first claimed value of each axis."""

        def first(key: str, default: Any, choices: tuple[Any, ...]) -> Any:
            return (
                default if claims.allows(key, default) else next((c for c in choices if claims.allows(key, c)), default)
            )

        arch = ""
        if cls.device.startswith("cuda") and torch.cuda.is_available():
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        return Setup(
            device=cls.device.partition(":")[0],
            arch=arch,
            dtype=first("dtype", "float32", ("bfloat16", "float16")),
            kv_cache_dtype=first("kv_cache_dtype", "auto", _kv_names(claims)),
            head_dim=first("head_dim", 64, _HEAD_DIMS),
            block_size=first("block_size", 16, _BLOCK_SIZES),
        )

    @classmethod
    def _case(cls, claims: Claims, id: str, setup: Setup) -> Case:
        facts = {
            "device": setup.device, "dtype": setup.dtype, "kv_cache_dtype": setup.kv_cache_dtype,
            "head_dim": setup.head_dim, "block_size": setup.block_size,
        }  # fmt: skip
        if setup.arch:
            facts["arch"] = setup.arch
        return Case(id=id, value=setup, unclaimed=claims.missing(facts, sorted(setup.features)))

    @classmethod
    def setup_cases(cls, claims: Claims) -> list[Case]:
        """The base, and each value of each axis in its place."""
        base = cls.base(claims)
        size = base.block_size
        values: dict[str, dict[str, Any]] = {"base": {}}
        values |= {f"dtype_{name}": {"dtype": name} for name in ("float32", "bfloat16", "float16")}
        values |= {f"kv_{name}": {"kv_cache_dtype": name} for name in _kv_names(claims)}
        values |= {f"head_dim_{size}": {"head_dim": size} for size in _HEAD_DIMS}
        values |= {f"block_{size}": {"block_size": size} for size in _BLOCK_SIZES}
        values |= {
            f"heads_{heads}_{kv_heads}": {"heads": heads, "kv_heads": kv_heads}
            for heads, kv_heads in ((8, 2), (8, 1), (16, 2), (5, 1), (1, 1))
        }
        windows = {"one": 1, "below_block": size - 1, "block": size, "above_block": size + 1, "longer": 9 * size}
        values |= {f"window_{name}": {"window": window} for name, window in windows.items() if window}
        values["window_non_causal"] = {"window": size // 2, "is_causal": False}
        values |= {
            "soft_cap": {"soft_cap": 2.0},
            "sinks": {"has_sinks": True},
            "alibi": {"has_alibi": True},
            "non_causal": {"is_causal": False},
            "scale": {"scale": 0.3},
            "kv_scales": {"kv_scales": (0.5, 4.0)},
            "uneven": {"head_dim_v": base.head_dim // 2},
            "window_gqa_soft_cap_sinks": {
                "window": size + 1, "heads": 8, "kv_heads": 2, "soft_cap": 3.0, "has_sinks": True,
            },
        }  # fmt: skip
        return [cls._case(claims, name, replace(base, **changed)) for name, changed in values.items()]

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """All setups as queries, the needs that no setup has, and devices of others."""
        base = cls.base(claims)
        more = [cls._case(claims, name, replace(base, extra=frozenset({name})))
                for name in ("graphs", "log_sum_exp", "batch_invariant", "mixed_batch")]  # fmt: skip
        more += [cls._case(claims, f"device_{name}", replace(base, device=name, arch="")) for name in ("cpu", "npu")]
        return [Case(id=c.id, value=c.value.query(), unclaimed=c.unclaimed) for c in cls.setup_cases(claims) + more]

    @classmethod
    def run_cases(cls, claims: Claims) -> list[Case]:
        """Each setup with a decode and a chunk, and the base and a window with every batch."""
        found = []
        for case in cls.setup_cases(claims):
            size = case.value.block_size
            for name, history in {"chunks": ((size - 1, 5), (3, 2)), "decodes": ((size + 1, 1), (size, 1))}.items():
                run = _Run(setup=case.value, history=history)
                found.append(Case(id=f"{case.id}-{name}", value=run, unclaimed=case.unclaimed))
        for case in cls.batch_cases(claims):
            found.append(case)
        return found

    @classmethod
    def batch_cases(cls, claims: Claims) -> list[Case]:
        """Batches of the contract's sorts; lengths at block edges and primes."""
        base = cls.base(claims)
        size = base.block_size
        batches: dict[str, tuple[tuple[int, int], ...]] = {
            "decode_at_edges": tuple(
                (n, 1) for n in (1, size - 2, size - 1, size, 2 * size - 1, 2 * size, 37) if n >= 0
            ),
            "prefill": ((0, 1), (0, size - 1), (0, size), (0, size + 1), (0, 31)),
            "continued": ((size + 3, 7), (5, size), (size, size)),
            "mixed": ((0, size + 1), (size - 1, 1), (7, 5), (2 * size, 1), (0, 1)),
            "verify": tuple((size - 2 + n, n) for n in range(2, 9)),
            "one_row": ((13, 1),),
            "empty_rows": ((0, 3), (4, 0), (5, 3)),
            "longest": ((size * 16 - 1, 1),),
        }
        found = []
        for label, window in (("base", None), ("window", size + 1)):
            for name, history in batches.items():
                extra = frozenset({"mixed_batch"}) if name == "mixed" else frozenset()
                setup = replace(base, window=window, extra=extra)
                case = cls._case(claims, f"{label}-{name}", setup)
                found.append(replace(case, value=_Run(setup=setup, history=history)))
        return found

    @classmethod
    def plain_cases(cls, claims: Claims) -> list[Case]:
        """Setups for what must hold whatever is computed: each claimed dtype, with and without a window."""
        wanted = {"base", "dtype_bfloat16", "dtype_float16", "window_above_block", "heads_8_2", "kv_fp8_e4m3"}
        wanted |= {f"kv_{name}" for name in claims.values("kv_cache_dtype") if name != "auto"}
        return [case for case in cls.setup_cases(claims) if case.id in wanted]

    @pytest.fixture
    def rig(self, subject: Subject, torch_device: Any, generator: torch.Generator) -> Any:
        """Makes rigs; each starts from the same random numbers, so that equal calls give equal requests."""
        state = generator.get_state()

        def make(setup: Setup, **more: Any) -> Rig:
            fresh = torch.Generator().set_state(state)
            return Rig(backend_class=subject.plugin_class, setup=setup, device=torch_device, generator=fresh,
                       options=dict(self.options), **more)  # fmt: skip

        return make

    @cases("setup_cases")
    def test_layout_fits_its_page(self, subject: Subject, case: Case) -> None:
        """Bytes of a block are at most those of the spec; axes and sizes belong together; the name is claimed."""
        spec = case.value.spec()
        layout = subject.plugin_class.kv_layout(spec)
        assert layout == subject.plugin_class.kv_layout(spec), "another layout the second time"
        assert len(layout.axes) == len(layout.shape), f"axes {layout.axes} for the shape {layout.shape}"
        element = torch.empty(layout.shape, dtype=getattr(torch, layout.dtype), device="meta")
        size = element.numel() * element.element_size()
        assert size <= spec.page_size_bytes, f"a block takes {size} bytes, its page has {spec.page_size_bytes}"
        assert subject.claims.allows("kv_layout", layout.name), f"layout {layout.name} is not claimed"

    def test_block_sizes_and_graphs_are_declared(self, subject: Subject) -> None:
        """Block sizes are claimed, the first one is preferred; graph support is a member of its enumeration."""
        sizes = subject.plugin_class.block_sizes()
        assert sizes and all(isinstance(size, int) and size > 0 for size in sizes), f"block_sizes gave {sizes!r}"
        foreign = [size for size in sizes if not subject.claims.allows("block_size", size)]
        assert not foreign, f"block sizes {foreign} are not claimed"
        support = subject.plugin_class.graph_support()
        assert isinstance(support, GraphSupport)
        query = replace(self.base(subject.claims), extra=frozenset({"graphs"})).query()
        is_accepted = not subject.plugin_class.supports(query)
        # Checked mode never captures.
        assert subject.entry.is_checked or (support is not GraphSupport.NEVER) == is_accepted, (
            f"graph_support is {support.name}, but supports {'accepts' if is_accepted else 'refuses'} graphs"
        )

    @level(2)
    @dangerous
    @cases("run_cases")
    def test_values_are_those_of_the_definition(self, rig: Any, case: Case, record_property: Any) -> None:
        """Outputs are as near to float64 as those of a plain computation in the same dtype."""
        it = rig(case.value.setup)
        rows = it.prepare(case.value.history)
        for (request, count), got in zip(rows, it.step(rows), strict=True):
            oracle, plain = it.expected(request, count), it.expected(request, count, it.dtype)
            assert_within(got, plain=plain, oracle=oracle, record=record_property)

    @classmethod
    def window_cases(cls, claims: Claims) -> list[Case]:
        """Windows of all sizes."""
        return [case for case in cls.setup_cases(claims) if case.id.startswith("window_") and "gqa" not in case.id]

    @level(2)
    @dangerous
    @cases("window_cases")
    def test_window_means_what_the_contract_says(self, rig: Any, case: Case) -> None:
        """A token at p sees p - window + 1 .. p, or .. p + window - 1: with equal scores the mean of these positions."""
        it = rig(case.value)
        request = it.request(2 * case.value.block_size + 5)
        total = len(request.q)
        request.q.zero_()
        at = torch.arange(total, dtype=torch.float64, device=it.device)
        request.v.copy_((at / 16).to(it.dtype).view(-1, 1, 1).expand_as(request.v))
        stored = it.stored(request.v, 1)[:, 0, 0]
        for count in (total - 3, 1, 2):
            first = request.done
            (got,) = it.step([(request, count)])
            for offset in range(count):
                p = first + offset
                low, high = max(0, p - case.value.window + 1), p
                if not case.value.is_causal:
                    high = min(first + count - 1, p + case.value.window - 1)
                mean, near = float(stored[low : high + 1].mean()), float(got[offset].double().mean())
                assert abs(mean - near) < 0.02, (
                    f"token {p} with a window of {case.value.window}: mean position {16 * near:.2f}, "
                    f"of {low}..{high} it is {16 * mean:.2f}"
                )

    @level(2)
    @dangerous
    @cases("run_cases")
    def test_unused_memory_never_reaches_outputs(self, rig: Any, case: Case) -> None:
        """NaN or a number in unused slots, free blocks, padded rows and the output before the call: equal results."""
        found = []
        for fill in (float("nan"), _SENTINEL):
            it = rig(case.value.setup, fill=fill)
            found.append(torch.cat(it.step(it.prepare(case.value.history), padding=3)))
        assert found[0].isfinite().all(), "NaN of unused memory reached the output"
        assert _same(*found), "what stands in unused memory changes the output"

    @level(2)
    @dangerous
    @cases("batch_cases")
    def test_only_named_slots_change(self, rig: Any, case: Case) -> None:
        """Rows past the real tokens, pages of others, canaries before and behind the cache stay as they are."""
        it = rig(case.value.setup, fill=_SENTINEL)
        rows = it.prepare(case.value.history)
        batch = it.batch(rows, padding=5)
        before = it.whole.clone()
        out = it.output(batch.num_tokens + 7)
        it.backend.forward(
            it.layer, *it.inputs(rows, 5), it.cache, it.backend.build_metadata(batch), out[1:-1][: batch.num_tokens + 5]
        )
        assert (out[0] == _SENTINEL).all() and (out[batch.num_tokens + 1 :] == _SENTINEL).all(), (
            "rows of the output were written that are no tokens of the step"
        )
        touched = {int(slot) // case.value.setup.block_size + 1 for slot in batch.slot_mapping if slot >= 0}
        spoilt = [
            page - 1 for page in range(len(before)) if page not in touched and not _same(before[page], it.whole[page])
        ]
        assert not spoilt, f"blocks {spoilt} were written; the step writes {sorted(page - 1 for page in touched)}"

    @level(2)
    @dangerous
    @cases("plain_cases")
    def test_slot_minus_one_writes_nothing(self, rig: Any, case: Case) -> None:
        """A step whose slots are -1 leaves the cache as it is, and reads what is there."""
        it = rig(case.value)
        rows = it.prepare([(19, 3), (5, 1)])
        first = it.step(rows)
        before = it.whole.clone()
        for request, count in rows:
            request.done -= count
        again = it.step(rows, writes=False)
        assert _same(before, it.whole), "a slot of -1 was written"
        assert _same(torch.cat(first), torch.cat(again)), "the outputs are others without writing"

    @level(2)
    @dangerous
    @cases("plain_cases")
    def test_physical_blocks_do_not_matter(self, rig: Any, case: Case) -> None:
        """Other blocks for the same tokens, and blocks of a prefix that two requests share: equal outputs."""
        size = case.value.block_size
        history = [(size + 3, 4), (2 * size, 1)]
        one, other, shared = (rig(case.value) for _ in range(3))
        other._free.sort()
        expected = torch.cat(one.step(one.prepare(history)))
        assert _same(expected, torch.cat(other.step(other.prepare(history)))), "a permutation of blocks changes outputs"
        (first, count), _ = rows = shared.prepare(history)
        twin = replace(first, blocks=[*first.blocks[:1], *shared.request(len(first.q) - size).blocks], done=size)
        shared.step([(twin, first.done - size)])
        got = shared.step([rows[0], (twin, count), rows[1]])
        assert _same(expected, torch.cat((got[0], got[2]))) or self._near(shared, rows, [got[0], got[2]])
        assert self._near(shared, [(twin, count)], [got[1]])

    @staticmethod
    def _near(it: Rig, rows: Any, got: Any) -> bool:
        for (request, count), part in zip(rows, got, strict=True):
            assert_within(part, plain=it.expected(request, count, it.dtype), oracle=it.expected(request, count))
        return True

    @level(2)
    @dangerous
    @cases("plain_cases")
    def test_batched_and_chunked_equal_alone(self, rig: Any, subject: Subject, case: Case) -> None:
        """A request that fills no page, before others, and cut in pieces: right, and bitwise the same where claimed."""
        size = case.value.block_size
        together, alone, cut = (rig(case.value) for _ in range(3))
        history = [(size - 5, 3), (size, 2), (2, 3)] if size > 5 else [(3, 3), (size, 2), (2, 3)]
        rows = together.prepare(history)
        got = together.step(rows)
        self._near(together, rows, got)
        for index, (request, count) in enumerate(alone.prepare(history)):
            (single,) = alone.step([(request, count)])
            self._near(alone, [(request, count)], [single])
            if subject.claims.has("batch_invariant"):
                assert _same(single, got[index]), f"request {index} has other bits when it is alone"
        whole, pieces = cut.request(2 * size + 3), []
        for count in (size - 1 or 1, 1, 2):
            pieces += cut.step([(whole, count)])
        pieces += cut.step([(whole, len(whole.q) - whole.done)])
        self._near(cut, [(whole, len(whole.q))], [torch.cat(pieces)])
        if subject.claims.has("batch_invariant"):
            fresh = rig(case.value)
            (full,) = fresh.step([(fresh.request(2 * size + 3), 2 * size + 3)])
            assert _same(torch.cat(pieces), full), "chunks have other bits than the whole"

    @level(3)
    @dangerous
    @cases("plain_cases")
    def test_each_step_reads_its_own_metadata(self, rig: Any, case: Case) -> None:
        """Steps of equal sizes with other tables and lengths, one after the other on one instance."""
        it = rig(case.value)
        for before in (9, 9, 6, 20):
            rows = it.prepare([(before, 2), (before + 4, 1)])
            self._near(it, rows, it.step(rows))

    @level(3)
    @dangerous
    @cases("plain_cases")
    def test_layers_share_metadata(self, rig: Any, case: Case) -> None:
        """Metadata serves several layers, which differ in scale, and comes out as it went in; so does the batch."""
        it = rig(case.value)
        rows = it.prepare([(9, 3), (4, 1)])
        batch = it.batch(rows)
        kept = {name: getattr(batch, name).clone() for name in _TENSORS}
        metadata, inputs = it.backend.build_metadata(batch), it.inputs(rows)
        copies, found = [tensor.clone() for tensor in inputs], []
        for name, scale in (("a", 0.1), ("b", 0.4), ("a", 0.1)):
            out = it.output(batch.num_tokens)
            it.backend.forward(replace(it.layer, name=name, scale=scale), *inputs, it.cache, metadata, out)
            found.append(out)
        changed = [name for name, tensor in kept.items() if not torch.equal(tensor, getattr(batch, name))]
        assert not changed, f"forward or build_metadata changes the batch: {', '.join(changed)}"
        assert all(map(_same, inputs, copies)), "forward changes its queries, keys or values"
        assert _same(found[0], found[2]), "the first layer has other outputs after another layer"
        assert not _same(found[0], found[1]), "the second layer is computed with the first one's constants"

    @level(3)
    @dangerous
    @cases("plain_cases")
    def test_two_instances_share_no_state(self, rig: Any, case: Case) -> None:
        """Built twice and used by turns, each computes what it computes alone."""
        one, other = rig(case.value), rig(replace(case.value, block_size=2 * case.value.block_size))
        rows = [(it, it.prepare([(9, 3), (4, 1)])) for it in (one, other)]
        for it, wanted in rows:
            self._near(it, wanted, it.step(wanted))
        del other
        (single,) = one.step([(one.request(5), 5)])
        assert single.isfinite().all()

    # ---- graphs

    @classmethod
    def graph_cases(cls, claims: Claims) -> list[Case]:
        """What a capture is tried with."""
        found = [case for case in cls.plain_cases(claims) if case.id != "heads_8_2"]
        wanted = [cls._case(claims, case.id, replace(case.value, extra=frozenset({"graphs"}))) for case in found]
        return [replace(case, value=replace(case.value, extra=frozenset())) for case in wanted]

    def _replays(self, rig: Any, subject: Subject, setup: Setup, capture: Any) -> None:
        """Several steps through one capture: other requests, lengths, blocks and slots, and rows without a request."""
        support = subject.plugin_class.graph_support()
        if support is GraphSupport.NEVER:
            unavailable("graphs are claimed, but not supported on this machine")
        shapes = [(1, 1, 1)]
        is_any = support in (GraphSupport.ALWAYS, GraphSupport.RAGGED)
        shapes += [(3, 3, 3)] if is_any or support is GraphSupport.UNIFORM else []
        shapes += [(4, 1, 2)] if is_any else []
        if support is GraphSupport.RAGGED:
            self._ragged(rig, setup, capture)
        size = setup.block_size
        for counts in shapes:
            it = rig(setup)
            static = Static(rig=it, counts=counts)
            one = [it.started(before, 3 * now) for before, now in zip((5, size - 1, 3), counts, strict=True)]
            two = [it.started(before, now) for before, now in zip((2 * size, 2, size), counts, strict=True)]
            steps = [[None] * 3, one, two, [one[2], None, one[0]], [None, one[1], None]]
            self._take(static, capture, [
                [None if who is None else (who, now) for who, now in zip(requests, counts, strict=True)] for requests in steps
            ])  # fmt: skip

    def _ragged(self, rig: Any, setup: Setup, capture: Any) -> None:
        """One capture for steps whose requests have other numbers of tokens each time."""
        it = rig(setup)
        size = setup.block_size
        long, short, third = it.started(3, 3 * size), it.started(size - 1, 8), it.started(2, size + 8)
        steps = [
            [None, None, None],
            [(long, size + 3), (short, 1), (third, 2)],
            [(short, 1), (long, 1), None],
            [None, None, (long, size + 5)],
            [(third, size + 3), None, (short, 5)],
        ]
        self._take(Static(rig=it, counts=(size + 5, 1, 2), is_ragged=True), capture, steps)

    def _take(self, static: Static, capture: Any, steps: Any) -> None:
        """The steps one after another, the first of them while it is captured."""
        it, replay = static.rig, None
        size = it.setup.block_size
        for rows in steps:
            static.load(rows)
            before = it.whole.clone()
            if replay is None:
                replay = capture(static)
            else:
                replay()
            touched = {slot // size + 1 for slot in static.batch.slot_mapping.tolist() if slot >= 0}
            spoilt = [p - 1 for p in range(len(before)) if p not in touched and not _same(before[p], it.whole[p])]
            assert not spoilt, f"blocks {spoilt} were written; the step has no slots in them"
            self._near(it, [row for row in rows if row is not None], static.outputs(rows))

    @level(3)
    @dangerous
    @cases("graph_cases")
    def test_steps_follow_their_buffers(self, rig: Any, subject: Subject, case: Case) -> None:
        """Lengths, tables and slots are read where they stand, as they are now, and nothing of the host's is."""
        self._replays(rig, subject, case.value, held)

    @level(3)
    @dangerous
    @cases("graph_cases")
    def test_replays_equal_plain_steps(self, rig: Any, subject: Subject, case: Case) -> None:
        """Captured by the platform that is installed for the device, with metadata built inside of the capture."""
        self._replays(rig, subject, case.value, captured)

    @level(2)
    @dangerous
    @cases("plain_cases")
    def test_queries_may_be_strided(self, rig: Any, case: Case) -> None:
        """Queries, keys and values are parts of one wider tensor, as a merged projection leaves them."""
        it = rig(case.value)
        rows = it.prepare([(9, 3), (4, 1)])
        batch = it.batch(rows)
        wide = torch.cat(it.inputs(rows), dim=1)
        parts = torch.split(wide, [case.value.heads, case.value.kv_heads, case.value.kv_heads], dim=1)
        out = it.output(batch.num_tokens)
        it.backend.forward(it.layer, *parts, it.cache, it.backend.build_metadata(batch), out)
        for request, count in rows:
            request.done += count
        self._near(it, rows, out.split([count for _, count in rows]))


def _kv_names(claims: Claims) -> tuple[str, ...]:
    """Names of KV-cache dtypes: known ones, then what is claimed."""
    return tuple(dict.fromkeys(("auto", "fp8_e4m3", "fp8_e5m2", *claims.values("kv_cache_dtype"))))


_HEAD_DIMS = (32, 64, 72, 80, 96, 128, 192, 256, 512)
_BLOCK_SIZES = (8, 16, 32, 48, 64, 128)
_TENSORS = ("query_start", "query_start_cpu", "seq_lens", "seq_lens_cpu", "positions", "block_table", "slot_mapping")
