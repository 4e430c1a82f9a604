"""The ``@register_*`` decorators: they leave a record on the class, and stage it for this process.

Nothing is overwritten and nothing takes effect here. An entry point names a decorated class; the registry loads
it, compares record and entry point, and only then uses it. A class that a script decorates itself, without a
distribution, is found through the staged records: it is chosen by explicit name only, and other processes import
it by module and qualified name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rabbet.contracts.kinds import KINDS
from rabbet.errors import DuplicatePluginError, PluginError

__all__ = [
    "Registration",
    "normalise_name",
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
    "registrations_of",
    "staged_registrations",
]

_ATTRIBUTE = "__rabbet_registrations__"
_T = TypeVar("_T", bound=type)


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """What a decorator recorded.

    Attributes:
        kind: Kind of plugin.
        name: Normalised name.
        contract: Contract version of the core that the class was decorated under.
        module: Module of the class.
        qualname: Qualified name of the class.
        target: The class itself.
    """

    kind: str
    name: str
    contract: str
    module: str
    qualname: str
    target: type


_staged: dict[tuple[str, str], Registration] = {}


def normalise_name(kind: str, name: str) -> str:
    """The form in which names of ``kind`` are compared: case-folded with ``-`` as ``_``; architectures verbatim."""
    return name if KINDS[kind].verbatim else name.strip().casefold().replace("-", "_")


def registrations_of(target: object) -> tuple[Registration, ...]:
    """The records that decorators left on exactly this class (not on its bases)."""
    return tuple(vars(target).get(_ATTRIBUTE, ())) if isinstance(target, type) else ()


def staged_registrations() -> tuple[Registration, ...]:
    """Every record of this process, in the order of decoration."""
    return tuple(_staged.values())


def _register(kind: str, name: str) -> Callable[[_T], _T]:
    if not isinstance(name, str) or not name.strip():
        raise PluginError(f"register_{kind} needs a non-empty name, got {name!r}", kind=kind)
    key = (kind, normalise_name(kind, name))

    def decorate(target: _T) -> _T:
        if not isinstance(target, type):
            raise PluginError(f"{kind}/{name}: only classes can be registered, got {target!r}", kind=kind, name=name)
        record = Registration(
            kind=kind,
            name=key[1],
            contract=KINDS[kind].version,
            module=target.__module__,
            qualname=target.__qualname__,
            target=target,
        )
        known = _staged.get(key)
        # The same class again is a reload of its module; another one is a conflict, never an overwrite.
        if known is not None and (known.module, known.qualname) != (record.module, record.qualname):
            raise DuplicatePluginError(
                f"{kind}/{key[1]} is registered twice in this process: by {known.module}.{known.qualname} and by "
                f"{record.module}.{record.qualname}; give one of them another name",
                kind=kind,
                name=key[1],
            )
        _staged[key] = record
        setattr(target, _ATTRIBUTE, (*registrations_of(target), record))
        return target

    return decorate


def _decorator(kind: str) -> Callable[[str], Callable[[_T], _T]]:
    def register(name: str) -> Callable[[_T], _T]:
        return _register(kind, name)

    register.__doc__ = (
        f"Register a class under ``name`` as a plugin of the kind ``{kind}``; see the module's docstring."
    )
    return register


register_platform = _decorator("platform")
register_model = _decorator("model")
register_weight_format = _decorator("weights")
register_quantization_config = _decorator("quantization")
register_kv_cache_dtype = _decorator("kv_cache_dtype")
register_attention_backend = _decorator("attention")
register_linear_backend = _decorator("linear")
register_moe_backend = _decorator("moe")
register_proposer = _decorator("proposer")
register_kv_connector = _decorator("kv_connector")
register_executor = _decorator("executor")
register_scheduler = _decorator("scheduler")
register_logits_processor = _decorator("logits_processor")
register_pooler = _decorator("pooler")
register_grammar = _decorator("grammar")
register_tool_parser = _decorator("tool_parser")
register_reasoning_parser = _decorator("reasoning_parser")
register_stat_logger = _decorator("stat_logger")
register_kv_event_publisher = _decorator("kv_events")
register_hooks = _decorator("hooks")
