"""The suite of platforms: detection without traces, honest memory, exact collectives, small operations within the bound.

Where ``detect`` finds nothing, whatever needs the device is unavailable. The device is the one that ``init_device`` gives.

Claims of a manifest that it reads (a key that is left out restricts nothing):

* ``dtype``: as in ``PlatformQuery``, ``auto`` included. ``arch``: patterns of the devices' ``arch``.
* ``features``: of ``layer_ops`` (``layer_ops()`` gives kernels), ``graphs`` (``SupportsGraphs``), ``async_steps``
  (``SupportsAsyncSteps``), ``ranks`` (several ranks on one machine; a refusal ``RANKS`` says that this one has too few
  devices) and ``device_ids`` (``"0"`` is the first).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from rabbet.contracts.platform import CaptureError, DrawBatch, PlatformQuery, SupportsAsyncSteps, SupportsGraphs
from rabbet.errors import PluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.known import install_hint
from rabbet.registry.policy import PluginPolicy
from rabbet_sdk.conformance._kernels import DTYPES, inside, is_same
from rabbet_sdk.conformance._platform_rig import look, run_ranks, start
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unavailable, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.numerics import assert_within
from rabbet_sdk.oracles import layer_ops as oracles
from rabbet_sdk.oracles.sampling import assert_drawn_from
from rabbet_sdk.oracles.sampling import filtered as oracle_filtered

__all__ = ["PlatformConformance"]

_NAN = float("nan")
_KINDS = ("attention", "linear", "moe", "executor")
_ROWS = (0, 1, 2, 7, 65)
_DRAWS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """A platform with its device claimed."""

    platform: Any
    device: torch.device
    claims: Claims
    generator: torch.Generator

    def random(self, dtype: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers on the device."""
        drawn = torch.randn(shape, generator=self.generator, device="cpu") * scale
        return drawn.to(getattr(torch, dtype)).to(self.device)

    def ops(self) -> Any:
        """The small operations; ends the test where there are none."""
        ops, is_claimed = self.platform.layer_ops(), self.claims.has("layer_ops")
        if ops is None:
            (unavailable if is_claimed else unclaimed)("layer_ops() gives None")
        assert is_claimed, "layer_ops() gives kernels, though the feature layer_ops is not claimed"
        return ops

    def able(self, feature: str, ability: type[Any]) -> Any:
        """The platform, if it has an optional ability; ends the test otherwise."""
        is_claimed = self.claims.has(feature)
        if not isinstance(self.platform, ability):
            assert not is_claimed, f"the feature {feature} is claimed, but the class is no {ability.__name__}"
            unclaimed(f"feature {feature}")
        assert is_claimed, f"the class is a {ability.__name__}, but the feature {feature} is not claimed"
        if self.claims.has("layer_ops") and self.platform.layer_ops() is None:
            unavailable("the platform's kernels are not there")
        return self.platform

    def graphs(self) -> Any:
        """The platform, if it captures; ends the test otherwise."""
        return self.able("graphs", SupportsGraphs)

    def rows(self, rows: Sequence[Mapping[str, float]]) -> DrawBatch:
        """What is drawn in each row; what a row leaves out is off."""

        def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([row.get(name, default) for row in rows], dtype=dtype, device=self.device)

        return DrawBatch(
            temperature_B=column("temperature", 1.0, torch.float32), top_k_B=column("top_k", 0, torch.int32),
            top_p_B=column("top_p", 1.0, torch.float32), min_p_B=column("min_p", 0.0, torch.float32),
            seed_B=column("seed", 0, torch.int64), index_B=column("index", 0, torch.int64),
            is_random=any(row.get("temperature", 1.0) > 0 for row in rows),
            is_filtered=any({"top_k", "top_p", "min_p"} & set(row) for row in rows),
        )  # fmt: skip


class Work:
    """A step to capture: whole numbers, so that a sum is exact in any order, and the platform's own operations."""

    def __init__(self, live: Live, rows: int) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64, device=live.device)
        self.table = live.random("float32", 50, 64).mul(4).round()
        self.weight = live.random("float32", 64, 64).mul(4).round()
        self.norm, self.ops = torch.ones(64, device=live.device), live.platform.layer_ops()
        self.outputs: list[torch.Tensor] = []

    def __call__(self) -> None:
        """Leaves its result in ``outputs``."""
        x = F.embedding(self.ids, self.table) @ self.weight
        x = x * 0.5
        x.add_(1)
        if self.ops is not None:
            x, _ = self.ops.add_rms_norm(x, x + 1, self.norm, 1e-5)
            x = self.ops.silu_and_mul(x)
        self.outputs.append(x)

    def plain(self, *ids: int) -> torch.Tensor:
        """What it gives for other ids, without a graph."""
        self.ids.copy_(torch.tensor(ids))
        self()
        return self.outputs.pop().clone()


class PlatformConformance(SupportsConformance):
    """Subclass, name the plugin, done. See the module for claims.

    Attributes:
        hidden: Environment variables under which the platform must find no device, e.g. ``{"CUDA_VISIBLE_DEVICES": ""}``.
        allocation_bytes: Memory that tests of memory take, once in this process and once in another.
    """

    kind = "platform"
    hidden: ClassVar[Mapping[str, str]] = {}
    allocation_bytes: ClassVar[int] = 256 << 20
    knobs = SupportsConformance.knobs | {"hidden", "allocation_bytes"}
    machine_codes = SupportsConformance.machine_codes | {"RANKS"}

    @classmethod
    def query_cases(cls, claims: Claims) -> list[Case]:
        """Types, numbers of ranks, devices by id."""
        found = []
        name = next((dtype for dtype in ("auto", *DTYPES) if claims.allows("dtype", dtype)), "auto")

        def add(id: str, *features: str, never: str = "", dtype: str = name, **facts: Any) -> None:
            reasons = never or claims.missing({"dtype": dtype}, features)
            found.append(Case(id=id, value=PlatformQuery(dtype=dtype, **facts), unclaimed=reasons))

        for dtype in ("auto", *DTYPES):
            add(f"dtype_{dtype}", dtype=dtype)
        for dtype in ("float64", "int8", "no_such_type"):
            add(f"dtype_{dtype}", dtype=dtype, never="" if dtype in claims.values("dtype") else f"dtype {dtype}")
        add("ranks_2", "ranks", num_local_ranks=2)
        add("ranks_many", never="no machine has so many devices", num_local_ranks=1 << 20)
        add("device_0", "device_ids", device_ids=("0",))
        add("device_unknown", never="no such device", device_ids=("no-such-device",))
        add("devices_too_few", never="two ranks on one device", num_local_ranks=2, device_ids=("0",))
        return found

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """Each type that a model computes in."""
        return [Case(id=name, value=name, unclaimed=claims.missing({"dtype": name})) for name in DTYPES]

    @pytest.fixture
    def live(self, subject: Subject, generator: torch.Generator) -> Live:
        """A new instance with its device; ends the test where there is none."""
        if not subject.plugin_class.detect():
            unavailable("detect() finds no device on this machine")
        platform = subject.plugin_class()
        device = platform.init_device(local_rank=0, world_size=1)
        return Live(platform=platform, device=device, claims=subject.claims, generator=generator)

    # ---- without a device

    def test_import_brings_no_torch(self, subject: Subject) -> None:
        """The front end asks every platform that is installed; importing torch for it costs seconds at each start."""
        facts = look(self.plugin)
        assert not facts.get("torch"), "importing the plugin's module imports torch; import it where it is used"

    def test_detection_leaves_no_trace(self, subject: Subject) -> None:
        """It never raises, says the same twice, makes no context, and changes nothing of the process."""
        facts = look(self.plugin)
        assert not facts["error"], f"detection or supports failed: {facts['error']}"
        assert not facts["changed"], f"detection changes the process: {'; '.join(facts['changed'])}"
        assert not facts["cuda"], "detection made a CUDA context, which no child process could use after a fork"
        first, second = facts["devices"]
        assert first == second, "detect says something else the second time"

    def test_an_absent_device_is_no_news(self, subject: Subject) -> None:
        """Where there is no device ``detect`` is empty and writes nothing, and ``supports`` refuses."""
        facts = look(self.plugin)
        if facts.get("devices", [[]])[0]:
            if not self.hidden:
                unclaimed("nothing hides the device (the knob hidden)")
            facts = look(self.plugin, tuple(self.hidden.items()))
        assert not facts["error"], f"detection or supports failed: {facts['error']}"
        assert not facts["devices"][0], f"devices are found in spite of {dict(self.hidden)}"
        assert not facts["output"].strip(), f"a machine without the device has to read this: {facts['output'][-500:]}"
        assert not facts["accepted"], f"no device, but dtype {', '.join(facts['accepted'])} is accepted"

    def test_devices_are_described(self, subject: Subject) -> None:
        """Numbered from 0, with a name, an architecture of the claimed ones and memory; the type is one of torch's."""
        assert torch.device(subject.plugin_class.device_type).index is None
        devices = subject.plugin_class.detect()
        if not devices:
            unavailable("detect() finds no device on this machine")
        assert [device.index for device in devices] == list(range(len(devices))), "devices are numbered 0, 1, ..."
        for device in devices:
            assert device.name.strip() and device.total_memory_bytes > 0, device
            assert device.arch and not set(device.arch) & set(string.whitespace), f"arch {device.arch!r}"
            assert subject.claims.allows("arch", device.arch), f"arch {device.arch} is not claimed"

    def test_defaults_can_be_used(self, subject: Subject) -> None:
        """Budgets are positive and fit together for any number of ranks; types for "auto" are ones that are claimed."""
        cls = subject.plugin_class
        for world_size in (1, 2, 8):
            for is_server in (True, False):
                found = cls.batch_defaults(is_server=is_server, world_size=world_size)
                assert 0 < found.max_num_seqs <= found.max_num_batched_tokens, found
                assert 0 < found.memory_fraction <= 1, found
                assert found.max_kv_cache_bytes is None or found.max_kv_cache_bytes > 0, found
                assert found == cls.batch_defaults(is_server=is_server, world_size=world_size), "other ones each time"
        for dtype in DTYPES:
            chosen = cls.default_dtype(dtype)
            assert chosen in DTYPES and subject.claims.allows("dtype", chosen), f"{chosen!r} for a {dtype} checkpoint"
            assert cls.default_dtype(chosen) == chosen, f"{dtype} -> {chosen} -> {cls.default_dtype(chosen)}"

    def test_preferences_are_plugins(self, subject: Subject) -> None:
        """Each preferred name is installed or known to a catalog, and an installed one claims the device's type."""
        catalog, device = Catalog.scan(PluginPolicy(auto="any")), subject.plugin_class.device_type
        assert subject.plugin_class.preferences("no_such_kind") == ()
        for kind in _KINDS:
            names = subject.plugin_class.preferences(kind)
            assert isinstance(names, tuple) and len(set(names)) == len(names), f"{kind}: {names!r}"
            for name in names:
                entries = [entry for entry in catalog.of_kind(kind) if entry.name == name]
                assert entries or install_hint(kind, name), f"preferences({kind!r}) names {name!r}, which nobody knows"
                for entry in entries:
                    claimed = entry.provided.claims.get("device") if entry.provided else None
                    assert not claimed or device in claimed, f"{kind}/{name} is preferred, but does not run on {device}"

    # ---- device and memory

    @level(2)
    @dangerous
    def test_device_is_of_the_declared_type(self, live: Live, subject: Subject) -> None:
        """It computes, also through a second instance, and ``synchronize`` waits for what was launched."""
        other = subject.plugin_class()
        for device in (live.device, other.init_device(local_rank=0, world_size=1)):
            assert device.type == live.platform.device_type == type(live.platform).device_type, device
            x = torch.arange(1000, device=device)
            total = (x * x).sum()
            if device.type != "cpu":
                event = torch.Event(device)
                event.record()
                live.platform.synchronize()
                assert event.query(), "synchronize() came back before the device had done what was launched"
            live.platform.synchronize()
            assert int(total) == sum(n * n for n in range(1000))

    @level(3)
    @dangerous
    def test_memory_adds_up(self, live: Live, subject: Subject) -> None:
        """Numbers are within the device's memory; what this process takes shows as used, as not free, and ends again."""
        total, size = subject.plugin_class.detect()[0].total_memory_bytes, self.allocation_bytes
        before = live.platform.memory()
        assert 0 < before.total_bytes <= total, f"{before} of a device of {total} bytes"
        assert 0 <= before.free_bytes <= before.total_bytes and 0 <= before.used_by_process_bytes <= total, before
        if before.free_bytes < 4 * size:
            unavailable(f"{before.free_bytes} bytes are free; the test needs {4 * size}")
        held = torch.ones(size, dtype=torch.uint8, device=live.device)
        live.platform.synchronize()
        grown = live.platform.memory().used_by_process_bytes - before.used_by_process_bytes
        assert 0.9 * size < grown < 1.25 * size + (32 << 20), (
            f"{size} bytes were taken; used_by_process_bytes: +{grown}"
        )
        for _ in range(3):
            del held
            held = torch.ones(size, dtype=torch.uint8, device=live.device)
            grown = live.platform.memory().used_by_process_bytes - before.used_by_process_bytes
            assert grown < 1.25 * size + (32 << 20), f"{size} bytes, given back and taken again, count as {grown}"
        del held

    @level(3)
    @dangerous
    def test_memory_of_others_is_not_free(self, live: Live, tmp_path: Path) -> None:
        """Another process takes memory of the same device: less is free, and this process does not hold it."""
        size = self.allocation_bytes
        if live.platform.memory().free_bytes < 6 * size:
            unavailable(f"the test needs {6 * size} free bytes")
        other = start("hold", self.plugin, tmp_path / "none")
        told, heard = other.stdin, other.stdout
        assert told is not None and heard is not None
        seen: list[str] = []
        drops: list[int] = []
        try:
            while (line := heard.readline()) and line != "ready\n":
                seen.append(line)
            assert line, f"a new process cannot use the device: {''.join(seen)[-1500:]}"
            # Others use the machine as well, and a system gives back late: one clear answer of several is enough.
            while not drops or (len(drops) < 4 and drops[-1] < 0.7 * size):
                before = live.platform.memory()
                told.write(f"{size}\n")
                told.flush()
                assert heard.readline() == "done\n", "the other process could not take memory"
                after = live.platform.memory()
                assert after.used_by_process_bytes - before.used_by_process_bytes < size / 2, "of another process"
                drops.append(before.free_bytes - after.free_bytes)
        finally:
            other.kill()
            other.wait()
        assert drops[-1] >= 0.7 * size, f"another process took {size} bytes; free_bytes fell by {drops}"

    @level(3)
    @dangerous
    def test_peak_is_a_peak(self, live: Live) -> None:
        """If the platform tells a peak, it is that of tensors since ``memory`` was asked, whatever has been freed."""
        live.platform.memory()
        if (start := live.platform.peak_activation_bytes()) is None:
            unclaimed("peak_activation_bytes() gives None")
        size = 64 << 20
        tensor = torch.ones(size, dtype=torch.uint8, device=live.device)
        live.platform.synchronize()
        del tensor
        peak = live.platform.peak_activation_bytes()
        assert size <= peak <= start + 1.25 * size + (32 << 20), (
            f"{size} bytes were taken and freed; the peak is {peak}"
        )
        live.platform.memory()
        assert live.platform.peak_activation_bytes() < size / 2, "memory() does not start the peak anew"

    # ---- small operations

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rms_norm_is_its_formula(self, live: Live, case: Case, record_property: Any) -> None:
        """Any rows, leading axes and sizes, small numbers beside eps, large ones whose squares overflow a half."""
        ops, dtype = live.ops(), getattr(torch, case.value)
        for size in (64, 576, 1000):
            weight = live.random(case.value, size)
            for rows in _ROWS:
                for scale, eps in ((1.0, 1e-6), (1e-3, 1e-6), (1e-3, 1e-2), (1000.0, 1e-5)):
                    x = inside(live.random(case.value, rows, size, scale=scale), _NAN)
                    kept = x.clone()
                    got = ops.rms_norm(x, weight, eps)
                    assert (got.shape, got.dtype) == (x.shape, dtype) and is_same(x, kept), "shape, type, or input"
                    self._norm_is_near(got, x, weight, eps, record_property)
        # Heads of a packed tensor.
        packed, weight = live.random(case.value, 7, 5 * 64 + 96), live.random(case.value, 64)
        heads = packed[:, : 5 * 64].view(7, 5, 64)
        self._norm_is_near(ops.rms_norm(heads, weight, 1e-6), heads, weight, 1e-6, record_property)

    @staticmethod
    def _norm_is_near(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, record: Any = None) -> None:
        ones = torch.ones_like(weight)
        plain = oracles.rms_norm(x, ones, eps, torch.float32).to(x.dtype) * weight
        assert_within(got, plain=plain, oracle=oracles.rms_norm(x, weight, eps, torch.float64), record=record)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_add_rms_norm_gives_norm_and_sum(self, live: Live, case: Case, record_property: Any) -> None:
        """``r = x + residual``, and its norm."""
        ops = live.ops()
        for rows in _ROWS:
            x, residual = live.random(case.value, rows, 576), live.random(case.value, rows, 576, scale=3.0)
            weight, exact, plain = live.random(case.value, 576), x.double() + residual.double(), x + residual
            norm, total = ops.add_rms_norm(x, residual, weight, 1e-5)
            assert_within(total, plain=plain, oracle=exact, record=record_property)
            ones = torch.ones_like(weight)
            wanted = oracles.rms_norm(exact, weight, 1e-5, torch.float64)
            rounded = oracles.rms_norm(plain, ones, 1e-5, torch.float32).to(plain.dtype) * weight
            assert_within(norm, plain=rounded, oracle=wanted, record=record_property)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rotary_turns_pairs_by_their_angle(self, live: Live, case: Case, record_property: Any) -> None:
        """Both ways to pair, whole heads and parts of them, queries and keys out of one packed tensor."""
        ops, dtype = live.ops(), getattr(torch, case.value)
        for head, turned, heads, kv_heads in ((64, 64, 4, 2), (64, 32, 5, 1), (128, 128, 2, 2), (80, 20, 3, 3)):
            angles = live.random("float32", 50, turned // 2, scale=3.0)
            table = torch.cat((angles.cos(), angles.sin()), dim=1)
            for rows in _ROWS:
                positions = torch.randint(0, 50, (rows,), generator=live.generator).to(live.device)
                for is_neox in (True, False):
                    packed = live.random(case.value, rows, (heads + 2 * kv_heads) * head)
                    before = packed.clone()
                    q, k, v = self._split(packed, heads, kv_heads, head)
                    got = ops.rotary(q, k, positions, table, is_neox=is_neox)
                    old_q, old_k, old_v = self._split(before, heads, kv_heads, head)
                    for new, old in zip(got, (old_q, old_k), strict=True):
                        exact, plain = (
                            oracles.rotary(old, positions, table, is_neox=is_neox, dtype=kind)
                            for kind in (torch.float64, torch.float32)
                        )
                        assert_within(new, plain=plain.to(dtype), oracle=exact, record=record_property)
                        assert is_same(new[..., turned:], old[..., turned:]), "elements behind the rotated ones changed"
                    assert is_same(v, old_v), "values beside queries and keys changed"

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_norm_rotary_is_both_steps(self, live: Live, case: Case, record_property: Any) -> None:
        """The norm of each head, then the rotation."""
        ops, dtype, eps = live.ops(), getattr(torch, case.value), 1e-5
        angles = live.random("float32", 50, 32, scale=3.0)
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        weights, ones = [live.random(case.value, 64) for _ in range(2)], torch.ones(64, dtype=dtype, device=live.device)
        for rows in _ROWS:
            positions = torch.randint(0, 50, (rows,), generator=live.generator).to(live.device)
            packed = live.random(case.value, rows, 8 * 64)
            old = self._split(packed.clone(), 4, 2, 64)
            q, k, v = self._split(packed, 4, 2, 64)
            got = ops.norm_rotary(q, k, *weights, eps, positions, table, is_neox=True)
            for new, x, weight in zip(got, old, weights, strict=False):
                exact = oracles.rms_norm(x, weight, eps, torch.float64)
                plain = oracles.rms_norm(x, ones, eps, torch.float32).to(dtype) * weight
                exact, plain = (
                    oracles.rotary(x, positions, table, is_neox=True, dtype=kind)
                    for x, kind in ((exact, torch.float64), (plain, torch.float32))
                )
                assert_within(new, plain=plain.to(dtype), oracle=exact, record=record_property)
            assert is_same(v, old[2]), "values beside queries and keys changed"

    @staticmethod
    def _split(packed: torch.Tensor, heads: int, kv_heads: int, head: int) -> list[torch.Tensor]:
        parts: Any = torch.split(packed, [heads * head, kv_heads * head, kv_heads * head], dim=-1)
        return [part.unflatten(-1, (-1, head)) for part in parts]

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_gated_activations_are_their_formulas(self, live: Live, case: Case, record_property: Any) -> None:
        """The first half goes through the activation; gates of any size, also such as overflow an exponential."""
        ops = live.ops()
        for name, act, plain in (
            ("silu", ops.silu_and_mul, F.silu),
            ("gelu", lambda x: ops.gelu_and_mul(x, approximate="none"), F.gelu),
            ("gelu_tanh", lambda x: ops.gelu_and_mul(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
        ):
            for rows, size, scale in ((0, 64, 1.0), (1, 33, 1.0), (7, 1000, 4.0), (65, 64, 60.0)):
                x = live.random(case.value, rows, 2 * size, scale=scale)
                kept, (gate, up) = x.clone(), x.chunk(2, dim=-1)
                got = act(x)
                assert (got.shape, got.dtype) == ((rows, size), x.dtype), f"{name}: {tuple(got.shape)} {got.dtype}"
                assert is_same(x, kept), f"{name} changes its input"
                assert_within(got, plain=plain(gate) * up, oracle=oracles.gated(x, name), record=record_property)

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_rows_of_small_operations_are_apart(self, live: Live, case: Case) -> None:
        """NaN in a row shows in that row alone, and a row alone has the bits that it has among others."""
        ops, weight = live.ops(), live.random(case.value, 128)
        x = live.random(case.value, 19, 128)
        spoilt = x.clone()
        spoilt[7, 3] = _NAN
        for name, act in (
            ("rms_norm", lambda x: ops.rms_norm(x, weight, 1e-5)),
            ("add_rms_norm", lambda x: ops.add_rms_norm(x.clone(), x.clone(), weight, 1e-5)[0]),
            ("silu_and_mul", ops.silu_and_mul),
        ):
            whole, got = act(x), act(spoilt)
            others = [row for row in range(19) if row != 7]
            assert got[7].isnan().any(), f"{name}: NaN does not show"
            assert is_same(got[others], whole[others]), f"{name}: NaN of one row reaches others"
            assert is_same(act(x[4:5].clone()), whole[4:5]), f"{name}: a row has other bits alone"

    # ---- graphs

    @level(3)
    @dangerous
    @torch.inference_mode()
    def test_a_replay_is_a_run(self, live: Live) -> None:
        """Outputs hold after the capture; a replay on new inputs gives the bits of a run, in the same memory."""
        platform, work = live.graphs(), Work(live, 3)
        wanted = work.plain(1, 2, 3)
        session = platform.capture(work)
        out = work.outputs.pop()
        platform.synchronize()
        assert is_same(out, wanted), "the capture did not leave the outputs of its run"
        for ids in ((7, 8, 9), (49, 0, 7), (1, 2, 3)):
            wanted = work.plain(*ids)
            others = [torch.full((rows, 64), _NAN, device=live.device) for rows in range(1, 30)]
            out.fill_(_NAN)
            session.replay()
            platform.synchronize()
            assert is_same(out, wanted), f"a replay on {ids} differs from a run"
            assert all(bool(other.isnan().all()) for other in others), "a replay writes into memory of others"

    @level(3)
    @dangerous
    @torch.inference_mode()
    def test_sessions_take_turns(self, live: Live, subject: Subject) -> None:
        """Sessions of several sizes, and of another instance, in any order."""
        other = subject.plugin_class()
        other.init_device(local_rank=0, world_size=1)
        works = [Work(live, rows) for rows in (1, 2, 5, 3)]
        owners = [live.graphs()] * 3 + [other]
        for work in works:
            # As the runner warms up: libraries allocate what they need on their first call.
            work.plain(*([1] * len(work.ids)))
        sessions = [owner.capture(work) for owner, work in zip(owners, works, strict=True)]
        outs = [work.outputs.pop() for work in works]
        order = [*range(4)] * 3
        random.Random(0).shuffle(order)
        for turn, index in enumerate(order):
            wanted = works[index].plain(*([turn + 11] * len(works[index].ids)))
            sessions[index].replay()
            live.platform.synchronize()
            assert is_same(outs[index], wanted), f"session {index} is wrong in turn {turn} of {order}"

    @level(3)
    @dangerous
    @torch.inference_mode()
    def test_what_cannot_be_captured_is_refused(self, live: Live) -> None:
        """Work that looks at values raises ``CaptureError``; afterwards everything goes on, capturing too."""
        platform, x = live.graphs(), live.random("float32", 4, 64)
        looks: tuple[Callable[[], Any], ...] = (lambda: x.sum().item(), lambda: x[x > 0], lambda: bool((x > 0).any()))
        for number, look_at in enumerate(looks):
            with pytest.raises(CaptureError):
                platform.capture(look_at)
            work = Work(live, 2)
            wanted = work.plain(number, number + 1)
            platform.capture(work).replay()
            platform.synchronize()
            assert is_same(work.outputs.pop(), wanted), "after a refusal captures are wrong"

    # ---- draws

    @level(2)
    @dangerous
    @cases("dtype_cases")
    def test_draws_follow_the_distribution(self, live: Live, case: Case) -> None:
        """As often as they are likely, after each filter and after all; what a filter excludes or is -inf never."""
        platform, count = live.able("async_steps", SupportsAsyncSteps), 2000
        # Halves of whole numbers: no type rounds them, and no two are equal.
        logits = torch.randperm(12, generator=live.generator).double() / 2 - 4
        logits[3] = float("-inf")
        seeds = torch.randint(-(1 << 62), 1 << 62, (count,), generator=live.generator).tolist()
        for options in _DRAWS:
            batch = live.rows([{**options, "seed": seed, "index": n % 7} for n, seed in enumerate(seeds)])
            given = logits.to(getattr(torch, case.value)).to(live.device).expand(count, -1).clone()
            drawn = platform.draw(given, batch)
            assert (drawn.shape, drawn.dtype, drawn.device) == ((count,), torch.int64, live.device), drawn
            seen = torch.bincount(drawn.cpu(), minlength=12).double()
            assert_drawn_from(seen, oracle_filtered(logits, **options) * count, f"{options}")

    @level(3)
    @dangerous
    def test_draws_are_a_rows_own_affair(self, live: Live) -> None:
        """The same seed and index give the same token in any company; rows that are not finite give -1, alone."""
        platform = live.able("async_steps", SupportsAsyncSteps)
        rows = [{**_DRAWS[n % len(_DRAWS)], "seed": n // 3, "index": n} for n in range(48)]
        rows += [{"temperature": 0.0}] * 4
        logits = live.random("float32", len(rows), 300, scale=2.0)
        logits[-1, [17, 200]] = 50.0
        whole = platform.draw(logits.clone(), live.rows(rows)).tolist()
        assert whole[-1] == 17, "a greedy row takes the first of equal ones"
        assert whole[-4:-1] == logits[-4:-1].argmax(-1).tolist(), "a greedy row takes the likeliest"
        assert (
            len(
                {
                    *platform.draw(
                        logits[:1].expand(64, -1).clone(), live.rows([{"index": n} for n in range(64)])
                    ).tolist()
                }
            )
            > 8
        )
        spoilt = logits.clone()
        spoilt[5, 7], spoilt[20, 3], spoilt[30] = _NAN, float("inf"), float("-inf")
        for some in ([*range(len(rows))][::-1], [0], [51, 2, 13], [*range(6, 20)]):
            got = platform.draw(logits[some].clone(), live.rows([rows[n] for n in some])).tolist()
            assert got == [whole[n] for n in some], f"rows {some} give {got} alone"
        got = platform.draw(spoilt, live.rows(rows)).tolist()
        assert got == [-1 if n in (5, 20, 30) else token for n, token in enumerate(whole)], "rows that are not finite"
        x = torch.arange(100_000, device=live.device) * 2
        platform.mark()()
        assert int(x[-1]) == 199_998

    # ---- ranks, engine

    @level(3)
    @dangerous
    def test_collectives_are_exact(self, subject: Subject, tmp_path: Path) -> None:
        """Two ranks in new processes sum and gather every claimed type, no element and one element included."""
        claims = subject.claims
        if not claims.has("ranks"):
            unclaimed("feature ranks")
        dtypes = [name for name in DTYPES if claims.allows("dtype", name)]
        refusals = subject.plugin_class.supports(PlatformQuery(dtype=dtypes[0], num_local_ranks=2))
        if any(item.code in self.machine_codes for item in refusals):
            unavailable("; ".join(str(item) for item in refusals))
        problems = run_ranks(self.plugin, tmp_path, 2, dtypes)
        assert not problems, "; ".join(problems)

    @level(4)
    @dangerous
    @pytest.mark.usefixtures("live")
    def test_tokens_are_those_of_plain_torch(self, subject: Subject, tmp_path: Path) -> None:
        """A whole engine on the device says what a scripted model has to, and a random one says what it does without."""
        from rabbet_sdk.fakes.engine import TinyEngine
        from rabbet_sdk.fakes.platform import NullPlatform

        if not subject.claims.allows("dtype", "float32"):
            unclaimed("dtype float32")
        script = [((5, 6, 7), (8, 9, 10, 11)), ((20,), (21, 22, 23)), (tuple(range(2, 40)), (41, 42, 43))]
        prompts = [prompt for prompt, _ in script]
        with TinyEngine(tmp_path / "script", script=script, device=subject.entry.name) as engine:
            said = engine.generate(prompts, max_tokens=8)
        assert [tokens[:-1] for tokens in said] == [list(output) for _, output in script], said
        with TinyEngine(tmp_path / "device", device=subject.entry.name) as engine:
            found = engine.generate(prompts, max_tokens=24)
        null = NullPlatform.__rabbet_registrations__[0].name  # type: ignore[attr-defined]
        try:
            reference = TinyEngine(tmp_path / "null", device=null)
        except PluginError as error:
            unavailable(f"nothing to compare with: {error}")
        with reference:
            wanted = reference.generate(prompts, max_tokens=24)
        assert found == wanted, "greedy tokens of a random model in float32 are not those of plain torch"
