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
        version: Contract version of this core, ``major.minor``.
        base: ``module:Class`` of the contract; imported only when something of the kind is loaded.
        chosen_by: The option or fact that chooses, for messages.
        verbatim: Names are compared exactly (architectures) and not case-folded.
        previous: Versions of the major before that are still served, newest first, through ``adapter``.
        adapter: ``module:function`` that makes a class of this contract of one of a previous version.
    """

    name: str
    base: str
    chosen_by: str
    version: str = "1.0"
    verbatim: bool = False
    previous: tuple[str, ...] = ()
    adapter: str = ""

    @property
    def group(self) -> str:
        """Entry-point group."""
        return f"rabbet.{self.name}"


_ALL = (
    Kind(name="platform", base="rabbet.contracts.platform:Platform", chosen_by="--device", version="1.1"),
    Kind(name="model", base="rabbet.contracts.model:Model", chosen_by="architectures in config.json", verbatim=True),
    Kind(name="weights", base="rabbet.contracts.weights:WeightFormat", chosen_by="--load-format", version="1.1"),
    Kind(name="quantization", base="rabbet.contracts.quantization:QuantizationConfig", chosen_by="--quantization"),
    Kind(
        name="kv_cache_dtype",
        base="rabbet.contracts.kv_cache_dtype:KVCacheDtype",
        chosen_by="--kv-cache-dtype",
        version="1.1",
    ),
    Kind(
        name="attention",
        base="rabbet.contracts.attention:AttentionBackend",
        chosen_by="--attention-backend",
        version="1.2",
    ),
    Kind(name="linear", base="rabbet.contracts.linear:LinearBackend", chosen_by="--linear-backend"),
    Kind(name="moe", base="rabbet.contracts.linear:MoEBackend", chosen_by="--moe-backend"),
    Kind(
        name="proposer",
        base="rabbet.contracts.proposer:Proposer",
        chosen_by="--speculative-config.method",
        version="1.1",
    ),
    Kind(
        name="kv_connector",
        base="rabbet.contracts.kv_connector:KVConnector",
        chosen_by="--kv-transfer-config.kv_connector",
    ),
    Kind(
        name="executor",
        base="rabbet.contracts.executor:Executor",
        chosen_by="--distributed-executor-backend",
        version="1.1",
    ),
    Kind(name="scheduler", base="rabbet.contracts.scheduler:Scheduler", chosen_by="--scheduling-policy", version="1.1"),
    Kind(
        name="logits_processor",
        base="rabbet.contracts.logits_processor:LogitsProcessor",
        chosen_by="--logits-processors",
        version="2.0",
        previous=("1.0",),
        adapter="rabbet.contracts.adapters.logits_processor_1:adapt",
    ),
    Kind(name="pooler", base="rabbet.contracts.pooler:Pooler", chosen_by="the task", version="1.1"),
    Kind(
        name="grammar", base="rabbet.contracts.grammar:GrammarBackend", chosen_by="--structured-outputs-config.backend"
    ),
    Kind(name="tool_parser", base="rabbet.contracts.parsers:ToolParser", chosen_by="--tool-call-parser"),
    Kind(name="reasoning_parser", base="rabbet.contracts.parsers:ReasoningParser", chosen_by="--reasoning-parser"),
    Kind(name="stat_logger", base="rabbet.contracts.observability:StatLogger", chosen_by="--stat-loggers"),
    Kind(
        name="kv_events",
        base="rabbet.contracts.observability:KVEventPublisher",
        chosen_by="--kv-events-config.publisher",
    ),
    Kind(name="hooks", base="rabbet.contracts.hooks:Hooks", chosen_by="being installed and allowed"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
"""Every kind, in the order in which the kinds are resolved: each query knows the decisions before it."""
