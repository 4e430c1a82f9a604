"""A real front end over an engine that plays a script, and a site that asks a server over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from rabbet.config.load import engine_config_from_kwargs
from rabbet.config.schema import ServerConfig
from rabbet.contracts.scheduler import SchedulerStats
from rabbet.contracts.weights import ModelFiles
from rabbet.engine.client import EngineClient
from rabbet.engine.messages import Abort, Add, EngineInfo, Heartbeat, ToEngine
from rabbet.front.async_llm import AsyncLLM
from rabbet.registry import Composition
from rabbet.server.app import build_app
from rabbet.server.state import ServerState
from rabbet.types.outputs import FinishReason, RequestDelta, TokenLogprobs
from rabbet.types.request import EngineRequest

END, VOCAB, CONTEXT = 256, 300, 256
Step = int | list[int] | dict[str, Any] | asyncio.Event


def letters(request: EngineRequest) -> Iterable[Step]:
    """abcdef... for as long as it is wanted."""
    return [97 + index % 26 for index in range(request.max_tokens)]


def row(token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities in which the chosen token is the second likeliest."""
    others = [((token_id + 1 + i) % 256, -0.1 if i == 0 else -2.0 - i, 1 if i == 0 else 2 + i) for i in range(20)]
    ranked = [others[0], (token_id, -0.5, 2), *others[1:]][:count]
    entries = [(token_id, -0.5, 2), *ranked]
    return TokenLogprobs(
        token_ids=[e[0] for e in entries], logprobs=[e[1] for e in entries], ranks=[e[2] for e in entries]
    )


class ScriptedClient(EngineClient):
    """Gives each request the tokens of ``script``, one a turn of the loop.

    A step of a script is a token, several tokens, fields of a delta, or an event to wait for.
    """

    def __init__(self, model_dir: Path) -> None:
        super().__init__(engine_config_from_kwargs("scripted"), is_server=True)
        self.heartbeat_limit_s = 1e9
        self.info = EngineInfo(
            max_model_len=CONTEXT, max_num_seqs=8, max_num_batched_tokens=512, num_blocks=100, block_size=16,
            capacity_tokens=1600, max_concurrency=6.25, weights_bytes=0, kv_cache_bytes=0,
        )  # fmt: skip
        files = ModelFiles(name="scripted", config={}, weight_files=(), tokenizer_dir=model_dir)
        resolved: Any = SimpleNamespace(
            files=files,
            vocab_size=VOCAB,
            eos_token_ids=(END,),
            composition=Composition(decisions=(), digest="d" * 64),
            dtype="f4",
        )
        self.resolved = resolved
        self.script: Callable[[EngineRequest], Iterable[Step]] = letters
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.is_shut = False
        self._playing: dict[str, asyncio.Task[None]] = {}
        stats = SchedulerStats(
            num_running=1, num_waiting=2, kv_usage=0.25, prefix_queries=10, prefix_hits=4, num_preemptions=3,
            num_prompt_tokens=20, num_generation_tokens=30,
        )  # fmt: skip
        self._heartbeat = (0.0, Heartbeat(stats=stats, busy_s=0.0))

    def _launch(self) -> None:
        self._started.set()

    def _deliver(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self.requests.append(message.request)
            play = asyncio.get_running_loop().create_task(self._play(message.request))
            self._playing[message.request.request_id] = play
        elif isinstance(message, Abort):
            self.aborted += message.request_ids
            for request_id in message.request_ids:
                self._playing.pop(request_id).cancel()
                self._on_deltas([RequestDelta(request_id=request_id, finish_reason=FinishReason.ABORT)])

    async def _play(self, request: EngineRequest) -> None:
        await asyncio.sleep(0)
        sampling, made = request.sampling, 0
        prompt_rows = None
        if sampling.prompt_logprobs is not None:
            prompt_rows = [row(token_id, sampling.prompt_logprobs) for token_id in request.prompt_token_ids[1:]]
        for step in self.script(request):
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            if isinstance(step, dict):
                self._on_deltas([RequestDelta(request_id=request.request_id, **step)])
                if step.get("finish_reason") or step.get("error_kind"):
                    return
                continue
            ids = [step] if isinstance(step, int) else step
            made += len(ids)
            reason = FinishReason.STOP if ids[-1] == END and END in request.eos_token_ids else None
            reason = reason or (FinishReason.LENGTH if made >= request.max_tokens else None)
            rows = None if sampling.logprobs is None else [row(token_id, sampling.logprobs) for token_id in ids]
            self._on_deltas(
                [
                    RequestDelta(
                        request_id=request.request_id, new_token_ids=ids, logprobs=rows, prompt_logprobs=prompt_rows,
                        finish_reason=reason, num_cached_tokens=2, queued_s=0.0,
                    )
                ]
            )  # fmt: skip
            prompt_rows = None
            if reason is not None:
                return
            await asyncio.sleep(0)

    def shutdown(self, timeout_s: float = 0.0) -> None:
        self.is_shut = True

    @property
    def num_playing(self) -> int:
        return sum(not task.done() for task in self._playing.values())


class Site:
    """One server over a scripted engine, asked without a socket. Everything runs in one loop, turn by turn."""

    def __init__(self, runner: asyncio.Runner, model_dir: Path, **config: Any) -> None:
        self.runner = runner
        self.run(self._open(model_dir, config))

    async def _open(self, model_dir: Path, config: dict[str, Any]) -> None:
        self.engine = ScriptedClient(model_dir)
        self.llm = AsyncLLM(engine_config_from_kwargs("scripted", served_model_name=["scripted", "other"]), self.engine)
        body_limit_s = config.pop("body_limit_s", 120.0)
        self.state = ServerState(ServerConfig(**config), llm=self.llm)
        self.app = build_app(self.state, body_limit_s=body_limit_s)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=False), base_url="http://site"
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.run(self.http.get(path, **more))

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.run(self.http.request(method, path, **more))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.run(self.http.post(path, json=body, **more))

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """The body of an answer that must be good."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, body: Any) -> dict[str, Any]:
        """The error of a body that must be refused."""
        response = self.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, set(error)) == (400, {"message", "type", "param", "code"}), response.text
        return error

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that must end well formed."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response.text)


def parse_events(text: str) -> list[dict[str, Any]]:
    """Objects of events; checks the frame of the stream."""
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts), text
    assert parts[-1] == "data: [DONE]" and parts.count("data: [DONE]") == 1, text
    return [json.loads(part[6:]) for part in parts[:-1]]


def of_index(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Choices of one index."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
