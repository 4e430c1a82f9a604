"""Platforms with one fault each, on top of the strict twin, or of one that captures, or of one that draws."""
# ruff: noqa: ARG001, ARG005 -- a mutant takes what its contract hands over, needed or not.

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rabbet.contracts import register_platform
from rabbet.contracts.platform import CaptureError, DrawBatch, GraphSession, SupportsAsyncSteps, SupportsGraphs
from rabbet_sdk.mutants.base import Mutant, planter
from rabbet_sdk.mutants.detection import DETECTION
from rabbet_sdk.oracles.sampling import filtered
from rabbet_sdk.strict.platform import StrictPlatform, _Ops

__all__ = ["MUTANTS", "DrawingPlatform", "RecordingPlatform"]

_CLAIMS = 'dtype = ["auto", "float32", "bfloat16"]\nfeatures = ["layer_ops", "ranks", "graphs"]'
"""Claims of ``RecordingPlatform``."""
_DRAW_CLAIMS = _CLAIMS.replace("graphs", "async_steps")


class _Session(TorchDispatchMode, GraphSession):  # type: ignore[no-untyped-call]
    """Operations, and where their results went."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and note it."""
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise CaptureError(f"{func} cannot be replayed")
        result = func(*args, **(kwargs or {}))
        if not all(isinstance(item, torch.Tensor) for item in tree_leaves(result)):
            raise CaptureError(f"{func} gives something other than tensors")
        self.steps.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        """See ``GraphSession``."""
        for func, args, kwargs, results in self.steps:
            for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                old.copy_(new)


class RecordingPlatform(StrictPlatform, SupportsGraphs):
    """The twin with graphs that are right; a class to plant faults in."""

    session: type[_Session] = _Session

    def capture(self, work: Callable[[], None]) -> GraphSession:
        """See ``SupportsGraphs``."""
        session = self.session()
        with session:
            work()
        return session


class DrawingPlatform(StrictPlatform, SupportsAsyncSteps):
    """The twin with draws that are right, row by row; a class to plant faults in."""

    ignored: tuple[str, ...] = ()

    def mark(self) -> Callable[[], None]:
        """Nothing is ever under way."""
        return lambda: None

    def number(self, row: int, seed: int, index: int) -> float:
        """In [0, 1), for a token."""
        return random.Random(seed * 1_000_003 + index).random()

    def draw(self, logits_BV: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
        """See ``SupportsAsyncSteps``."""
        drawn = []
        for n, logits_V in enumerate(logits_BV.double()):
            if not logits_V.amax().isfinite():
                drawn.append(-1)
                continue
            options = {key: getattr(batch, f"{key}_B")[n].item() for key in ("temperature", "top_k", "top_p", "min_p")}
            options = {key: round(value, 6) for key, value in options.items() if key not in self.ignored}
            sums_V = filtered(logits_V, **options).cumsum(0)
            number = self.number(n, int(batch.seed_B[n]), int(batch.index_B[n]))
            drawn.append(int(torch.searchsorted(sums_V, number * sums_V[-1], right=True)))
        return torch.tensor(drawn)


def _finite_again(self: Any, logits: Any, batch: Any) -> Any:
    return DrawingPlatform.draw(self, logits.nan_to_num(neginf=float("-inf")), batch)


class _NewOutputs(_Session):  # type: ignore[no-untyped-call]
    """Computes all, elsewhere."""

    def replay(self) -> None:
        """See ``GraphSession``."""
        for func, args, kwargs, _ in self.steps:
            func(*args, **kwargs)


_shared: list[_Session] = []


def _latest(self: Any, work: Any) -> Any:
    _shared[:] = [RecordingPlatform.capture(self, work)]  # type: ignore[list-item]

    class Latest(GraphSession):
        def replay(self) -> None:
            _shared[0].replay()

    return Latest()


def _any_work(self: Any, work: Any) -> Any:
    try:
        return RecordingPlatform.capture(self, work)
    except CaptureError:
        work()
        return _Session()


def _ops(**methods: Any) -> Any:
    """``layer_ops`` with other operations than the twin's."""
    kernels = type("Kernels", (_Ops,), methods)
    return lambda self: kernels()


def _norm(x: Any, weight: Any, eps: float) -> Any:
    return (x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)


def _half_statistics(self: Any, x: Any, weight: Any, eps: float) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _whole_head(self: Any, q: Any, k: Any, positions: Any, table: Any, *, is_neox: bool) -> Any:
    """Takes the size of a head for the number of rotated elements."""
    grown = torch.cat([torch.nn.functional.pad(t, (0, q.shape[-1] // 2 - t.shape[1])) for t in table.chunk(2, 1)], 1)
    return _Ops.rotary(self, q, k, positions, grown, is_neox=is_neox)


def _norm_of_queries(self: Any, q: Any, k: Any, weight: Any, _: Any, eps: float, *where: Any, is_neox: bool) -> Any:
    return self.rotary(self.rms_norm(q, weight, eps), k, *where, is_neox=is_neox)


def _swapped(x: Any) -> Any:
    return x.roll(x.shape[-1] // 2, -1)


def _counts(**wrong: Callable[[Any], int]) -> Any:
    """``memory`` with some numbers computed otherwise."""

    def memory(self: Any) -> Any:
        true = StrictPlatform.memory(self)
        return replace(true, **{key: how(true) for key, how in wrong.items()})

    return memory


def _supports(code: str) -> Any:
    return classmethod(lambda cls, query: tuple(r for r in StrictPlatform.supports(query) if r.code != code))


_twin = planter(globals(), register_platform, StrictPlatform)
_graphs = planter(globals(), register_platform, RecordingPlatform)
_draws = planter(globals(), register_platform, DrawingPlatform)
_MEMORY, _REPLAY = "memory_adds_up", "a_replay_is_a_run"
_DRAWN, _OWN = "draws_follow_the_distribution", "draws_are_a_rows_own_affair"
_DEFAULTS = StrictPlatform.batch_defaults
MUTANTS = (
    *DETECTION,
    _twin("names_unknown", "preferences_are_plugins", "a preference for a plugin that was renamed",
          preferences=classmethod(lambda cls, kind: ("flash_forgotten",) if kind == "attention" else ())),
    _twin("tokens_below_requests", "defaults_can_be_used", "budgets divided by the ranks once too often",
          batch_defaults=classmethod(lambda cls, *, is_server, world_size: replace(
              _DEFAULTS(is_server=is_server, world_size=1), max_num_batched_tokens=256 // world_size))),
    _twin("half_by_default", "defaults_can_be_used", "auto gives a type that is refused",
          default_dtype=classmethod(lambda cls, dtype: dtype)),
    _twin("half_accepted", "supports_is_honest", "accepted, and never tested", supports=_supports("DTYPE")),
    _twin("any_ranks", "supports_is_honest", "more ranks than devices hang at the start", supports=_supports("RANKS")),
    _twin("same_index", "devices_are_described", "every device is number 0",
          detect=classmethod(lambda cls: StrictPlatform.detect() * 2)),
    _twin("meta_device", "device_is_of_the_declared_type", "init_device gives another type",
          init_device=lambda self, *, local_rank, world_size: torch.device("meta")),
    _twin("used_never_moves", _MEMORY, "what the allocator keeps is not counted",
          memory=_counts(used_by_process_bytes=lambda true: 1 << 20)),
    _twin("free_above_total", _MEMORY, "free and total of different containers",
          memory=_counts(free_bytes=lambda true: true.total_bytes + 1)),
    _twin("free_of_others", "memory_of_others_is_not_free", "free is the total without this process",
          memory=_counts(free_bytes=lambda true: true.total_bytes - true.used_by_process_bytes)),
    _twin("peak_is_now", "peak_is_a_peak", "the memory of a step is read after it was freed",
          peak_activation_bytes=lambda self: max(0, StrictPlatform.memory(self).used_by_process_bytes - (1 << 40))),
    _twin("eps_outside", "rms_norm_is_its_formula", "eps beside the root",
          layer_ops=_ops(rms_norm=lambda self, x, weight, eps: _norm(x, weight, eps))),
    _twin("half_statistics", "rms_norm_is_its_formula", "the mean of the squares in bfloat16",
          layer_ops=_ops(rms_norm=_half_statistics)),
    _twin("sum_forgotten", "add_rms_norm_gives_norm_and_sum", "gives the residual as it was", layer_ops=_ops(
        add_rms_norm=lambda self, x, residual, weight, eps: (self.rms_norm(x + residual, weight, eps), residual))),
    _twin("pairs_swapped", "rotary_turns_pairs_by_their_angle", "the other way to pair", layer_ops=_ops(
        rotary=lambda self, q, k, p, t, *, is_neox: _Ops.rotary(self, q, k, p, t, is_neox=not is_neox))),
    _twin("whole_head", "rotary_turns_pairs_by_their_angle", "a partial rotation moves the rest of the head",
          layer_ops=_ops(rotary=_whole_head)),
    _twin("up_gates", "gated_activations_are_their_formulas", "silu of the second half",
          layer_ops=_ops(silu_and_mul=lambda self, x: _Ops.silu_and_mul(self, _swapped(x)))),
    _twin("one_gelu", "gated_activations_are_their_formulas", "tanh for both approximations", layer_ops=_ops(
        gelu_and_mul=lambda self, x, *, approximate: _Ops.gelu_and_mul(self, x, approximate="tanh"))),
    _twin("scale_of_the_batch", "rows_of_small_operations_are_apart", "one number for the whole step", layer_ops=_ops(
        rms_norm=lambda self, x, weight, eps: _Ops.rms_norm(self, x, weight, eps) + 0 * x.sum())),
    _twin("unknown_collectives", "collectives_are_exact", "a backend that this torch was built without",
          collective_backend=lambda self: "vendor_ccl"),
    _graphs("outputs_elsewhere", _REPLAY, "a replay computes into other memory", claims=_CLAIMS, session=_NewOutputs),
    _graphs("latest_session", "sessions_take_turns", "one session for all sizes", claims=_CLAIMS, capture=_latest),
    _graphs("captures_anything", "what_cannot_be_captured_is_refused", "a value read once stays for ever",
            claims=_CLAIMS, capture=_any_work),
    _graphs("graphs_unclaimed", _REPLAY, "an ability that the manifest hides"),
    _draws("top_p_ignored", _DRAWN, "a filter that the fast path leaves out", claims=_DRAW_CLAIMS, ignored=("top_p",)),
    _draws("temperature_ignored", _DRAWN, "drawn from the logits as they are", claims=_DRAW_CLAIMS, ignored=("temperature",)),
    _draws("number_of_the_row", _OWN, "noise by place in the batch", claims=_DRAW_CLAIMS,
           number=lambda self, row, seed, index: random.Random(row).random()),
    _draws("number_of_the_seed", _OWN, "every token of a request from one number", claims=_DRAW_CLAIMS,
           number=lambda self, row, seed, index: random.Random(seed).random()),
    _draws("nan_drawn", _OWN, "NaN logits become a token", claims=_DRAW_CLAIMS, draw=_finite_again),
    _twin("norm_of_queries", "norm_rotary_is_both_steps", "keys keep their size",
          layer_ops=_ops(norm_rotary=_norm_of_queries)),
    Mutant(
        name="torch_at_import", caught_by="test_import_brings_no_torch", story="vllm-plugin-FL#215: the start waits for torch",
        modules={"plugin.py": (
            "import torch\nfrom rabbet.contracts import register_platform\n"
            "from rabbet_sdk.strict.platform import StrictPlatform\n\n\n"
            "@register_platform('torch_at_import')\nclass Plugin(StrictPlatform):\n    pass\n"
        )},
    ),
)  # fmt: skip
