"""Times attention and linear backends beside a plain reference in the same run: pairs in turn, medians of both.

Values are compared first: a kernel that computes wrongly is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rabbet.contracts.linear import LinearQuery
from rabbet.errors import PluginError, RabbetError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import Entry, State
from rabbet.registry.loader import load_entry
from rabbet_sdk.conformance._attention_rig import Rig, Setup
from rabbet_sdk.numerics import assert_within

__all__ = ["bench_kind"]

_Pair = tuple[str, Callable[[], Any], Callable[[], Any]]
_LINEAR = ((1, 1024, 1024), (16, 1024, 1024), (256, 1024, 2048))
_ATTENTION = {"decode of 8, context 256": [(255, 1)] * 8, "prompt of 256": [(0, 256)]}


def bench_kind(
    kind: str, names: Sequence[str], *, device: str = "cpu", dtype: str = "float32", rounds: int = 15
) -> list[dict[str, Any]]:
    """One row for each backend and shape: median and ratio to the reference, or the problem that it has.

    Raises:
        PluginError: If the kind has no timing pairs, or a name is unknown.
    """
    if kind not in ("attention", "linear"):
        raise PluginError(f"{kind} has no timing pairs; possible: attention, linear", kind=kind)
    catalog = Catalog.scan()
    entries = [catalog.find(kind, name) for name in names] or [
        entry for entry in catalog.of_kind(kind) if entry.state is State.COMPATIBLE
    ]
    pairs = _attention if kind == "attention" else _linear
    rows = []
    for entry in entries:
        try:
            rows += [_row(entry, pair, rounds) for pair in pairs(load_entry(entry), device, dtype)]
        except (RabbetError, AssertionError) as error:
            rows.append({"name": entry.name, "shape": "", "problem": str(error), "ratio": None, "median_us": None})
    return rows


def _row(entry: Entry, pair: _Pair, rounds: int) -> dict[str, Any]:
    shape, mine, plain = pair
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 2):
        # In turn, so that a slow moment of the machine meets both; the first two rounds warm up.
        for kept, work in zip(times, (mine, plain), strict=True):
            start = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number > 1:
                kept.append(time.perf_counter() - start)
    median, reference = (statistics.median(kept) for kept in times)
    return {
        "name": entry.name, "shape": shape, "problem": "", "ratio": median / reference, "median_us": median * 1e6,
        "reference_us": reference * 1e6,
    }  # fmt: skip


def _refuse(cls: type[Any], query: Any) -> None:
    if refusals := cls.supports(query):
        raise PluginError("; ".join(map(str, refusals)))


def _linear(cls: type[Any], device: str, dtype: str) -> Iterator[_Pair]:
    _refuse(cls, LinearQuery(device_type=torch.device(device).type, arch="", dtype=dtype, weight_dtype=dtype))
    backend, generator = cls(), torch.Generator().manual_seed(0)
    for tokens, inputs, outputs in _LINEAR:
        x, weight = (
            torch.randn(shape, generator=generator).to(getattr(torch, dtype)).to(device)
            for shape in ((tokens, inputs), (outputs, inputs))
        )
        packed = backend.pack(weight.clone())
        assert_within(backend.apply(x, packed), plain=F.linear(x, weight), oracle=x.double() @ weight.double().T)

        def mine(x: Any = x, packed: Any = packed) -> Any:
            return backend.apply(x, packed)

        def plain(x: Any = x, weight: Any = weight) -> Any:
            return F.linear(x, weight)

        yield f"[{tokens}, {inputs}] x [{outputs}, {inputs}]", mine, plain


def _attention(cls: type[Any], device: str, dtype: str) -> Iterator[_Pair]:
    setup = Setup(dtype=dtype, device=device, heads=8, kv_heads=2, head_dim=64)
    _refuse(cls, setup.query())
    for label, history in _ATTENTION.items():
        rig = Rig(
            backend_class=cls, setup=setup, device=torch.device(device), num_blocks=160,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        rows = rig.prepare(history)
        for (request, count), got in zip(rows, rig.step(rows), strict=True):
            same = rig.expected(request, count, getattr(torch, dtype))
            assert_within(got, plain=same, oracle=rig.expected(request, count))
            request.done -= count
        batch, inputs = rig.batch(rows), rig.inputs(rows)
        work = (rig, batch, inputs, rig.output(batch.num_tokens))
        # The reference reads keys that lie side by side: no paging, as short as torch has it.
        dense = [
            (*(part[:length].transpose(0, 1)[None].contiguous() for part in (item.q, item.k, item.v)), count)
            for item, count in rows
            for length in [item.done + count]
        ]

        def mine(work: Any = work) -> None:
            rig, batch, inputs, out = work
            rig.backend.forward(rig.layer, *inputs, rig.cache, rig.backend.build_metadata(batch), out)

        def plain(dense: Any = dense) -> None:
            for q, k, v, count in dense:
                F.scaled_dot_product_attention(q[:, :, -count:], k, v, is_causal=count > 1, enable_gqa=True)

        yield label, mine, plain
