"""The table of plugin kinds: entry-point group, contract version, option that chooses, order of resolution."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "MANIFEST_GROUP", "Kind"]

MANIFEST_GROUP = "rabbet.manifest"
"""Entry-point group that names each distribution's TOML manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of plugin.

    Attributes:
        name: As in a manifest's ``kind`` and in ``kind/name``.
        group: Entry-point group.
        version: Contract version of this core, ``major.minor``.
        base: ``module:Class`` of the contract; imported only when something of the kind is loaded.
        chosen_by: The option or fact that chooses, for messages.
        verbatim: Names are compared exactly (architectures) and not case-folded.
        previous: Versions of the major before that are still served, newest first, through ``adapter``.
        adapter: ``module:function`` that makes a class of this contract of one of a previous version.
    """

    name: str
    group: str
    base: str
    chosen_by: str
    version: str = "1.0"
    verbatim: bool = False
    previous: tuple[str, ...] = ()
    adapter: str = ""


_ALL = (
    Kind(name="platform", group="rabbet.platform", base="rabbet.contracts.platform:Platform", chosen_by="--device"),
    Kind(
        name="model",
        group="rabbet.model",
        base="rabbet.contracts.model:Model",
        chosen_by="architectures in config.json",
        verbatim=True,
    ),
    Kind(
        name="weights",
        group="rabbet.weights",
        base="rabbet.contracts.weights:WeightFormat",
        chosen_by="--load-format",
        version="1.1",
    ),
    Kind(
        name="quantization",
        group="rabbet.quantization",
        base="rabbet.contracts.quantization:QuantizationConfig",
        chosen_by="--quantization",
    ),
    Kind(
        name="kv_cache_dtype",
        group="rabbet.kv_cache_dtype",
        base="rabbet.contracts.kv_cache_dtype:KVCacheDtype",
        chosen_by="--kv-cache-dtype",
    ),
    Kind(
        name="attention",
        group="rabbet.attention",
        base="rabbet.contracts.attention:AttentionBackend",
        chosen_by="--attention-backend",
    ),
    Kind(
        name="linear", group="rabbet.linear", base="rabbet.contracts.linear:LinearBackend", chosen_by="--linear-backend"
    ),
    Kind(name="moe", group="rabbet.moe", base="rabbet.contracts.linear:MoEBackend", chosen_by="--moe-backend"),
    Kind(
        name="proposer",
        group="rabbet.proposer",
        base="rabbet.contracts.proposer:Proposer",
        chosen_by="--speculative-config.method",
    ),
    Kind(
        name="kv_connector",
        group="rabbet.kv_connector",
        base="rabbet.contracts.kv_connector:KVConnector",
        chosen_by="--kv-transfer-config.kv_connector",
    ),
    Kind(
        name="executor",
        group="rabbet.executor",
        base="rabbet.contracts.executor:Executor",
        chosen_by="--distributed-executor-backend",
    ),
    Kind(
        name="scheduler",
        group="rabbet.scheduler",
        base="rabbet.contracts.scheduler:Scheduler",
        chosen_by="--scheduling-policy",
    ),
    Kind(
        name="logits_processor",
        group="rabbet.logits_processor",
        base="rabbet.contracts.logits_processor:LogitsProcessor",
        chosen_by="--logits-processors",
        version="2.0",
        previous=("1.0",),
        adapter="rabbet.contracts.adapters.logits_processor_1:adapt",
    ),
    Kind(name="pooler", group="rabbet.pooler", base="rabbet.contracts.pooler:Pooler", chosen_by="the task"),
    Kind(
        name="grammar",
        group="rabbet.grammar",
        base="rabbet.contracts.grammar:GrammarBackend",
        chosen_by="--structured-outputs-config.backend",
    ),
    Kind(
        name="tool_parser",
        group="rabbet.tool_parser",
        base="rabbet.contracts.parsers:ToolParser",
        chosen_by="--tool-call-parser",
    ),
    Kind(
        name="reasoning_parser",
        group="rabbet.reasoning_parser",
        base="rabbet.contracts.parsers:ReasoningParser",
        chosen_by="--reasoning-parser",
    ),
    Kind(
        name="stat_logger",
        group="rabbet.stat_logger",
        base="rabbet.contracts.observability:StatLogger",
        chosen_by="--stat-loggers",
    ),
    Kind(
        name="kv_events",
        group="rabbet.kv_events",
        base="rabbet.contracts.observability:KVEventPublisher",
        chosen_by="--kv-events-config.publisher",
    ),
    Kind(
        name="hooks", group="rabbet.hooks", base="rabbet.contracts.hooks:Hooks", chosen_by="being installed and allowed"
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
"""Every kind, in the order in which the kinds are resolved: each query knows the decisions before it."""
