"""Decides every "auto" once, in a fixed order, in the front process and without torch.

platform -> weights -> model -> dtype -> quantization -> KV dtype -> attention -> linear, MoE -> executor ->
scheduler -> budgets. Each query knows the decisions before it, so conflicts surface here and not in a worker.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rabbet.config.flags import fields
from rabbet.config.limits import count, resolve_budgets
from rabbet.config.plugin_options import check_plugin_options
from rabbet.config.policy import policy_of
from rabbet.config.resolved import ResolvedConfig
from rabbet.config.schema import CompilationConfig, EngineConfig, KVEventsConfig, StructuredOutputsConfig
from rabbet.contracts import KINDS
from rabbet.contracts.attention import AttentionQuery
from rabbet.contracts.executor import ExecutorQuery
from rabbet.contracts.kv_cache_dtype import KVDtypeQuery
from rabbet.contracts.linear import LinearQuery, MoEQuery
from rabbet.contracts.model import ModelQuery
from rabbet.contracts.platform import BatchDefaults, DeviceInfo, Platform, PlatformQuery, SupportsGraphs
from rabbet.contracts.quantization import QuantizationQuery
from rabbet.contracts.weights import ModelFiles, ResolveQuery, WeightFormat
from rabbet.errors import ConfigError, PluginLoadError, PluginPolicyError, UnknownPluginError, WeightsError, shorten
from rabbet.registry import Catalog, Composition, Decision, compose, select
from rabbet.registry.loader import ask, call
from rabbet.registry.names import nearest
from rabbet.registry.select import pass_over

__all__ = ["FALLBACK_ARCHITECTURE", "resolve"]

FALLBACK_ARCHITECTURE = "*"
"""Name under which a model plugin registers to serve architectures that no other plugin has."""

PLAIN_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Resolver:
    """State of one resolution: what is decided so far."""

    config: EngineConfig
    catalog: Catalog
    decisions: list[Decision] = field(default_factory=list)
    preferences: Any = None

    def choose(self, kind: str, name: str | None, query: Any = None, *, asked_by: str = "") -> type[Any]:
        """Decide one kind and load the class."""
        decision = select(
            self.catalog,
            kind,
            name=None if name in (None, "auto") else name,
            query=query,
            preferences=self.preferences(kind) if self.preferences is not None else (),
            asked_by=asked_by,
        )
        self.decisions.append(decision)
        return self.load(decision)

    def call(self, kind: str, target: type[Any], method: str, *arguments: Any, **more: Any) -> Any:
        """Call a class method of what was chosen; see ``registry.loader.call``."""
        decision = next(item for item in reversed(self.decisions) if item.kind == kind)
        return call(decision, method, getattr(target, method), *arguments, **more)

    def load(self, decision: Decision) -> type[Any]:
        """The class that a decision names."""
        return compose((decision,)).load(decision.kind, decision.scope)


def resolve(config: EngineConfig, *, is_server: bool, catalog: Catalog | None = None) -> ResolvedConfig:
    """Turn what the user asked for into what will run.

    Args:
        config: The user's configuration.
        is_server: Online serving has smaller step budgets than offline batches.
        catalog: For tests; by default what is installed.

    Raises:
        ConfigError: A value is impossible or contradicts another.
        PluginError: A plugin is unknown, broken or refuses.
        WeightsError: The model is not there or not readable.
    """
    resolver = _Resolver(config=config, catalog=catalog or Catalog.scan(policy_of(config)))
    options = check_plugin_options(config.plugin_config, resolver.catalog)
    _refuse_what_is_not_run(config, resolver.catalog)
    parallel = config.parallel
    world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    platform, device = _platform(resolver, world_size)
    _say_what_changes_nothing(config, platform)
    files = _files(resolver)
    hf = {**files.config, **config.model.hf_overrides}
    hf_text = hf.get("text_config") or hf
    if not isinstance(hf_text, Mapping):
        raise ConfigError(f"config.json: text_config is {shorten(hf_text)}, but must be an object", field="model")
    heads = _heads(hf_text, parallel.tensor_parallel_size)
    architecture = _model(resolver, hf)
    dtype = _dtype(resolver, hf_text, platform)
    quantization = _quantization(resolver, hf, platform, device, dtype)
    kv_dtype = _kv_dtype(resolver, dtype, platform, device, heads)
    query = _attention_query(config, hf_text, (dtype, kv_dtype), (platform, device), heads)
    attention = resolver.choose("attention", config.attention.backend, query, asked_by="--attention-backend")
    block_size = _block_size(resolver, attention)
    num_experts = _kernels(resolver, hf_text, (platform, device), dtype, quantization)
    resolver.choose(
        "executor",
        parallel.distributed_executor_backend or ("uni" if world_size == 1 else "mp"),
        ExecutorQuery(world_size=world_size),
        asked_by="--distributed-executor-backend",
    )
    resolver.choose("scheduler", config.scheduler.scheduling_policy, asked_by="--scheduling-policy")
    _logits_processors(resolver)
    named = {"is_server": is_server, "world_size": world_size}
    defaults = resolver.call("platform", platform, "batch_defaults", returns=BatchDefaults, **named)
    budgets = resolve_budgets(config, hf_text, defaults)
    composition = compose(tuple(resolver.decisions)).settled(is_strict=config.plugins.strict)
    _log(composition)
    return ResolvedConfig(
        config=config,
        files=files,
        architecture=architecture,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        block_size=block_size,
        **dataclasses.asdict(budgets),
        memory_fraction=config.cache.gpu_memory_utilization or defaults.memory_fraction,
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        max_kv_cache_bytes=defaults.max_kv_cache_bytes,
        vocab_size=count(hf_text, "vocab_size"),
        eos_token_ids=_eos_token_ids(files, hf_text),
        world_size=world_size,
        arch=device.arch,
        device_type=platform.device_type,
        composition=composition,
        num_experts=num_experts,
        options=options,
    )


def _refuse_what_is_not_run(config: EngineConfig, catalog: Catalog) -> None:
    """An explicit choice is obeyed or refused, never ignored: these kinds have contracts, and this release runs none."""
    speculative, transfer = config.speculative, config.kv_transfer
    backend = config.structured_outputs.backend
    # A class path names no plugin; what follows refuses it.
    is_named = speculative is not None and speculative.method != "custom_class"
    for kind, name in (
        ("proposer", speculative.method or speculative.model if speculative and is_named else None),
        ("kv_connector", transfer.kv_connector if transfer else None),
        ("kv_events", config.kv_events.publisher),
        ("grammar", None if backend == "auto" else backend),
    ):
        if name is not None:
            entry = catalog.find(kind, name)
            raise ConfigError(
                f"{KINDS[kind].chosen_by} names {entry.name}, but this release runs no {kind} plugins yet; leave it out",
                field=kind,
            )
    # The same where only what belongs to them is set.
    model = config.model
    is_other = model.tokenizer is None and model.tokenizer_revision not in (None, model.revision)
    for place, is_set, what in (
        ("speculative", speculative is not None, "runs no proposer plugins yet"),
        ("kv_transfer", transfer is not None, "runs no kv_connector plugins yet"),
        ("kv_events", config.kv_events != KVEventsConfig(), "publishes no events yet"),
        ("structured_outputs", config.structured_outputs != StructuredOutputsConfig(), "runs no grammar plugins yet"),
        ("attention.flash_attn_version", config.attention.flash_attn_version is not None, "has no FlashAttention"),
        ("model.tokenizer_revision", is_other, "takes a tokenizer without --tokenizer by the model's --revision"),
        (
            "model.quantization_config",
            model.quantization_config and not model.quantization,
            "has it for --quantization only",
        ),
    ):
        if is_set:
            section, _, name = place.partition(".")
            flag = fields()[section, name].name if name else f"{section.replace('_', '-')}-config"
            raise ConfigError(f"--{flag} is set, but this release {what}; leave it out", field=place)


def _say_what_changes_nothing(config: EngineConfig, platform: type[Platform]) -> None:
    """Graphs and compilation are about speed alone, so what is set for them without an effect stops nothing."""
    compilation, level = config.compilation, config.optimization_level
    has_graphs = issubclass(platform, SupportsGraphs)
    is_set = compilation != CompilationConfig() or level != EngineConfig().optimization_level
    if compilation.compile_ranges or compilation.compile_sizes or (is_set and not has_graphs):
        logger.warning("some of --compilation-config and -O changes nothing here: the platform does not do it")


def _platform(resolver: _Resolver, world_size: int) -> tuple[type[Platform], DeviceInfo]:
    config = resolver.config
    query = PlatformQuery(
        dtype=_DTYPE_ALIASES.get(config.model.dtype, config.model.dtype),
        num_local_ranks=world_size,
        device_ids=tuple(str(item) for item in config.parallel.device_ids or ()),
    )
    platform = resolver.choose("platform", config.device.device, query, asked_by="--device")
    devices = resolver.call("platform", platform, "detect", returns=tuple | list, of=DeviceInfo)
    if not devices:
        raise ConfigError(f"--device {resolver.decisions[-1].name}: no such device on this machine", field="device")
    resolver.preferences = partial(resolver.call, "platform", platform, "preferences", returns=tuple | list, of=str)
    return platform, devices[0]


def _files(resolver: _Resolver) -> ModelFiles:
    """The model on disk. What is not found may be a mistyped short name: formats list theirs as the claim ``models``."""
    config = resolver.config
    query = ResolveQuery(
        model=config.model.model,
        revision=config.model.revision,
        download_dir=config.load.download_dir,
        is_offline=config.load.is_offline,
    )
    name = config.load.load_format
    try:
        return _found(resolver, query, name)
    except WeightsError as error:
        formats = [entry for entry in resolver.catalog.of_kind("weights") if name in ("auto", entry.name)]
        known = [str(item) for entry in formats if entry.provided for item in entry.provided.claims.get("models", ())]
        close = nearest(query.model, known)
        # Path.exists would fail on a name that is too long.
        if not close or query.model in known or os.path.exists(query.model):  # noqa: PTH110
            raise
        message = f"{error}; did you mean {' or '.join(map(repr, close))}?"
        raise WeightsError(message, file=error.file, tensor=error.tensor) from error


def _found(resolver: _Resolver, query: ResolveQuery, name: str) -> ModelFiles:
    if name != "auto":
        return _read(resolver, query, resolver.choose("weights", name, asked_by="--load-format"))
    names = resolver.catalog.names("weights")
    for candidate in names:
        try:
            is_match = ask(resolver.catalog.find("weights", candidate), "matches", query)
        except PluginLoadError as error:
            pass_over(resolver.catalog, str(error), kind="weights", name=candidate)
            continue
        if is_match:
            return _read(resolver, query, resolver.choose("weights", candidate, asked_by="auto"))
    raise WeightsError(
        f"{query.model!r} is neither a directory with a config.json, nor a checkpoint file, nor a hub name that the "
        f"installed formats ({', '.join(names) or 'none'}) know; check the path"
    )


def _read(resolver: _Resolver, query: ResolveQuery, weight_format: type[WeightFormat]) -> ModelFiles:
    """The model on disk; plugins that its config.json needs are looked for before any weights are fetched or read."""
    config = resolver.call("weights", weight_format, "peek", query, returns=Mapping | None)
    if config is not None and config.get("architectures"):
        hf = {**config, **resolver.config.model.hf_overrides}
        resolver.catalog.find("model", _architecture(resolver, hf)[0])
        _quantization_name(resolver, hf)
    return resolver.call("weights", weight_format, "resolve", query, returns=ModelFiles)  # type: ignore[no-any-return]


def _model(resolver: _Resolver, hf: Mapping[str, Any]) -> str:
    """The plugin for the first architecture that has one, else the fallback, else an error that names both."""
    config = resolver.config
    name, architecture = _architecture(resolver, hf)
    query = ModelQuery(
        architecture=architecture,
        config=dict(hf),
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
    )
    resolver.choose("model", name, query, asked_by="architectures in config.json")
    return name


def _architecture(resolver: _Resolver, hf: Mapping[str, Any]) -> tuple[str, str]:
    """Name of the plugin to ask for, and the checkpoint's first architecture."""
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise ConfigError(
            'config.json names no list of architectures; set it with --hf-overrides \'{"architectures": ["..."]}\'',
            field="model",
        )
    installed = resolver.catalog.names("model")
    impl = resolver.config.model.model_impl
    wanted = [name for name in architectures if name in installed] if impl != "transformers" else []
    if not wanted and FALLBACK_ARCHITECTURE in installed and impl in ("auto", "transformers"):
        wanted = [FALLBACK_ARCHITECTURE]
    return (wanted or architectures)[0], architectures[0]


def _dtype(resolver: _Resolver, hf: Mapping[str, Any], platform: type[Platform]) -> str:
    asked = _DTYPE_ALIASES.get(resolver.config.model.dtype, resolver.config.model.dtype)
    if asked != "auto":
        return asked
    stored = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    stored = stored if stored in PLAIN_DTYPES else "float32"
    return str(resolver.call("platform", platform, "default_dtype", stored, returns=str))


def _quantization_name(resolver: _Resolver, hf: Mapping[str, Any]) -> tuple[str | None, str]:
    """The method that is needed, which is installed, and who asks for it."""
    raw, asked = hf.get("quantization_config"), resolver.config.model.quantization
    stored = str(raw.get("quant_method", "")) if isinstance(raw, Mapping) else ""
    if asked and stored and asked.replace("-", "_") != stored.replace("-", "_"):
        raise ConfigError(
            f"--quantization is {asked!r}, but the checkpoint was quantised with {stored!r}; leave the option out",
            field="quantization",
        )
    name = asked or stored or None
    try:
        if name is not None:
            resolver.catalog.find("quantization", name)
    except UnknownPluginError as error:
        if asked:
            raise
        told = f"the checkpoint needs the quantization method {name!r}, which no installed plugin provides. {error}"
        raise UnknownPluginError(told, kind="quantization", name=name) from error
    return name, "--quantization" if asked else "the checkpoint"


def _quantization(
    resolver: _Resolver, hf: Mapping[str, Any], platform: type[Platform], device: DeviceInfo, dtype: str
) -> str | None:
    name, asked_by = _quantization_name(resolver, hf)
    if name is None:
        return None
    raw = hf.get("quantization_config")
    query = QuantizationQuery(
        device_type=platform.device_type,
        arch=device.arch,
        dtype=dtype,
        kv_cache_dtype=resolver.config.cache.kv_cache_dtype,
        raw_config=raw if isinstance(raw, Mapping) else None,
    )
    resolver.choose("quantization", name, query, asked_by=asked_by)
    return resolver.decisions[-1].name


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """Heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def _heads(hf: Mapping[str, Any], tensor_parallel_size: int) -> _Heads:
    num_heads = count(hf, "num_attention_heads", "n_head", default=1)
    num_kv_heads = count(hf, "num_key_value_heads", default=0, least=0) or num_heads
    hidden = count(hf, "hidden_size", "n_embd", default=num_heads)
    # Layers are made one by one: more than these would be made for hours.
    count(hf, "num_hidden_layers", "n_layer", default=1, most=1000)
    return _Heads(
        # An uneven split is padded with heads of zeros, so each rank has the same shape.
        num_heads=(
            -(-num_kv_heads // tensor_parallel_size) * (num_heads // num_kv_heads)
            if num_kv_heads >= tensor_parallel_size
            else -(-num_heads // tensor_parallel_size)
        ),
        num_kv_heads=-(-num_kv_heads // tensor_parallel_size),
        head_dim=count(hf, "head_dim", default=0, least=0) or hidden // num_heads,
    )


def _kv_dtype(resolver: _Resolver, dtype: str, platform: type[Platform], device: DeviceInfo, heads: _Heads) -> str:
    asked = resolver.config.cache.kv_cache_dtype
    asked = _DTYPE_ALIASES.get(asked, asked)
    if asked in ("auto", dtype):
        return dtype
    if asked in PLAIN_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype is {asked}, but the model runs in {dtype}; use auto, or set --dtype {asked}",
            field="cache.kv_cache_dtype",
        )
    query = KVDtypeQuery(
        device_type=platform.device_type,
        arch=device.arch,
        dtype=dtype,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.head_dim,
    )
    resolver.choose("kv_cache_dtype", asked, query, asked_by="--kv-cache-dtype")
    return resolver.decisions[-1].name


def _attention_query(
    config: EngineConfig,
    hf: Mapping[str, Any],
    dtypes: tuple[str, str],
    hardware: tuple[type[Platform], DeviceInfo],
    heads: _Heads,
) -> AttentionQuery:
    """The most demanding layer's query: a backend that has windows also has full attention."""
    platform, device = hardware
    window = count(hf, "sliding_window", default=0, least=-1) if hf.get("use_sliding_window", True) else 0
    return AttentionQuery(
        device_type=platform.device_type,
        arch=device.arch,
        dtype=dtypes[0],
        kv_cache_dtype=dtypes[1],
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.head_dim,
        block_size=config.cache.block_size or 16,
        window=window if window > 0 else None,
        has_soft_cap=bool(hf.get("attn_logit_softcapping")),
    )


def _block_size(resolver: _Resolver, attention: type[Any]) -> int:
    sizes = resolver.call("attention", attention, "block_sizes", returns=tuple | list, of=int) or (16,)
    asked = resolver.config.cache.block_size
    if asked is None:
        return int(sizes[0])
    if not any(asked % size == 0 for size in sizes):
        raise ConfigError(
            f"--block-size is {asked}, but the attention backend works with multiples of "
            f"{', '.join(str(size) for size in sizes)}",
            field="cache.block_size",
        )
    return asked


def _kernels(
    resolver: _Resolver,
    hf: Mapping[str, Any],
    hardware: tuple[type[Platform], DeviceInfo],
    dtype: str,
    quantization: str | None,
) -> int:
    """Decide linear and MoE kernels; returns the number of experts."""
    platform, device = hardware
    kernel = resolver.config.kernel
    query = LinearQuery(device_type=platform.device_type, arch=device.arch, dtype=dtype, weight_dtype=dtype)
    resolver.choose("linear", kernel.linear_backend, query, asked_by="--linear-backend")
    num_experts = count(hf, "num_local_experts", "num_experts", "n_routed_experts", default=0, least=0)
    if num_experts or kernel.moe_backend != "auto":
        experts = MoEQuery(
            device_type=platform.device_type,
            arch=device.arch,
            dtype=dtype,
            num_experts=num_experts,
            num_local_experts=num_experts,
            top_k=count(hf, "num_experts_per_tok", default=1),
            activation=str(hf.get("hidden_act", "silu")),
            scheme=quantization or "none",
        )
        resolver.choose("moe", kernel.moe_backend, experts, asked_by="--moe-backend")
    return num_experts


def _logits_processors(resolver: _Resolver) -> None:
    """One decision a name; the name is the scope. ``module:Class`` is what no distribution of that name provides."""
    names = resolver.config.model.logits_processors
    for name in names:
        option = "--logits-processors"
        if names.count(name) > 1:
            raise ConfigError(f"{option} names {name} twice", field="model.logits_processors")
        kind, catalog, owner = "logits_processor", resolver.catalog, name.rpartition(":")[0]
        if owner and owner not in {entry.distribution for entry in catalog.entries}:
            if reason := catalog.policy.denies(kind, name, "(this process)", is_bundled=False):
                raise PluginPolicyError(f"{option} {name}: {reason}", kind=kind, name=name)
            decision = Decision(
                kind=kind, scope=name, name=name, value=name, distribution="(this process)", version="", asked_by=option,
                contract=KINDS[kind].version, is_checked=catalog.policy.is_checked,
            )  # fmt: skip
        else:
            decision = select(catalog, kind, name=name, scope=name, asked_by=option)
        resolver.decisions.append(decision)
        compose((decision,)).load(kind, name)


def _eos_token_ids(files: ModelFiles, hf: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json; both may hold one id or a list, and -1 is none."""
    for source in (files.generation_config, hf):
        value = source.get("eos_token_id")
        if value not in (None, []):
            ids = value if isinstance(value, list) else [value]
            return tuple(i for i in (count({"eos_token_id": item}, "eos_token_id", least=-1) for item in ids) if i >= 0)
    return ()


def _log(composition: Composition) -> None:
    for decision in composition.decisions:
        for number, line in enumerate(decision.lines()):
            logger.log(logging.INFO if number == 0 else logging.DEBUG, "%s", line)
    logger.info("composition %s, %d cores visible", composition.digest[:12], len(os.sched_getaffinity(0)))
