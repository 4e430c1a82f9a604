"""A one-file plugin whose classes do what ``HOW`` says, which no contract allows. Everything else is the real CPU set."""

from __future__ import annotations

from typing import Any

import torch

from rabbet.contracts import (
    register_logits_processor,
    register_model,
    register_platform,
    register_quantization_config,
)
from rabbet.contracts.logits_processor import LogitsProcessor
from rabbet.contracts.quantization import QuantizationConfig
from rabbet.registry import Catalog
from rabbet.registry.loader import load_entry

HOW = ""

_Llama: Any = load_entry(Catalog.scan().find("model", "LlamaForCausalLM"))
_Cpu: Any = load_entry(Catalog.scan().find("platform", "cpu"))


def _as(answers: dict[str, Any], true_answer: Any) -> Any:
    return answers[HOW](true_answer) if HOW in answers else true_answer


@register_model("OddForCausalLM")
class OddModel(_Llama):  # type: ignore[misc]
    """Llama with other shapes."""

    def __init__(self, *, config: Any, context: Any) -> None:
        if HOW == "model raises":
            raise KeyError("no such layer")
        super().__init__(config=config, context=context)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        answers = {
            "hidden none": lambda x: None,
            "hidden short": lambda x: x[:-1],
            "hidden flat": lambda x: x.reshape(-1),
        }
        return _as(answers, super().forward(*arguments, **named))

    def compute_logits(self, *arguments: Any, **named: Any) -> Any:
        answers = {
            "logits none": lambda x: None,
            "logits list": lambda x: x.tolist(),
            "logits narrow": lambda x: x[:, :3],
            "logits empty": lambda x: x[:0],
        }
        return _as(answers, super().compute_logits(*arguments, **named))


@register_platform("odd")
class OddPlatform(_Cpu):  # type: ignore[misc]
    """The CPU with other answers."""

    def init_device(self, **named: Any) -> Any:
        return _as({"device none": lambda x: None, "device text": str}, super().init_device(**named))

    def memory(self) -> Any:
        return _as({"memory none": lambda x: None, "memory bytes": lambda x: x.free_bytes}, super().memory())

    def layer_ops(self) -> Any:
        return _as({"ops number": lambda x: 3}, super().layer_ops())


@register_quantization_config("odd")
class OddQuantization(QuantizationConfig):
    """Quantises nothing."""

    @classmethod
    def supports(cls, query: Any) -> tuple[Any, ...]:
        return ()

    @classmethod
    def claims(cls, config: Any, user_choice: str | None) -> bool:
        return False

    @classmethod
    def from_config(cls, config: Any) -> Any:
        return _as({"configuration none": lambda x: None, "configuration class": lambda x: cls}, cls())

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return _as({"method number": lambda x: 3, "method class": lambda x: OddQuantization}, None)


@register_logits_processor("odd")
class OddProcessor(LogitsProcessor):
    """Does for each request what its ``extra_args`` say."""

    is_argmax_invariant = False

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.how: dict[int, str] = {}

    def add(self, slot: int, sampling: Any, prompt_token_ids: Any) -> None:
        self.how[slot] = (sampling.extra_args or {}).get("how", "")
        if self.how[slot] == "leave at add":
            raise SystemExit(0)

    def remove(self, slot: int) -> None:
        self.how.pop(slot, None)

    def apply(self, batch: Any) -> Any:
        logits = batch.logits_BV
        for how in (self.how[slot] for slot in batch.slots):
            if how == "leave":
                raise SystemExit(0)
            if how == "raise":
                raise RuntimeError("no licence")
            if how in ("none", "list", "narrow", "nan"):
                return {"none": None, "list": [1], "narrow": logits[:, :3], "nan": logits * torch.nan}[how]
        return logits
