"""Steps whose buffers keep their place while their contents change, as a captured step sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rabbet.contracts.batch import AttentionBatch
from rabbet.contracts.platform import CaptureError, SupportsGraphs
from rabbet.errors import PluginError
from rabbet.registry.catalog import Catalog
from rabbet.registry.entry import State
from rabbet.registry.policy import PluginPolicy
from rabbet_sdk.conformance._attention_rig import Request, Rig
from rabbet_sdk.conformance.outcome import unavailable
from rabbet_sdk.conformance.subject import load_subject

__all__ = ["Static", "captured", "held"]

Replay = Callable[[], None]
_LOOKS = frozenset({"item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"})


class _Unseen(torch.Tensor):
    """A tensor that the host cannot look at, and what is computed from it: a replay has no host."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool
            for part in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        assert name not in _LOOKS and not is_mask, (
            f"values of the step's tensors are looked at on the host ({name}), which a replay cannot"
        )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@dataclass(kw_only=True)
class Static:
    """One step's tensors at fixed addresses: requests of as many tokens as ``counts`` says, or at most so many together.

    The engine's part of a capture: bounds are the largest that can come, tables have their full width, and what the host
    holds of the lengths is as it was at the capture. A row without a request has no slot, and its table names the null block;
    where the step is ragged it has no token either.
    """

    rig: Rig
    counts: tuple[int, ...]
    is_ragged: bool = False

    def __post_init__(self) -> None:
        it, size, total = self.rig, len(self.counts), sum(self.counts)
        setup, device = it.setup, it.device
        starts = torch.tensor((0, *self.counts)).cumsum(0).to(torch.int32)
        self.current = self.counts
        self.batch = AttentionBatch(
            num_requests=size, num_tokens=total, max_query_len=total if self.is_ragged else max(self.counts),
            max_seq_len=setup.block_size * 16,
            query_start=starts.clone().to(device),
            query_start_cpu=torch.zeros_like(starts) if self.is_ragged else starts,
            seq_lens=torch.tensor(self.counts, dtype=torch.int32).to(device),
            seq_lens_cpu=torch.tensor(self.counts, dtype=torch.int32),
            positions=torch.zeros(total, dtype=torch.int64, device=device),
            block_table=torch.zeros((size, 16), dtype=torch.int32, device=device),
            slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device), is_causal=setup.is_causal,
            is_ragged=self.is_ragged,
        )  # fmt: skip
        heads = ((setup.heads, setup.head_dim), (setup.kv_heads, setup.head_dim), (setup.kv_heads, setup.size_v))
        self.inputs = [torch.zeros((total, *shape), dtype=it.dtype, device=device) for shape in heads]
        self.out = it.output(total)

    def load(self, rows: Sequence[tuple[Request, int] | None]) -> None:
        """Fill in a step; None is a row without a request. Outputs are poisoned."""
        it, batch = self.rig, self.batch
        self.out.fill_(it.fill)
        if self.is_ragged:
            self.current = tuple(0 if row is None else row[1] for row in rows)
            batch.query_start.copy_(torch.tensor((0, *self.current)).cumsum(0))
            batch.slot_mapping.fill_(-1)
        for index, row in enumerate(rows):
            first, last = sum(self.current[:index]), sum(self.current[: index + 1])
            if row is None:
                # As the engine fills up: a short request in the null block, which may hold anything.
                batch.seq_lens[index], batch.block_table[index] = max(1, self.current[index]), 0
                batch.positions[first:last] = torch.arange(last - first, device=it.device)
                batch.slot_mapping[first:last] = -1
                continue
            one = it.batch([row])
            batch.seq_lens[index] = one.seq_lens[0]
            batch.block_table[index] = it.num_blocks - 1
            batch.block_table[index, : one.block_table.shape[1]] = one.block_table[0, :16]
            batch.positions[first:last], batch.slot_mapping[first:last] = one.positions, one.slot_mapping
            for target, tensor in zip(self.inputs, it.inputs([row]), strict=True):
                target[first:last] = tensor

    def forward(self, metadata: Any) -> None:
        """The call into the backend."""
        q, k, v = self.inputs
        self.rig.backend.forward(self.rig.layer, q, k, v, self.rig.cache, metadata, self.out)

    def outputs(self, rows: Sequence[tuple[Request, int] | None]) -> list[torch.Tensor]:
        """Copies of the outputs of the rows with requests, whose tokens then count as computed."""
        found = []
        parts = torch.split(self.out, [*self.current, len(self.out) - sum(self.current)])
        for row, part in zip(rows, parts[:-1], strict=True):
            if row is not None:
                row[0].done += row[1]
                found.append(part.clone())
        return found


def held(static: Static) -> Replay:
    """The step again and again, with what the host holds as it is now: what a replay does, without one that captures."""
    names = ["seq_lens", "positions", "block_table", "slot_mapping"]
    if static.is_ragged:
        names.append("query_start")
    unseen = {name: getattr(static.batch, name).as_subclass(_Unseen) for name in names}
    batch = replace(static.batch, **unseen)

    def replay() -> None:
        static.forward(static.rig.backend.build_metadata(batch))

    replay()
    return replay


def captured(static: Static) -> Replay:
    """A replay on the first installed platform that captures on the rig's device; ends the test where there is none."""
    device_type = static.rig.setup.device
    if static.rig.device.type != device_type:
        unavailable(f"nothing captures what stands in for {device_type} here")
    platform = _platform(device_type)

    def work() -> None:
        static.forward(static.rig.backend.build_metadata(static.batch))

    try:
        replay: Replay = platform.capture(work).replay
    except CaptureError as error:
        raise AssertionError(f"the step cannot be captured, though graphs are claimed: {error}") from error
    return replay


def _platform(device_type: str) -> SupportsGraphs:
    for entry in Catalog.scan(PluginPolicy(auto="any")).entries:
        if entry.kind != "platform" or entry.state is not State.COMPATIBLE:
            continue
        try:
            found = load_subject(f"platform/{entry.distribution}:{entry.name}").plugin_class
        except (PluginError, ImportError):
            continue
        if found.device_type == device_type and issubclass(found, SupportsGraphs):
            platform: SupportsGraphs = found()
            return platform
    unavailable(f"no installed platform captures steps on {device_type}")
