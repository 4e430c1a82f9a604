"""Combinations of options that contradict each other or are not possible; each is refused with what to do."""

from __future__ import annotations

import dataclasses
import re

from rabbet.config.schema import EngineConfig, ParallelConfig, ServerConfig, SpeculativeConfig
from rabbet.errors import ConfigError, shorten

__all__ = ["check_conflicts"]

_CONTROLS = re.compile(r"[\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Also what turns the direction of writing, ends lines or is not seen."""


def check_conflicts(engine: EngineConfig, server: ServerConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: Naming the options.
    """
    _check_parallel(engine.parallel)
    length = engine.model.max_model_len
    if isinstance(length, int) and length < 1 and length != -1:
        raise ConfigError(f"--max-model-len is {length}, but must be positive, or auto", field="model.max_model_len")
    if engine.model.runner == "pooling" or engine.model.convert in ("embed", "classify"):
        raise ConfigError(
            "--runner pooling and --convert need a pooler, which no installed plugin provides; use --runner generate",
            field="model.runner",
        )
    if server.enable_auto_tool_choice and not server.tool_call_parser:
        raise ConfigError(
            "--enable-auto-tool-choice needs --tool-call-parser, which says how the model writes calls",
            field="server.enable_auto_tool_choice",
        )
    if bool(server.ssl_certfile) != bool(server.ssl_keyfile):
        option = "ssl-keyfile" if server.ssl_certfile else "ssl-certfile"
        raise ConfigError(f"TLS needs a certificate and its key: --{option} is missing", field=option)
    _check_texts(engine, server)
    transfer = engine.kv_transfer
    if transfer is not None and transfer.kv_connector and not transfer.kv_role:
        raise ConfigError(
            "--kv-transfer-config.kv_connector needs kv_role: kv_producer, kv_consumer or kv_both",
            field="kv_transfer.kv_role",
        )
    speculative, size = engine.speculative or SpeculativeConfig(), engine.parallel.tensor_parallel_size
    if speculative.prompt_lookup_min > speculative.prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_min is {speculative.prompt_lookup_min}, more than prompt_lookup_max "
            f"{speculative.prompt_lookup_max}",
            field="speculative.prompt_lookup_min",
        )
    if speculative.method == "custom_class" and not re.fullmatch(r"\w+(\.\w+)*[.:]\w+", speculative.model or ""):
        raise ConfigError(
            f"the method custom_class needs a model that is a class path such as acme.drafts:Drafts, not {speculative.model!r}",
            field="speculative.model",
        )
    if speculative.draft_tensor_parallel_size not in (None, 1, size):
        raise ConfigError(
            f"draft_tensor_parallel_size is {speculative.draft_tensor_parallel_size}, but must be 1 or "
            f"--tensor-parallel-size, which is {size}",
            field="speculative.draft_tensor_parallel_size",
        )


def _check_texts(engine: EngineConfig, server: ServerConfig) -> None:
    """They go into lines of the log, headers and addresses."""
    sections = (server, *filter(dataclasses.is_dataclass, vars(engine).values()))
    for name, value in (item for section in sections for item in vars(section).items()):
        for text in value if isinstance(value, list) else [value]:
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, list) and isinstance(text, str) and not text.strip():
                raise ConfigError(f"{option} is empty; give a value or leave the option out", field=name)
            if name not in ("chat_template", "api_key") and isinstance(text, str) and _CONTROLS.search(text):
                raise ConfigError(f"{option} is {shorten(text)}, but must hold no control characters", field=name)
    if re.search(r"[\s?#]", server.root_path):
        raise ConfigError(f"--root-path is {shorten(server.root_path)}, but must be a path of a URL", field="root_path")


def _check_parallel(parallel: ParallelConfig) -> None:
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {size}; this release runs tensor parallelism only, so leave it at 1",
                field=f"parallel.{name}",
            )
    ids = parallel.device_ids
    if ids is None:
        return
    shown, size = shorten(ids), parallel.tensor_parallel_size
    for is_wrong, told in (
        (len(set(ids)) != len(ids), f"names a device twice: {shown}"),
        (len({type(item) for item in ids}) > 1, f"mixes numbers and UUIDs: {shown}; use one kind"),
        (any(isinstance(item, int) and item < 0 for item in ids), f"holds a number below 0: {shown}"),
        (len(ids) < size, f"names {len(ids)} devices, but --tensor-parallel-size needs {size}"),
    ):
        if is_wrong:
            raise ConfigError(f"--device-ids {told}", field="parallel.device_ids")
