"""Rabbet: an engine that serves large language models, put together from plugins.

Names are imported on first use, so that ``import rabbet`` is quick and brings in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rabbet.config.schema import EngineConfig, ServerConfig
    from rabbet.contracts.registration import *  # noqa: F403
    from rabbet.front.async_llm import AsyncLLM
    from rabbet.front.llm import LLM
    from rabbet.front.outputs import CompletionOutput, Logprob, RequestOutput
    from rabbet.types.sampling import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

_PLACES = {
    "AsyncLLM": "rabbet.front.async_llm",
    "CompletionOutput": "rabbet.front.outputs",
    "EngineConfig": "rabbet.config.schema",
    "LLM": "rabbet.front.llm",
    "Logprob": "rabbet.front.outputs",
    "RequestOutput": "rabbet.front.outputs",
    "SamplingParams": "rabbet.types.sampling",
    "ServerConfig": "rabbet.config.schema",
    "StructuredOutputsParams": "rabbet.types.sampling",
    **{
        name: "rabbet.contracts.registration"
        for name in (
            "register_attention_backend", "register_executor", "register_grammar", "register_hooks",
            "register_kv_cache_dtype", "register_kv_connector", "register_kv_event_publisher",
            "register_linear_backend", "register_logits_processor", "register_model", "register_moe_backend",
            "register_platform", "register_pooler", "register_proposer", "register_quantization_config",
            "register_reasoning_parser", "register_scheduler", "register_stat_logger", "register_tool_parser",
            "register_weight_format",
        )
    },
}  # fmt: skip

__all__ = ["__version__", *_PLACES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rabbet' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
