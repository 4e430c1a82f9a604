"""Turns an entry into a class, once, and checks that the class is what the entry point promised.

A load that failed fails again with the same error: half a plugin is never used.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from typing import Any

from rabbet._util.memory import lacks_memory
from rabbet.contracts.kinds import KINDS
from rabbet.contracts.registration import registrations_of
from rabbet.errors import PluginError, PluginLoadError, RabbetError, shorten
from rabbet.registry._load import load_entry_point
from rabbet.registry.checked import checked
from rabbet.registry.decision import Decision
from rabbet.registry.entry import Entry
from rabbet.registry.tamper import watch
from rabbet.registry.versions import through_adapter

__all__ = ["ask", "call", "expect", "load_entry", "resolve_value", "resolve_watched", "verify_class"]

logger = logging.getLogger(__name__)
_results: dict[tuple[str, str, str], type | PluginError] = {}


def load_entry(entry: Entry) -> type[Any]:
    """The class behind an entry.

    Raises:
        PluginLoadError: Naming owner, version, entry point and cause. The same one each time.
    """
    target = _class_of(entry)
    if entry.is_checked:
        target = checked(entry.kind, target)  # type: ignore[arg-type]  # classes are hashable
    return target


def _class_of(entry: Entry) -> type[Any]:
    if entry.record is not None:
        return verify_class(entry.kind, entry.name, entry.record.target, entry.contract)
    key = (entry.kind, entry.distribution, entry.value)
    if key not in _results:
        _results[key] = _load(entry)
    result = _results[key]
    if isinstance(result, PluginError):
        raise result
    return result


def _load(entry: Entry) -> type | PluginError:
    before = set(sys.modules)
    # Written before the import: if the process dies in it, this line says which plugin it was.
    logger.debug("loading %s/%s of %s", entry.kind, entry.name, entry.label)
    try:
        with watch(entry.label, entry.value):
            target = (
                load_entry_point(entry.entry_point) if entry.entry_point is not None else resolve_value(entry.value)
            )
        return verify_class(entry.kind, entry.name, target, entry.contract)
    except PluginError as error:
        return error
    except (Exception, SystemExit) as error:  # a plugin's import may raise anything
        for name in set(sys.modules) - before:
            if name.split(".")[0] == entry.value.split(".")[0].split(":")[0]:
                sys.modules.pop(name, None)
        failure = PluginLoadError(
            f"{entry.kind}/{entry.name} of {entry.label} failed to load ({entry.value}): {type(error).__name__}: {error}; "
            "reinstall or remove the distribution, and see: rabbet plugins doctor " + entry.name,
            kind=entry.kind,
            name=entry.name,
        )
        failure.__cause__ = error
        return failure


def ask(entry: Entry, method: str, query: Any, *, returns: Any = object, of: Any = object) -> Any:
    """``call`` for a class method of a plugin that is not chosen yet; one that fails is broken, as a failing import is."""
    return call(entry, method, getattr(load_entry(entry), method), query, returns=returns, of=of)


def call(
    owner: Entry | Decision,
    method: str,
    function: Any,
    *args: Any,
    returns: Any = object,
    of: Any = object,
    **named: Any,
) -> Any:
    """Call a plugin's ``function``; what it raises, and what it returns of another type than its contract says, is told.

    Args:
        owner: Whose it is.
        method: Its name, for messages.
        function: What is called.
        *args: For it.
        returns: Type or types that its answer may have.
        of: Type of the items of its answer.
        **named: For it.

    Raises:
        PluginLoadError: Naming kind, name, owner, version, method and cause. What the plugin raises of ``rabbet.errors``
            passes, and so does a lack of memory.
    """
    try:
        answer = function(*args, **named)
    except (Exception, SystemExit) as error:
        if isinstance(error, RabbetError) or lacks_memory(error):
            raise
        raise _fault(owner, f"failed in {method}(): {type(error).__name__}: {error}") from error
    return expect(owner, method, answer, returns, of)


def expect(owner: Entry | Decision, method: str, answer: Any, returns: Any, of: Any = object) -> Any:
    """The ``answer`` that a plugin's ``method`` gave; its errors, and the arguments, are those of ``call``."""
    if not isinstance(answer, returns) or (of is not object and not all(isinstance(item, of) for item in answer)):
        wanted = getattr(returns, "__name__", str(returns)) + (f" of {of.__name__}" if of is not object else "")
        raise _fault(owner, f"is broken: {method}() returned {shorten(answer)}, but must return {wanted}")
    return answer


def _fault(owner: Entry | Decision, told: str) -> PluginLoadError:
    text = f"{owner.kind}/{owner.name} of {owner.label} {told}; upgrade or remove the distribution"
    return PluginLoadError(text, kind=owner.kind, name=owner.name)


def resolve_value(value: str) -> Any:
    """Import ``module:qualname``."""
    module_name, _, qualname = value.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def resolve_watched(owner: str, value: str) -> Any:
    """The same; a first import is watched for what it changes of core."""
    if value.partition(":")[0] in sys.modules:
        return resolve_value(value)
    with watch(owner, value):
        return resolve_value(value)


def verify_class(kind: str, name: str, target: Any, contract: str = "") -> type[Any]:
    """Check base class, decorator, missing methods and call shapes; a class of an earlier ``contract`` is adapted first.

    Raises:
        PluginLoadError: Saying what the class lacks and in which contract it stands.
    """
    label = f"{kind}/{name} ({getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', target)})"

    def fail(problem: str) -> PluginLoadError:
        return PluginLoadError(f"{label} {problem}", kind=kind, name=name)

    if not isinstance(target, type):
        raise fail("is no class")
    base = resolve_value(KINDS[kind].base)
    if not issubclass(target, base):
        raise fail(f"does not derive from {KINDS[kind].base.replace(':', '.')}")
    # A class that is named by its path needs no name of its own.
    if ":" not in name and not any(record.kind == kind for record in registrations_of(target)):
        raise fail("lacks the decorator of its kind (rabbet.contracts.register_...), or another class carries it")
    if contract in KINDS[kind].previous:
        target = through_adapter(kind, contract, target)
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if missing:
        raise fail(f"lacks {', '.join(missing)}, which the contract {kind} {KINDS[kind].version} asks for")
    for method in sorted(getattr(base, "__abstractmethods__", ())):
        problem = _call_shape_problem(getattr(base, method), getattr(target, method))
        if problem:
            raise fail(f"has {method}{problem}")
    verified: type[Any] = target
    return verified


def _call_shape_problem(contract: Any, method: Any) -> str:
    """Why ``method`` cannot be called as the contract calls its own, or an empty string."""
    if not callable(contract) or not callable(method):
        return ""
    try:
        wanted, have = inspect.signature(contract), inspect.signature(method)
        positional = [
            object()
            for parameter in wanted.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        ]
        keywords = {
            parameter.name: object()
            for parameter in wanted.parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        have.bind(*positional, **keywords)
    except TypeError as error:
        return f"{inspect.signature(method)}, but the contract calls it as {inspect.signature(contract)}: {error}"
    except ValueError:
        return ""
    return ""
