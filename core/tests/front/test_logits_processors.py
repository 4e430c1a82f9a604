"""What a request may say to logits processors is checked before it is sent."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rabbet import LLM, SamplingParams
from rabbet.contracts.logits_processor import LogitsProcessor
from rabbet.errors import InvalidRequestError, RequestFailedError


class Picky(LogitsProcessor):
    @classmethod
    def validate(cls, sampling: SamplingParams) -> None:
        strength = (sampling.extra_args or {}).get("strength", 0)
        if strength == -1:
            sys.exit("not today")
        if strength > 5:
            raise ValueError(f"strength is {strength}, the limit is 5")

    def add(self, slot: int, sampling: SamplingParams, prompt_token_ids: Any) -> None: ...

    def remove(self, slot: int) -> None: ...

    def apply(self, batch: Any) -> Any:
        return batch.logits_BV


def test_a_value_that_a_processor_refuses_is_the_callers_error_and_a_fault_is_the_plugins(
    null: ModuleType, model_dir: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = types.ModuleType("own_picky")
    own.Picky = Picky  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_picky", own)
    with LLM(str(model_dir), engine_process=False, logits_processors=["own_picky:Picky"], **options) as llm:
        assert llm.generate([[1, 2]], SamplingParams(extra_args={"strength": 5}), use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="own_picky:Picky: strength is 9, the limit is 5") as caught:
            llm.generate([[1, 2]], SamplingParams(extra_args={"strength": 9}), use_tqdm=False)
        assert caught.value.field == "extra_args" and caught.value.status == 400
        with pytest.raises(RequestFailedError, match="own_picky:Picky failed to check the request: TypeError"):
            llm.generate([[1, 2]], SamplingParams(extra_args={"strength": "much"}), use_tqdm=False)
        with pytest.raises(RequestFailedError, match="own_picky:Picky failed to check the request: SystemExit"):
            llm.generate([[1, 2]], SamplingParams(extra_args={"strength": -1}), use_tqdm=False)
        assert llm.get_metrics().num_running == 0
