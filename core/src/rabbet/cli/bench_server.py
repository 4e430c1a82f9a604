"""The server benchmark: a fixed number of clients, each with one request under way, for a fixed time."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from rabbet.cli.talk import TalkError

__all__ = ["Load", "run_load"]

_VOCABULARY = (10, 10_000)


@dataclass(frozen=True, slots=True)
class Load:
    """What to send."""

    url: str
    api_key: str | None
    num_clients: int
    duration_s: float
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int


@dataclass(slots=True)
class _Sample:
    """What was seen."""

    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_failed: int = 0


def run_load(load: Load) -> dict[str, Any]:
    """Requests a second and percentiles.

    Raises:
        TalkError: If no server answers, or every request fails.
    """
    return asyncio.run(_run(load))


async def _run(load: Load) -> dict[str, Any]:
    base = load.url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None)
    sample = _Sample()
    async with httpx.AsyncClient(headers=headers, timeout=600, limits=limits, trust_env=False) as client:
        try:
            model = (await client.get(f"{base}/models")).json()["data"][0]["id"]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise TalkError(f"no server answers at {base} ({error})") from error
        started = time.monotonic()
        deadline = started + load.duration_s
        rngs = [random.Random(load.seed * 1000 + i) for i in range(load.num_clients)]
        await asyncio.gather(*(_client(client, base, model, load, rng, deadline, sample) for rng in rngs))
        seconds = time.monotonic() - started
    if not sample.total_s:
        raise TalkError(f"all {sample.num_failed} requests failed")
    return {
        "requests": len(sample.total_s),
        "failed": sample.num_failed,
        "seconds": seconds,
        "requests_per_s": len(sample.total_s) / seconds,
        "output_tokens_per_s": sample.num_tokens / seconds,
        **_percentiles("time_to_first_token", sample.first_s),
        **_percentiles("inter_token_latency", sample.gap_s),
        **_percentiles("request_latency", sample.total_s),
    }


async def _client(
    client: httpx.AsyncClient, base: str, model: str, load: Load, rng: random.Random, deadline: float, sample: _Sample
) -> None:
    while time.monotonic() < deadline:
        length = rng.randint(*load.output_len)
        body = {
            "model": model,
            "prompt": [rng.randint(*_VOCABULARY) for _ in range(rng.randint(*load.input_len))],
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        started = last = time.monotonic()
        is_first = True
        try:
            async with client.stream("POST", f"{base}/completions", json=body) as answer:
                if answer.status_code != 200:
                    sample.num_failed += 1
                    continue
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    if "error" in json.loads(line[6:]):
                        raise TalkError("the stream ended with an error")
                    now = time.monotonic()
                    (sample.first_s if is_first else sample.gap_s).append(now - (started if is_first else last))
                    is_first, last = False, now
        except (httpx.HTTPError, TalkError):
            sample.num_failed += 1
            continue
        sample.total_s.append(time.monotonic() - started)
        sample.num_tokens += length


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {f"{name}_p50_ms": 1000 * values[0]} if values else {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_p{p}_ms": 1000 * cuts[p - 1] for p in (50, 95, 99)}
