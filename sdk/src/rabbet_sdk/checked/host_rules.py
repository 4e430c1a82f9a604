"""Rules of what works on the host: checkpoints, grammars, parsers, connectors, schedulers, platforms, settings."""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterator
from typing import Any

from rabbet.errors import RabbetError
from rabbet_sdk.checked.proxy import Call, rule

__all__: list[str] = []


@rule("QuantizationConfig", "from_config")
def _settings(call: Call) -> Generator[None, Any, None]:
    before = copy.deepcopy(dict(call.arguments["config"]))
    yield
    call.require(before == dict(call.arguments["config"]), "inputs are left alone", "it changed config")


# ---- checkpoints


@rule("WeightFormat", "matches", "peek", "resolve")
def _no_torch(call: Call) -> Generator[None, Any, None]:
    had = "torch" in sys.modules
    yield
    call.require(had or "torch" not in sys.modules, "the front end needs no torch", "it imported torch")


@rule("WeightFormat", "tensors")
def _tensors(call: Call) -> Generator[None, Any, Any]:
    found = yield
    return _each_once(call, iter(found))


def _each_once(call: Call, found: Iterator[Any]) -> Iterator[Any]:
    import torch

    seen: set[str] = set()
    while True:
        try:
            item = next(found)
        except StopIteration:
            return
        except RabbetError:
            raise
        except Exception as error:  # noqa: BLE001 - the rule is about what it may raise
            call.fail("errors name the file", f"{type(error).__name__}: {error}, where the contract has WeightsError")
        is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)
        call.require(is_pair, "result type", f"{type(item).__name__}, not a name and a tensor")
        call.require(item[0] not in seen, "each tensor once", f"{item[0]} comes twice")
        call.require(item[1].device.type == "cpu", "tensors on the CPU", f"{item[0]} is on {item[1].device}")
        seen.add(item[0])
        yield item


# ---- grammars and parsers


@rule("Grammar", "accept", "count_accepted")
def _accepts(call: Call) -> Generator[None, Any, None]:
    length = len(call.arguments["token_ids"])
    count = yield
    call.require(0 <= count <= length, "a prefix is accepted", f"{count} of {length} tokens")
    if call.method == "accept":
        call.notes["accepted"] = call.notes.get("accepted", 0) + count


@rule("Grammar", "rollback")
def _rollback(call: Call) -> Generator[None, Any, None]:
    accepted, back = call.notes.get("accepted", 0), call.arguments["num_tokens"]
    call.expect(0 <= back <= accepted, "call order", f"{back} tokens back, {accepted} were accepted")
    yield
    call.notes["accepted"] = accepted - back


@rule("Grammar", "fill_bitmask")
def _bitmask(call: Call) -> Generator[None, Any, None]:
    row = call.arguments["row"]
    # Bits that are not allowed have to be cleared: so what stands there before must not matter.
    row.fill(-1)
    yield
    first = row.copy()
    row.fill(0)
    call.again()
    call.require(bool((first == row).all()), "every bit is written", "the bits depend on what stood in the row")


@rule("ToolParser", "feed")
def _calls(call: Call) -> Generator[None, Any, None]:
    piece = yield
    named: set[int] = call.notes.setdefault("named", set())
    for part in piece.tool_calls:
        is_first = part.index not in named
        told = f"call {part.index} is named again" if not is_first else f"call {part.index} begins without a name"
        call.require((part.name is not None) == is_first, "one name a call", told)
        named.add(part.index)


# ---- connectors


@rule("ConnectorScheduler", "find_hit")
def _hit(call: Call) -> Generator[None, Any, None]:
    hit = yield
    call.require(hit.num_tokens is None or hit.num_tokens >= 0, "a hit is no debt", f"{hit.num_tokens} tokens")
    again = call.again()
    call.require(hit == again or hit.num_tokens is None, "asking changes nothing", f"{hit}, then {again}")


@rule("ConnectorWorker", "register")
def _registered(call: Call) -> Generator[None, Any, None]:
    from rabbet_sdk.checked.tensor_rules import changed, snapshot

    before = snapshot(dict(call.arguments["caches"]))
    yield
    call.require(not (places := changed(before)), "inputs are left alone", f"it changed {', '.join(places)}")


# ---- schedulers and platforms


@rule("Scheduler", "add")
def _added(call: Call) -> Generator[None, Any, None]:
    yield
    call.notes.setdefault("live", set()).add(call.arguments["request"].request_id)


@rule("Scheduler", "update", "finish")
def _deltas(call: Call) -> Generator[None, Any, None]:
    deltas = yield
    live: set[str] = call.notes.setdefault("live", set())
    for delta in deltas:
        call.require(delta.request_id in live, "one final answer", f"news of {delta.request_id}, which has ended")
        if delta.finish_reason is not None:
            live.discard(delta.request_id)
    _books(call)


@rule("Scheduler", "schedule")
def _plan(call: Call) -> Generator[None, Any, None]:
    plan = yield
    if plan is not None:
        context = call.plugin.context
        most, seats = context.max_num_batched_tokens, context.max_num_seqs
        count = len(plan.num_scheduled_tokens)
        call.require(plan.num_tokens <= most, "budget of tokens", f"{plan.num_tokens} in a step, {most} are allowed")
        call.require(count <= seats, "budget of requests", f"{count} in a step, {seats} are allowed")
    _books(call)


def _books(call: Call) -> None:
    try:
        call.plugin.check_integrity()
    except AssertionError as error:
        call.fail("the books balance", str(error))


@rule("Platform", "memory")
def _memory(call: Call) -> Generator[None, Any, None]:
    found = yield
    numbers = (found.free_bytes, found.used_by_process_bytes)
    is_sound = all(0 <= number <= found.total_bytes for number in numbers)
    call.require(is_sound, "memory adds up", f"free and used {numbers} of {found.total_bytes} bytes")


@rule("Platform", "detect")
def _devices(call: Call) -> Generator[None, Any, None]:
    had = sys.modules.get("torch")
    before = had is not None and had.cuda.is_initialized()
    yield
    torch = sys.modules.get("torch")
    made = torch is not None and torch.cuda.is_initialized() and not before
    call.require(not made, "detection makes no context", "a CUDA context is there after it")
