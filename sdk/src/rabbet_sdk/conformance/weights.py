"""The suite of checkpoint formats: every tensor bit by bit, and every way in which files can be cut, bent or lie.

An author gives ``write``: tensors and config.json in, a checkpoint on disk out. Claims that are read: ``dtype`` (types
that come back bit by bit), and the features ``tensors`` (the format stores any) and ``detect`` (it knows its files).
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rabbet.contracts.weights import ModelFiles, ResolveQuery
from rabbet.errors import WeightsError
from rabbet_sdk.conformance.base import PluginConformance
from rabbet_sdk.conformance.cases import Case, Claims, cases
from rabbet_sdk.conformance.outcome import dangerous, level
from rabbet_sdk.conformance.subject import Subject
from rabbet_sdk.environment import child_environment
from rabbet_sdk.oracles.weights import bits_of, random_bits, write_plain

__all__ = ["WeightsConformance"]

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_NAMES = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 5),
    "model.norm.weight": (8,),
    "model.scalar": (),
    "model.empty": (0, 4),
}
_MAX_EXTRA_KIB = 1 << 20
_FRONT = """
import sys
from rabbet.contracts.weights import ResolveQuery
from rabbet.registry.catalog import Catalog
from rabbet.registry.loader import load_entry
name, owner, model, cache = sys.argv[1:]
cls = load_entry(next(e for e in Catalog.scan().entries if (e.kind, e.name, e.distribution) == ("weights", name, owner)))
query = ResolveQuery(model=model, download_dir=cache, is_offline=True)
cls.matches(query), cls.resolve(query)
print(" ".join(m for m in ("torch", "triton") if m in sys.modules))
"""


class _Payload:
    """A pickle that leaves a file behind if somebody loads it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class WeightsConformance(PluginConformance):
    """Subclass, name the plugin, set ``write``.

    Attributes:
        write: ``(directory, tensors, config)`` writes a checkpoint with the format's own tools and returns ``MODEL``.
        names: Names and shapes of the tensors to write.
        config: Content of config.json; ``architectures`` has to come back.
    """

    kind = "weights"
    names: ClassVar[Mapping[str, tuple[int, ...]]] = _NAMES
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}
    knobs = PluginConformance.knobs | {"write", "names", "config"}

    @staticmethod
    def write(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
        """Write a checkpoint; the default is the format of the template."""
        return write_plain(directory, tensors, config)

    @classmethod
    def dtype_cases(cls, claims: Claims) -> list[Case]:
        """Types that checkpoints have."""
        return [Case(id=name, value=name, unclaimed=claims.missing({"dtype": name}, ["tensors"])) for name in _DTYPES]

    @pytest.fixture
    def checkpoint(self, subject: Subject, tmp_path: Path) -> _Checkpoint:
        """A checkpoint in the first type that is claimed, and the plugin that reads it."""
        dtype = next((name for name in _DTYPES if subject.claims.allows("dtype", name)), "float32")
        return _Checkpoint(self, subject, tmp_path, getattr(torch, dtype))

    @cases("dtype_cases")
    def test_tensors_come_back_bit_by_bit(self, subject: Subject, tmp_path: Path, case: Case) -> None:
        """Each tensor once, under its name, with type, shape and bytes; the headers say the same."""
        saved = _Checkpoint(self, subject, tmp_path, getattr(torch, case.value))
        files = saved.resolve()
        for _ in range(2):
            saved.assert_equal(files)
        infos = {info.name: (info.shape, info.dtype) for info in subject.plugin_class.infos(files)}
        assert infos == {name: (tuple(t.shape), case.value) for name, t in saved.tensors.items()}
        assert all(info.file in files.weight_files for info in subject.plugin_class.infos(files))

    def test_a_model_is_described(self, checkpoint: _Checkpoint) -> None:
        """Name, configuration with its architectures, absolute files that exist, a tokenizer only if there is one."""
        files = checkpoint.resolve()
        assert files.name and files.config["architectures"] == self.config["architectures"]
        assert all(path.is_absolute() and path.is_file() for path in map(Path, files.weight_files))
        assert files.tokenizer_dir is None or Path(files.tokenizer_dir).is_dir()

    def test_only_own_files_are_recognised(self, checkpoint: _Checkpoint, tmp_path: Path) -> None:
        """``matches`` takes its own checkpoints and nothing else, whatever text comes in."""
        matches = checkpoint.subject.plugin_class.matches
        (tmp_path / "empty").mkdir()
        (tmp_path / "note.txt").write_text("no model")
        if checkpoint.subject.claims.has("detect"):
            assert matches(checkpoint.query), "does not recognise its own checkpoint"
        elif matches(checkpoint.query):
            raise AssertionError("recognises files, though the feature detect is not claimed")
        paths = (str(tmp_path / "empty"), str(tmp_path / "note.txt"), str(tmp_path / "absent"))
        taken = [
            text for text in (*paths, "", "\0", "a" * 5000, "~nobody/x", "//") if matches(ResolveQuery(model=text))
        ]
        assert not taken, f"recognises what is no checkpoint: {taken}"

    def test_what_is_absent_is_refused(self, checkpoint: _Checkpoint, tmp_path: Path) -> None:
        """A path without a model raises ``WeightsError`` with the path."""
        for name in ("absent", "empty"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            with pytest.raises(WeightsError, match=name):
                checkpoint.subject.plugin_class.resolve(ResolveQuery(model=str(tmp_path / name), is_offline=True))

    def test_front_end_needs_no_torch(self, checkpoint: _Checkpoint, tmp_path: Path) -> None:
        """``matches`` and ``resolve`` run in the front process, which has no torch."""
        entry = checkpoint.subject.entry
        done = subprocess.run(
            [sys.executable, "-c", _FRONT, entry.name, entry.distribution, checkpoint.model, str(tmp_path / "cache")],
            env=child_environment(),
            capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert not done.stdout.strip(), f"the front process imported {done.stdout.strip()}"

    @level(3)
    def test_pickles_are_never_loaded(self, checkpoint: _Checkpoint, tmp_path: Path) -> None:
        """Files that would run code when they are unpickled stay unread, in place of the weights and beside them."""
        marker = tmp_path / "marker"
        payload = pickle.dumps(_Payload(marker))
        directory = checkpoint.files[0].parent
        for path in (*checkpoint.files, directory / "pytorch_model.bin", directory / "extra.pkl"):
            path.write_bytes(payload)
        checkpoint.outcome()
        assert not marker.exists(), "a pickle in the checkpoint was run"

    @dangerous
    @level(3)
    def test_cut_files_are_refused(self, checkpoint: _Checkpoint) -> None:
        """Each file, cut anywhere, raises ``WeightsError`` that names a file, or lacks nothing of a tensor."""
        for path in checkpoint.files:
            whole = path.read_bytes()
            edges = {0, 1, 4, 7, 8, 9, 16, len(whole) // 3, len(whole) // 2, len(whole) - 1}
            for length in sorted(cut for cut in edges if 0 <= cut < len(whole)):
                path.write_bytes(whole[:length])
                found = checkpoint.outcome()
                where = f"{path.name} cut to {length} of {len(whole)} bytes"
                if isinstance(found, WeightsError):
                    names = [file.name for file in checkpoint.files]
                    assert any(name in str(found) for name in names), f"{where}: the error names no file: {found}"
                else:
                    assert found == checkpoint.bits(), f"{where}: nobody objects, and tensors differ"
            path.write_bytes(whole)

    @dangerous
    @level(3)
    def test_bent_headers_are_refused(self, checkpoint: _Checkpoint) -> None:
        """Bytes changed at will: ``WeightsError``, or what the headers then say; no other error, and bounded memory."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dice = random.Random(1)
        for path in checkpoint.files:
            whole = path.read_bytes()
            head = min(len(whole), 2048)
            spots = [(at, bytes([dice.randrange(256)])) for at in range(min(head, 48))]
            spots += [(at, b"\xff" * 8) for at in range(0, min(head, 64), 4)]
            spots += [(dice.randrange(head), bytes([dice.randrange(256)])) for _ in range(200 if head else 0)]
            spots += [(at, b"999999999999") for at in range(0, head, 16)]
            for at, patch in spots:
                path.write_bytes((whole[:at] + patch + whole[at + len(patch) :])[: len(whole)])
                checkpoint.outcome()
            path.write_bytes(whole)
        extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert extra < _MAX_EXTRA_KIB, f"a bent header of a few bytes made the reader take {extra >> 10} MiB"

    @dangerous
    @level(3)
    def test_tensors_belong_to_the_caller(self, checkpoint: _Checkpoint) -> None:
        """Writing into a tensor crashes nothing and changes neither the files nor what is read next."""
        files = checkpoint.resolve()
        kept = [path.read_bytes() for path in checkpoint.files]
        for _, tensor in checkpoint.subject.plugin_class.tensors(files):
            tensor.zero_()
        assert [path.read_bytes() for path in checkpoint.files] == kept, "the files have changed"
        checkpoint.assert_equal(files)

    @level(3)
    def test_two_models_and_new_files_are_kept_apart(self, checkpoint: _Checkpoint, tmp_path: Path) -> None:
        """Two checkpoints read in turns do not mix; a checkpoint that is written anew is read anew."""
        other = _Checkpoint(self, checkpoint.subject, tmp_path / "other", checkpoint.dtype, seed=100)
        read = [item.subject.plugin_class.tensors(item.resolve()) for item in (checkpoint, other)]
        found: list[dict[str, bytes]] = [{}, {}]
        for pair in zip(*read, strict=True):
            for seen, (name, tensor) in zip(found, pair, strict=True):
                seen[name] = bits_of(tensor)
        assert found == [checkpoint.bits(), other.bits()]
        checkpoint.save(seed=200)
        checkpoint.assert_equal(checkpoint.resolve())

    @level(3)
    def test_nothing_stays_open(self, checkpoint: _Checkpoint) -> None:
        """Reading to the end, and giving up after one tensor, leave no file open."""
        files = checkpoint.resolve()
        checkpoint.assert_equal(files)
        gc.collect()
        before = _open_files()
        for _ in range(3):
            reader = iter(checkpoint.subject.plugin_class.tensors(files))
            next(reader, None)
            del reader
            gc.collect()
        assert _open_files() == before, "files stay open when a reader gives up"


class _Checkpoint:
    """A checkpoint on disk, and what must come out of it."""

    def __init__(
        self, suite: WeightsConformance, subject: Subject, directory: Path, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.suite, self.subject, self.dtype = suite, subject, dtype
        self.directory = directory / "checkpoint"
        self.cache = directory / "cache"
        self.save(seed)
        self.files = [path for path in sorted(self.directory.rglob("*")) if path.is_file()]

    def save(self, seed: int) -> None:
        """Write tensors of random bits."""
        stores = self.subject.claims.has("tensors")
        names = self.suite.names if stores else {}
        self.tensors = {name: random_bits(names[name], self.dtype, seed + i) for i, name in enumerate(names)}
        self.model = self.suite.write(self.directory, self.tensors, self.suite.config)
        self.query = ResolveQuery(model=self.model, download_dir=str(self.cache), is_offline=True)

    def resolve(self) -> ModelFiles:
        """The plugin's answer."""
        found: ModelFiles = self.subject.plugin_class.resolve(self.query)
        return found

    def bits(self) -> dict[str, bytes]:
        """What was written."""
        return {name: bits_of(tensor) for name, tensor in self.tensors.items()}

    def assert_equal(self, files: ModelFiles) -> None:
        """Each tensor comes once, as it was written."""
        seen: set[str] = set()
        for name, tensor in self._read(files):
            assert name in self.tensors, f"{name} was never written"
            assert name not in seen, f"{name} comes twice"
            seen.add(name)
            wanted = self.tensors[name]
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), (
                f"{name}: {tensor.dtype} {tensor.shape}"
            )
            assert bits_of(tensor) == bits_of(wanted), f"{name}: other bytes than were written"
        assert seen == set(self.tensors), f"never came: {sorted(set(self.tensors) - seen)}"

    def outcome(self) -> WeightsError | dict[str, bytes]:
        """What reading gives now: the error, or the tensors, which then are those of the headers."""
        try:
            files = self.resolve()
            infos = {info.name: info.shape for info in self.subject.plugin_class.infos(files)}
            found = {name: (tuple(tensor.shape), bits_of(tensor)) for name, tensor in self._read(files)}
        except WeightsError as error:
            return error
        assert {name: shape for name, (shape, _) in found.items()} == infos, "headers and tensors differ"
        return {name: data for name, (_, data) in found.items()}

    def _read(self, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        found: Iterator[tuple[str, torch.Tensor]] = self.subject.plugin_class.tensors(files)
        return found


def _open_files() -> int:
    table = Path("/proc/self/fd")
    return len(list(table.iterdir())) if table.is_dir() else 0
