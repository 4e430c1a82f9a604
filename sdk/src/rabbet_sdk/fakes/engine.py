"""A real engine in this process, step by step, without tokenizer or server: a small model and the plugin under test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rabbet_sdk.fakes.model as models
from rabbet.config import engine_config_from_kwargs
from rabbet.config.resolve import resolve
from rabbet.config.resolved import ResolvedConfig
from rabbet.engine.core import EngineCore
from rabbet.types.outputs import FinishReason, RequestDelta
from rabbet.types.request import EngineRequest
from rabbet.types.sampling import SamplingParams

__all__ = ["TinyEngine", "resolve_tiny"]

_MAX_STEPS = 10_000


def resolve_tiny(directory: Path, config: Mapping[str, Any], **options: Any) -> ResolvedConfig:
    """Write config.json into ``directory`` and decide every "auto" as an engine does.

    Args:
        directory: Where the model stands; has no weights.
        config: From ``fakes.model``.
        **options: As for ``rabbet.LLM``: ``device="acme"``, ``scheduling_policy="acme"``, ...
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    defaults = {
        "load_format": "dummy", "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 20,
        "max_num_seqs": 8, "max_num_batched_tokens": 64,
    }  # fmt: skip
    return resolve(engine_config_from_kwargs(str(directory), **{**defaults, **options}), is_server=False)


class TinyEngine:
    """Scheduler, KV manager, executor, runner and sampler as in service; a context manager.

    Attributes:
        core: The engine.
        last: The last delta of each request of ``generate``, in the order of the prompts.
    """

    def __init__(
        self, directory: Path, *, script: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None, **options: Any
    ) -> None:
        """Load the scripted model, or without ``script`` the random one.

        Raises:
            RabbetError: What the engine said went wrong.
        """
        config = models.tiny_config() if script is None else models.scripted_config(script)
        self.core = EngineCore(resolve_tiny(directory, config, **options))
        self.last: list[RequestDelta] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 8,
        priorities: Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """Output tokens of each prompt, all at once; greedy unless told otherwise.

        Raises:
            AssertionError: If a request ends twice, never, or with an error.
        """
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        names = [f"r{number}" for number in range(len(prompts))]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        ends: dict[str, RequestDelta] = {}

        def take(deltas: Sequence[RequestDelta]) -> None:
            for delta in deltas:
                assert delta.request_id not in ends, f"{delta.request_id} has news after its end"
                tokens[delta.request_id] += delta.new_token_ids
                if delta.finish_reason is not None:
                    ends[delta.request_id] = delta

        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            take(
                self.core.add(
                    EngineRequest(
                        request_id=name, prompt_token_ids=list(prompt), sampling=params, max_tokens=max_tokens,
                        eos_token_ids=[models.END], priority=priorities[number] if priorities else 0,
                        arrival_time_s=float(number),
                    )
                )
            )  # fmt: skip
        for _ in range(_MAX_STEPS):
            if not self.core.has_work():
                break
            take(self.core.step())
            self.core.check_integrity()
        assert set(ends) == set(names), f"these have not ended: {sorted(set(names) - set(ends))}"
        self.last = [ends[name] for name in names]
        failed = [f"{end.request_id}: {end.error}" for end in self.last if end.finish_reason is FinishReason.ERROR]
        assert not failed, "; ".join(failed)
        return [tokens[name] for name in names]

    def close(self) -> None:
        """Free everything; idempotent."""
        self.core.close()

    def __enter__(self) -> TinyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
