"""Rabbet: an engine that serves large language models, put together from plugins.

Names are imported on first use, so that ``import rabbet`` is quick and brings in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rabbet.config.schema import EngineConfig as EngineConfig
    from rabbet.config.schema import ServerConfig as ServerConfig
    from rabbet.contracts.registration import *  # noqa: F403
    from rabbet.front.async_llm import AsyncLLM as AsyncLLM
    from rabbet.front.llm import LLM as LLM
    from rabbet.front.outputs import CompletionOutput as CompletionOutput
    from rabbet.front.outputs import Logprob as Logprob
    from rabbet.front.outputs import RequestOutput as RequestOutput
    from rabbet.types.sampling import SamplingParams as SamplingParams
    from rabbet.types.sampling import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_DECORATORS = (
    "register_attention_backend",
    "register_executor",
    "register_grammar",
    "register_hooks",
    "register_kv_cache_dtype",
    "register_kv_connector",
    "register_kv_event_publisher",
    "register_linear_backend",
    "register_logits_processor",
    "register_model",
    "register_moe_backend",
    "register_platform",
    "register_pooler",
    "register_proposer",
    "register_quantization_config",
    "register_reasoning_parser",
    "register_scheduler",
    "register_stat_logger",
    "register_tool_parser",
    "register_weight_format",
)
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
    **dict.fromkeys(_DECORATORS, "rabbet.contracts.registration"),
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'rabbet' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
