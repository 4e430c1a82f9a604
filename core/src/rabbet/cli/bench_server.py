"""The server benchmark: a fixed number of clients, each with one request under way, for a fixed time."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from tqdm import tqdm  # type: ignore[import-untyped]

from rabbet.cli.talk import TalkError, api_base, first_model, headers_of, message_of

__all__ = ["Load", "run_load"]

_LOOK_S = 0.25
_FIRST_ID = 10
"""Smaller ids are control tokens in most vocabularies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What to send.

    Attributes:
        url: Base URL, with or without ``/v1``.
        api_key: Key of the server, or None.
        num_clients: Requests under way at once.
        duration_s: No request starts after that many seconds; those under way end.
        input_len: Smallest and largest number of prompt tokens.
        output_len: Smallest and largest number of tokens asked for.
        seed: Seed of lengths and ids.
        vocab_size: Ids are drawn below it.
    """

    url: str
    api_key: str | None
    num_clients: int
    duration_s: float
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int
    vocab_size: int


@dataclass(slots=True)
class _Sample:
    """What was seen of all requests that ended well, and why others did not."""

    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_failed: int = 0
    failure: str = ""


def run_load(load: Load) -> dict[str, Any]:
    """Requests a second and percentiles.

    Raises:
        TalkError: If no server answers, or no request succeeds.
    """
    return asyncio.run(_run(load))


async def _run(load: Load) -> dict[str, Any]:
    base = api_base(load.url)
    headers = headers_of(load.api_key)
    with httpx.Client(headers=headers, timeout=60, trust_env=False) as client:
        model = first_model(client, base)
    sample = _Sample()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=600, limits=limits, trust_env=False) as session:
        started = time.perf_counter()
        deadline = started + load.duration_s
        clients = (
            _Client(session, f"{base}/completions", model, load, random.Random(load.seed * 1000 + number), sample)
            for number in range(load.num_clients)
        )
        showing = asyncio.create_task(_show_progress(load, model, sample))
        try:
            await asyncio.gather(*(client.run(deadline) for client in clients))
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        seconds = time.perf_counter() - started
    if not sample.total_s:
        raise TalkError(f"none of {sample.num_failed} requests succeeded; the last failed with: {sample.failure}")
    return {
        "model": model,
        "clients": load.num_clients,
        "requests": len(sample.total_s),
        "failed": sample.num_failed,
        **({"last_failure": sample.failure} if sample.num_failed else {}),
        "seconds": seconds,
        "requests_per_s": len(sample.total_s) / seconds,
        "input_tokens_per_s": sample.num_input_tokens / seconds,
        "output_tokens_per_s": sample.num_output_tokens / seconds,
        **_percentiles("time_to_first_token", sample.first_s),
        **_percentiles("inter_token_latency", sample.gap_s),
        **_percentiles("request_latency", sample.total_s),
    }


async def _show_progress(load: Load, model: str, sample: _Sample) -> None:
    """Say what is measured, and how far it is where somebody looks at a terminal; until it is cancelled."""
    print(f"measuring {model} at {load.url}: {load.num_clients} clients for {load.duration_s:g} s", file=sys.stderr)
    began, form = time.perf_counter(), "{n:.0f} of {total:.0f} s |{bar}|{postfix}"
    with tqdm(total=load.duration_s, bar_format=form, disable=None, leave=False, file=sys.stderr) as bar:
        while True:
            bar.n = min(time.perf_counter() - began, load.duration_s)
            bar.set_postfix_str(f"{len(sample.total_s)} requests, {sample.num_failed} failed")
            await asyncio.sleep(_LOOK_S)


@dataclass(slots=True)
class _Client:
    """One closed loop: the next request starts when the one before has ended."""

    session: httpx.AsyncClient
    url: str
    model: str
    load: Load
    rng: random.Random
    sample: _Sample

    async def run(self, deadline: float) -> None:
        """Send requests until ``deadline``; a server that refuses the first three is left alone."""
        num_failed = 0
        while time.perf_counter() < deadline and (num_failed < 3 or self.sample.total_s):
            try:
                await self._one()
            except (httpx.HTTPError, TalkError, ValueError, KeyError) as error:
                num_failed += 1
                self.sample.num_failed += 1
                self.sample.failure = str(error) or type(error).__name__

    async def _one(self) -> None:
        load, rng = self.load, self.rng
        body = {
            "model": self.model,
            "prompt": [rng.randrange(_FIRST_ID, load.vocab_size) for _ in range(rng.randint(*load.input_len))],
            "max_tokens": rng.randint(*load.output_len),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times = [time.perf_counter()]
        usage: dict[str, int] = {}
        async with self.session.stream("POST", self.url, json=body) as answer:
            if answer.status_code != 200:
                raise TalkError(f"{answer.status_code} {message_of((await answer.aread()).decode(errors='replace'))}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise TalkError(str(event["error"].get("message")))
                usage = event.get("usage") or usage
                # The last chunks carry usage, or a reason and no token: they say nothing about time a token.
                if any(choice["text"] or not choice.get("finish_reason") for choice in event["choices"]):
                    times.append(time.perf_counter())
        if usage.get("completion_tokens") != body["max_tokens"]:
            raise TalkError(f"{usage.get('completion_tokens')} tokens came, not {body['max_tokens']}")
        sample = self.sample
        sample.total_s.append(time.perf_counter() - times[0])
        if len(times) > 1:
            sample.first_s.append(times[1] - times[0])
        sample.gap_s += [after - before for before, after in pairwise(times[1:])]
        sample.num_input_tokens += usage["prompt_tokens"]
        sample.num_output_tokens += usage["completion_tokens"]


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {
        f"{name}_mean_ms": 1000 * statistics.fmean(values),
        **{f"{name}_p{percent}_ms": 1000 * cuts[percent - 1] for percent in (50, 95, 99)},
    }
