"""Every option of the engine and of the server, with its default; unknown keys are refused.

Each section is a pydantic dataclass; a field's description is the help text of its flag. ``EngineConfig`` is what
the engine runs, ``ServerConfig`` what the HTTP server in front of it does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "CompilationConfig",
    "DeviceConfig",
    "EngineConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "KernelConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PluginsConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
]

_FORBID = ConfigDict(extra="forbid", arbitrary_types_allowed=False, validate_default=False, defer_build=True)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


def _option(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


def _listed(description: str, *, is_secret: bool = False) -> Any:
    return Field(default_factory=list, description=description, repr=not is_secret)


def _mapped(description: str) -> Any:
    return Field(default_factory=dict, description=description)


@dataclass(config=_FORBID, kw_only=True)
class ModelConfig:
    """The model, its tokenizer and what its configuration says."""

    model: str = _option("", "Directory, file, hub name, or a short name that a plugin provides")
    served_model_name: list[str] = _listed("Names that requests may use; the first one is reported")
    tokenizer: str | None = _option(None, "Directory or hub name of another tokenizer")
    tokenizer_mode: Literal["auto", "hf", "slow"] = _option("auto", "How the tokenizer is loaded")
    revision: str | None = _option(None, "Hub revision")
    tokenizer_revision: str | None = _option(None, "Hub revision of the tokenizer")
    trust_remote_code: bool = _option(
        False, "Allow Python code that a tokenizer brings to run; code of models never runs"
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = _option(
        "auto", "Type of the computation"
    )
    seed: int = _option(0, "Seed of everything random but requests with their own")
    max_model_len: int | Literal["auto"] | None = _option(
        None, "Longest context; auto (the default) takes what the model allows and memory holds"
    )
    max_logprobs: Annotated[int, Field(ge=-1)] = _option(
        20, "Most log probabilities a request may ask for; -1 is no limit"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = _option(
        "raw_logprobs", "What logprobs hold: before or after penalties and filters"
    )
    quantization: str | None = _option(None, "Quantisation method; the checkpoint's own by default")
    quantization_config: dict[str, Any] = _mapped("Settings of a method that quantises at load")
    enforce_eager: bool = _option(False, "No graphs and no compilation")
    generation_config: str = _option(
        "auto", "Source of sampling defaults: auto (the model's), rabbet (none), a directory"
    )
    override_generation_config: dict[str, Any] = _mapped("Sampling defaults laid over those of the model")
    hf_overrides: dict[str, Any] = _mapped("Values laid over config.json")
    skip_tokenizer_init: bool = _option(False, "No tokenizer: token ids in, token ids out")
    runner: Literal["auto", "generate", "pooling", "draft"] = _option("auto", "What the model is used for")
    convert: Literal["auto", "none", "embed", "classify"] = _option("auto", "Turn a generating model into another kind")
    logits_processors: list[str] = _listed("Logits processors, by name or module:Class, in the order of use")
    model_impl: Literal["auto", "native", "transformers"] = _option("auto", "Use a model plugin or the fallback")


@dataclass(config=_FORBID, kw_only=True)
class LoadConfig:
    """How weights come from disk."""

    load_format: str = _option("auto", "Checkpoint format; found from the files by default; dummy draws random weights")
    download_dir: str | None = _option(None, "Where downloads and derived files are kept")
    use_tqdm_on_load: bool = _option(True, "Show a progress bar while weights are loaded")
    is_offline: bool = _option(False, "Make no network call; also HF_HUB_OFFLINE=1")


@dataclass(config=_FORBID, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: PositiveInt | None = _option(None, "Tokens a block; the attention backend's choice by default")
    gpu_memory_utilization: Fraction | None = _option(
        None, "Share of the device's memory for weights, activations and KV cache; the platform's choice by default"
    )
    kv_cache_memory_bytes: PositiveInt | None = _option(None, "Size of the KV cache, e.g. 4G; overrides the share")
    num_gpu_blocks_override: PositiveInt | None = _option(None, "Exactly that many blocks")
    enable_prefix_caching: bool = _option(True, "Share the blocks of equal prefixes")
    kv_cache_dtype: str = _option("auto", "Type of keys and values; the model's by default")
    prefix_caching_hash_algo: Literal["sha256"] = _option("sha256", "Hash of cached blocks")


@dataclass(config=_FORBID, kw_only=True)
class ParallelConfig:
    """How many devices share the model."""

    tensor_parallel_size: PositiveInt = _option(1, "Ranks that share each layer")
    pipeline_parallel_size: PositiveInt = _option(1, "Stages")
    data_parallel_size: PositiveInt = _option(1, "Copies of the model")
    distributed_executor_backend: str | None = _option(None, "Executor: uni for one rank, mp for several, or a plugin")
    device_ids: list[int | str] | None = _option(None, "Devices to use, by number or UUID")


@dataclass(config=_FORBID, kw_only=True)
class SchedulerConfig:
    """Budgets of a step and the order of requests."""

    max_num_batched_tokens: PositiveInt | None = _option(None, "Tokens a step")
    max_num_seqs: PositiveInt | None = _option(None, "Requests a step")
    long_prefill_token_threshold: NonNegativeInt = _option(0, "Most tokens of one request a step; 0 is off")
    enable_chunked_prefill: bool | None = _option(None, "Split prompts over steps; on by default")
    scheduling_policy: str = _option("fcfs", "Scheduler: fcfs, priority, or a plugin")
    async_scheduling: bool | None = _option(None, "Plan a step while the one before runs; on by default")
    max_num_queued_reqs: PositiveInt | None = _option(None, "Waiting requests before new ones are refused with 503")
    stream_interval: PositiveInt = _option(1, "Send a stream chunk every that many tokens")


@dataclass(config=_FORBID, kw_only=True)
class DeviceConfig:
    """The hardware platform."""

    device: str = _option("auto", "Platform; found on the machine by default")


@dataclass(config=_FORBID, kw_only=True)
class AttentionConfig:
    """The attention backend."""

    backend: str | None = _option(None, "Name of the backend; chosen by the platform by default")
    flash_attn_version: Literal[2, 3, 4] | None = _option(None, "Version of the FlashAttention library")


@dataclass(config=_FORBID, kw_only=True)
class KernelConfig:
    """Kernels of linear layers and experts."""

    linear_backend: str = _option("auto", "Kernels of dense linear layers")
    moe_backend: str = _option("auto", "Kernels of experts")


@dataclass(config=_FORBID, kw_only=True)
class SpeculativeConfig:
    """Drafts that the model verifies."""

    method: str | None = _option(None, "Proposer")
    model: str | None = _option(None, "Draft model, or a class path for custom_class")
    num_speculative_tokens: PositiveInt | Literal["auto"] | None = _option(None, "Drafts a step")
    draft_tensor_parallel_size: PositiveInt | None = _option(
        None, "Ranks of the draft model: 1, or those of the target"
    )
    max_model_len: PositiveInt | None = _option(None, "Longest context of the draft model")
    prompt_lookup_min: PositiveInt = _option(5, "Shortest n-gram looked up")
    prompt_lookup_max: PositiveInt = _option(5, "Longest n-gram looked up")


@dataclass(config=_FORBID, kw_only=True)
class KVTransferConfig:
    """KV blocks from and to elsewhere."""

    kv_connector: str | None = _option(None, "Connector")
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = _option(None, "What this engine does; required")
    kv_load_failure_policy: Literal["fail", "recompute"] = _option("fail", "What a failed load does to its request")
    kv_connector_extra_config: dict[str, Any] = _mapped("Options of the connector")


@dataclass(config=_FORBID, kw_only=True)
class KVEventsConfig:
    """Events of the KV cache."""

    enable_kv_cache_events: bool = _option(False, "Publish events")
    publisher: str | None = _option(None, "Publisher")
    endpoint: str = _option("tcp://127.0.0.1:5557", "Where it publishes")


@dataclass(config=_FORBID, kw_only=True)
class StructuredOutputsConfig:
    """Grammars."""

    backend: str = _option("auto", "Grammar engine")
    disable_any_whitespace: bool = _option(False, "No free white space in JSON")


@dataclass(config=_FORBID, kw_only=True)
class CompilationConfig:
    """Graphs and compilation."""

    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None = _option(
        None, "Which steps are captured; by the optimisation level by default"
    )
    cudagraph_capture_sizes: list[PositiveInt] | None = _option(None, "Batch sizes to capture")
    max_cudagraph_capture_size: PositiveInt | None = _option(None, "Largest batch size to capture")
    compile_ranges: list[PositiveInt] = _listed("Ends of token ranges that are compiled on their own")
    compile_sizes: list[PositiveInt] = _listed("Token counts that are compiled on their own")


@dataclass(config=_FORBID, kw_only=True)
class ObservabilityConfig:
    """Logs and metrics."""

    disable_log_stats: bool = _option(False, "No periodic line with throughput and queue lengths")
    log_stats_interval_s: Seconds = _option(10.0, "Seconds between two such lines")
    stat_loggers: list[str] = _listed("Stat loggers to use, by name")


@dataclass(config=_FORBID, kw_only=True)
class PluginsConfig:
    """Which plugins may be used."""

    allow: list[str] = _listed("See these only: names, kind/name, distributions, globs")
    deny: list[str] = _listed("Do not see these; wins over allow")
    mode: Literal["all", "bundled"] = _option("all", "bundled: only the project's own distributions")
    prefer: dict[str, str] = _mapped("kind/name=distribution: who wins where two provide a name")
    override: dict[str, str] = _mapped("kind/name=distribution: whose declared replacement takes effect")
    strict: bool = _option(False, "What auto would pass over is an error, unless it is for other hardware")
    auto: Literal["bundled", "any"] = _option("bundled", "Whose plugins auto may take")
    files: list[str] = _listed("One-file plugins, by path")
    import_timeout_s: Seconds = _option(300.0, "Seconds that the import of such a file may take")
    certificates: str = _option("~/.config/rabbet/certificates", "Directory of certificates, named KIND-NAME.json")
    locked: str = _option("", "Lock file; refuse to start if other plugins are installed than it says")
    check: bool = _option(False, "Check each call of a plugin; slow, for authors, needs rabbet-sdk")


@dataclass(config=_FORBID, kw_only=True)
class EngineConfig:
    """Everything that the engine runs by."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    load: LoadConfig = Field(default_factory=LoadConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    kernel: KernelConfig = Field(default_factory=KernelConfig)
    speculative: SpeculativeConfig | None = None
    kv_transfer: KVTransferConfig | None = None
    kv_events: KVEventsConfig = Field(default_factory=KVEventsConfig)
    structured_outputs: StructuredOutputsConfig = Field(default_factory=StructuredOutputsConfig)
    compilation: CompilationConfig = Field(default_factory=CompilationConfig)
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig)
    plugins: PluginsConfig = Field(default_factory=PluginsConfig)
    plugin_config: dict[str, dict[str, Any]] = _mapped("Options of plugins: NAME.key=value")
    additional_config: dict[str, Any] = _mapped("Free values for plugins")
    optimization_level: Annotated[int, Field(ge=0, le=3)] = _option(2, "0 starts fastest, 3 runs fastest")
    performance_mode: Literal["balanced", "interactivity", "throughput"] = _option("balanced", "What defaults favour")
    shutdown_timeout: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = _option(
        0.0, "Seconds to let running requests end; 0 aborts them"
    )


@dataclass(config=_FORBID, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str | None = _option(None, "Address to listen on; all by default")
    port: Port = _option(8000, "Port to listen on; 0 takes a free one")
    uds: str | None = _option(None, "Unix socket to listen on instead")
    root_path: str = _option("", "Path prefix behind a proxy")
    api_key: list[str] = _listed("Keys that requests must carry; several are possible", is_secret=True)
    ssl_keyfile: str | None = _option(None, "Private key for TLS")
    ssl_certfile: str | None = _option(None, "Certificate for TLS")
    allowed_hosts: list[str] = _listed(
        "Host headers to answer, * for any; on a loopback address only loopback names by default, else any"
    )
    allowed_origins: list[str] = _listed("Origins for CORS; none by default")
    allowed_methods: list[str] = Field(default_factory=lambda: ["*"], description="Methods for CORS")
    allowed_headers: list[str] = Field(default_factory=lambda: ["*"], description="Headers for CORS")
    allow_credentials: bool = _option(False, "Credentials for CORS")
    chat_template: str | None = _option(None, "File with a Jinja template, or the template itself")
    default_chat_template_kwargs: dict[str, Any] = _mapped("Values for the chat template")
    trust_request_chat_template: bool = _option(False, "Let requests bring their own template")
    response_role: str = _option("assistant", "Role of answers")
    enable_log_requests: bool = _option(False, "One log line a request")
    disable_access_log: bool = _option(False, "No access log")
    disable_fastapi_docs: bool = _option(False, "No /docs and /openapi.json")
    enable_request_id_headers: bool = _option(False, "Answer with X-Request-Id")
    enable_prompt_tokens_details: bool = _option(False, "Report cached tokens in usage")
    enable_force_include_usage: bool = _option(False, "Send usage at the end of every stream")
    return_tokens_as_token_ids: bool = _option(False, "Show tokens as token_id:N in logprobs")
    sse_keep_alive_interval_s: Seconds = _option(15.0, "Seconds between comments on a silent stream")
    metrics_compat: Literal["none", "vllm"] = _option("none", "Also export metrics under the reference engine's names")
    max_body_bytes: PositiveInt = _option(32 << 20, "Largest request body")
    max_n: PositiveInt = _option(128, "Most outputs of one request")
    max_prompts: PositiveInt = _option(1024, "Most prompts of one completions request")
    max_outputs: PositiveInt = _option(4096, "Most outputs of one request in all: prompts times n")
    max_stop: PositiveInt = _option(16, "Most stop strings of one request")
    enable_auto_tool_choice: bool = _option(False, "Let the model choose tools; needs a parser")
    tool_call_parser: str | None = _option(None, "Parser of tool calls")
    reasoning_parser: str | None = _option(None, "Parser of reasoning")
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "How much is logged")
