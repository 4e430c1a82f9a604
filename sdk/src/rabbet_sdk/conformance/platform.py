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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rabbet.contracts.platform import CaptureError, PlatformQuery, SupportsAsyncSteps
from rabbet.errors import PluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.known import install_hint
from rabbet.registry.policy import PluginPolicy
from rabbet_sdk.conformance._kernels import DTYPES, is_same
from rabbet_sdk.conformance._layer_ops import LayerOpsConformance
from rabbet_sdk.conformance._platform_live import Live, Work
from rabbet_sdk.conformance._platform_rig import look, run_ranks, start
from rabbet_sdk.conformance.base import SupportsConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level, unavailable, unclaimed
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.oracles.sampling import assert_drawn_from
from rabbet_sdk.oracles.sampling import filtered as oracle_filtered

__all__ = ["PlatformConformance"]

_NAN = float("nan")
_KINDS = ("attention", "linear", "moe", "executor")
_DRAWS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
)  # fmt: skip


class PlatformConformance(LayerOpsConformance):
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
