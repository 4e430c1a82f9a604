"""``rabbet-sdk compose``: whether plugins of different kinds work together. Each pair of them runs in some composition.

The oracle is the token: what a composition says, greedily and with seeds, over chunked prompts, cached prefixes and
preemption, has to be what the strict twins say, which share no code with it. What changes values on purpose
(quantisation, a type of the KV cache) is given to the twins too; where they cannot take it, the compositions that have
it are compared with one another.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

from rabbet.contracts.kinds import KINDS
from rabbet.errors import ConfigError, PluginError, PluginLoadError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import State
from rabbet_sdk.conformance.subject import find_entry
from rabbet_sdk.environment import child_environment
from rabbet_sdk.strict import install_twins, twin_table

__all__ = ["Composition", "axes_of", "child", "compose"]

Composition = Mapping[str, str]
"""Kind to name; an empty name leaves the kind out."""

_OPTIONS: Mapping[str, Any] = {
    "platform": lambda name: {"device": name},
    "quantization": lambda name: {"quantization": name},
    "kv_cache_dtype": lambda name: {"kv_cache_dtype": name},
    "attention": lambda name: {"attention_backend": name},
    "linear": lambda name: {"linear_backend": name},
    "proposer": lambda name: {"speculative_config": {"method": name, "num_speculative_tokens": 3}},
    "kv_connector": lambda name: {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}},
    "executor": lambda name: {"distributed_executor_backend": name},
    "scheduler": lambda name: {"scheduling_policy": name},
}
_OPTIONAL = ("quantization", "kv_cache_dtype", "proposer", "kv_connector")
_LOSSY = ("quantization", "kv_cache_dtype")
_TIMEOUT_S = 120
_LENGTHS = (3, 17, 33, 60, 61, 20)


def axes_of(plugins: Sequence[str] = ()) -> dict[str, list[str]]:
    """Kind to the names that are tried: all that are installed, or of a kind that ``plugins`` names those only.

    Raises:
        PluginError: If a plugin is not there, or is of a kind that decides no tokens.
    """
    catalog, wanted = Catalog.scan(), [find_entry(plugin) for plugin in plugins]
    if strange := [f"{entry.kind}/{entry.name}" for entry in wanted if entry.kind not in _OPTIONS]:
        raise PluginError(f"{', '.join(strange)} cannot be composed; kinds that can: {', '.join(_OPTIONS)}")
    axes = {}
    for kind in _OPTIONS:
        named = [entry.name for entry in wanted if entry.kind == kind]
        found = [
            e.name for e in catalog.of_kind(kind) if e.state is State.COMPATIBLE and e.distribution != "rabbet-strict"
        ]
        axes[kind] = named or [*([""] if kind in _OPTIONAL else []), *dict.fromkeys(found)]
    if empty := [kind for kind, names in axes.items() if not names]:
        raise PluginError(f"no plugin of these kinds is installed: {', '.join(empty)}; see: rabbet plugins list")
    return axes


def compose(axes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Run compositions until each pair of names of two kinds stood in one, or was refused in all.

    Returns:
        ``axes``; ``runs``, each with its ``composition``, ``outcome`` (``passed`` or ``failed``), ``detail``,
        ``compared_with`` and the ``culprits`` of a failure: the names without which it passes; ``refused``: pairs and
        single names that nothing takes, with a reason; ``pairs``: how many there are, stood together and were refused.
    """
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory)
        install_twins(site)
        search = _Search({kind: list(names) for kind, names in axes.items()}, _Child(site))
        try:
            return search.run()
        finally:
            search.child.close()


Target = frozenset[tuple[str, str]]


@dataclass(slots=True)
class _Search:
    """State of one search. A target is one name, or two of different kinds, that have to stand in a composition."""

    axes: dict[str, list[str]]
    child: _Child
    covered: set[Target] = field(default_factory=set)
    refused: dict[Target, str] = field(default_factory=dict)
    heads: dict[Target, str] = field(default_factory=dict)
    expected: dict[Target, tuple[Any, str]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        everything = [(kind, name) for kind, names in self.axes.items() for name in names]
        pairs = [frozenset(pair) for pair in combinations(everything, 2) if pair[0][0] != pair[1][0]]
        for target in [*(frozenset([item]) for item in everything), *pairs]:
            if target not in self.covered:
                self._cover(target)
        told = [{"names": _names(target), "reason": why} for target, why in self.refused.items() if any(_names(target))]
        return {
            "axes": self.axes,
            "runs": self.runs,
            "refused": told,
            "pairs": {
                "all": len(pairs), "covered": sum(pair in self.covered for pair in pairs),
                "refused": sum(self._why_not(pair) is not None for pair in pairs),
            },
        }  # fmt: skip

    def _why_not(self, names: Target) -> str | None:
        return next((why for part, why in self.refused.items() if part <= names), None)

    def _cover(self, target: Target) -> None:
        """Run the fullest composition with ``target`` that is taken."""
        if self._why_not(target) is not None:
            return
        reason = "no composition is left that others do not rule out"
        for composition in self._fillings(target):
            result = self._try(composition)
            if "refused" not in result:
                self.covered |= {frozenset(part) for n in (1, 2) for part in combinations(composition.items(), n)}
                self.runs.append(self._judge(composition, result))
                return
            reason = result["refused"]
        self.refused.setdefault(target, reason)

    def _fillings(self, target: Target) -> Iterator[Composition]:
        """Compositions with ``target`` that nothing rules out yet, those with the most new pairs first."""
        fixed = dict(target)
        options = [[fixed[kind]] if kind in fixed else names for kind, names in self.axes.items()]
        every = [dict(zip(self.axes, names, strict=True)) for names in product(*options)]
        every.sort(key=lambda it: -sum(frozenset(pair) not in self.covered for pair in combinations(it.items(), 2)))
        for composition in every:
            names = frozenset(composition.items())
            if self._why_not(names) is None and not any(head <= names for head in self.heads):
                yield composition

    def _try(self, composition: Composition, *, is_alone: bool = False) -> dict[str, Any]:
        result = self.child.ask(composition, is_alone=is_alone)
        if "refused" in result:
            if (kind := result["option"]) in composition:
                # Not for what else is chosen: this release runs none of the kind, say.
                self.refused.setdefault(frozenset([(kind, composition[kind])]), result["refused"])
            elif (kind := result["kind"]) in composition:
                # Kinds are resolved in order: what comes after the one that refused changes nothing.
                order = list(composition)
                self.heads[frozenset(list(composition.items())[: order.index(kind) + 1])] = result["refused"]
        return result

    def _judge(self, composition: Composition, result: Mapping[str, Any]) -> dict[str, Any]:
        tokens, source = self._expected(composition, result)
        row = {"composition": {kind: name for kind, name in composition.items() if name}, "compared_with": source}
        if not (problem := _problem(result, tokens)):
            return row | {"outcome": "passed", "detail": "", "culprits": []}
        if not _problem(self._try(composition, is_alone=True), tokens):
            problem, guilty = f"only after others in one process, with which it shares state: {problem}", []
        else:
            guilty = [
                f"{kind}/{name}" for kind, name in composition.items() if name and self._is_guilty(composition, kind)
            ]
        return row | {"outcome": "failed", "detail": problem, "culprits": guilty}

    def _expected(self, composition: Composition, result: Mapping[str, Any]) -> tuple[Any, str]:
        lossy = {kind: composition[kind] for kind in _LOSSY if kind in composition}
        key = frozenset(lossy.items())
        if key not in self.expected:
            twins = self.child.ask(_twins(composition) | lossy)
            taken = (twins, "the strict twins") if "tokens" in twins else (result, "the first such composition")
            self.expected[key] = (taken[0].get("tokens"), taken[1])
        return self.expected[key]

    def _is_guilty(self, composition: Composition, kind: str) -> bool:
        """Whether it passes with another name of ``kind``, the twin's first."""
        others = [name for name in self.axes[kind] if name != composition[kind]]
        for name in ["" if kind in _OPTIONAL else _twins(composition)[kind], *others]:
            changed = {**composition, kind: name}
            result = self._try(changed)
            if "refused" not in result:
                return not _problem(result, self._expected(changed, result)[0])
        return False


def _twins(composition: Composition) -> dict[str, str]:
    """The same kinds, each by its twin; the executor is core's own."""
    found = {
        kind: "" if kind in _OPTIONAL else str(twin_table(kind)["name"]) for kind in composition if kind != "executor"
    }
    return {kind: found.get(kind, "uni") for kind in composition}


def _problem(result: Mapping[str, Any], tokens: Any) -> str:
    if "tokens" not in result:
        return str(result.get("failed") or result.get("refused"))
    if tokens is None:
        return "the composition that it is compared with failed"
    for number, (got, wanted) in enumerate(zip(result["tokens"], tokens, strict=True)):
        if got != wanted:
            at = next(
                (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted))
            )
            return f"request {number} differs from token {at} on: {got[at : at + 4]}, expected {wanted[at : at + 4]}"
    return ""


def _names(target: Target) -> list[str]:
    return [f"{kind}/{name}" for kind, name in sorted(target, key=lambda item: list(KINDS).index(item[0])) if name]


class _Child:
    """Runs compositions in one process; a crash or a hang costs only the one that caused it, and a new process follows."""

    def __init__(self, site: Path) -> None:
        self._environment = child_environment(site)
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def ask(self, composition: Composition, *, is_alone: bool = False) -> dict[str, Any]:
        """``tokens``, ``failed``, or ``refused`` with the ``kind`` or the ``option`` that refuses; asked once each."""
        key = json.dumps([composition, is_alone])
        if key not in self._known:
            if is_alone:
                self.close()
            self._known[key] = self._ask(json.dumps(composition))
        return self._known[key]

    def _ask(self, line: str) -> dict[str, Any]:
        if self._process is None:
            command = [sys.executable, "-c", "from rabbet_sdk.compose import child; child()"]
            self._process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        answer, timeout_s = b"", 10.0
        try:
            self._process.stdin.write(line.encode() + b"\n")
            ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT_S)
            answer, timeout_s = (self._process.stdout.readline(), 10.0) if ready else (b"", 0.0)
        except BrokenPipeError:
            pass
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        status = self.close(timeout_s)
        ending = f"ended the process (status {status})" if timeout_s else f"did not end within {_TIMEOUT_S} s"
        return {"failed": f"it {ending}"}

    def close(self, timeout_s: float = 10) -> int:
        """End the process; returns its status."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def child() -> None:
    """Read compositions, a line each, and answer with what became of them."""
    # What plugins print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(_outcome(json.loads(line), Path(directory))), file=answers, flush=True)


def _outcome(composition: Composition, directory: Path) -> dict[str, Any]:
    from rabbet_sdk.fakes.engine import TinyEngine, resolve_tiny
    from rabbet_sdk.fakes.model import VOCABULARY, tiny_config

    # Room for about 250 tokens: not all requests fit at once.
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 17}
    for kind, name in composition.items():
        options |= _OPTIONS[kind](name) if name else {}
    try:
        resolve_tiny(directory, tiny_config(), **options)
    except (ConfigError, PluginError) as error:
        if isinstance(error, PluginLoadError):
            return {"failed": str(error)}
        return {"refused": str(error), "kind": getattr(error, "kind", ""), "option": getattr(error, "field", "")}
    # Some begin alike, so that blocks are shared.
    prompts = [
        [2 + (place * place + length // 30) % (VOCABULARY - 2) for place in range(length)] for length in _LENGTHS
    ]
    try:
        with TinyEngine(directory, **options) as engine:
            order = list(reversed(range(len(prompts))))
            tokens = engine.generate(prompts, max_tokens=12, priorities=order, frequency_penalty=1.0)
            if not composition.get("proposer"):
                # Drafts may change which of equally likely tokens is drawn.
                tokens += engine.generate(prompts, max_tokens=12, priorities=order, temperature=0.8, seed=5)
        return {"tokens": tokens}
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the news
        return {"failed": f"{type(error).__name__}: {error}"}
