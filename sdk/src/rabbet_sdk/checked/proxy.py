"""Builds the subclass that checks: one wrapper around each method of a contract, and rules around some of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from rabbet.contracts.support import Refusal
from rabbet.errors import PluginError, RabbetError
from rabbet_sdk.checked.hints import hints_of, mismatch

__all__ = ["Call", "ContractViolation", "Rule", "State", "checked_subclass", "rule"]

Rule = Callable[["Call"], Generator[None, Any, Any]]
"""Runs up to its ``yield`` before the call and gets the result there; what it returns, if not None, replaces it."""
_RULES: dict[tuple[str, str], Rule] = {}
_STATE = "_rabbet_checked_state"

_BEFORE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "AttentionBackend": {"forward": ("build_metadata",)},
    "ConnectorWorker": {"start_step": ("register",), "finish_step": ("register",)},
    "Executor": {
        "profile_memory": ("load",), "initialize_cache": ("load",), "execute": ("load", "initialize_cache"),
    },
    "LinearBackend": {"apply": ("pack",), "apply_gated_silu": ("pack",)},
    "MoEBackend": {"apply": ("pack",)},
    "Platform": {"memory": ("init_device",), "peak_activation_bytes": ("init_device",)},
    "Proposer": {"propose": ("load",)},
}  # fmt: skip
"""Methods that must have been called on the object before."""
_ONCE = {("ConnectorWorker", "register"), ("Executor", "load"), ("Platform", "init_device"), ("Proposer", "load")}
_LAST = {"close": True, "shutdown": True, "finish": False}
"""Methods after which nothing else is called, and whether they may be called again. ``finish`` without arguments only."""


class ContractViolation(PluginError):
    """A call broke a rule of its contract.

    Attributes:
        method: The method.
        rule: The rule's name.
    """

    def __init__(self, message: str, *, kind: str, name: str, method: str, rule: str) -> None:
        super().__init__(message, kind=kind, name=name)
        self.method = method
        self.rule = rule


@dataclass(slots=True)
class State:
    """What is known of one object: methods that were called, calls under way by thread, notes of the rules."""

    called: set[str] = field(default_factory=set)
    ended: str = ""
    inside: set[int] = field(default_factory=set)
    notes: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """One call.

    Attributes:
        label: ``kind/name`` of the plugin, and the class where it is another one.
        method: Name of the method.
        plugin: The object, or the class for class methods.
        arguments: By the contract's names; a rule may put others in their place.
        notes: What rules remember of the object.
        again: Calls the plugin's method once more.
    """

    label: str
    method: str
    plugin: Any
    arguments: dict[str, Any]
    notes: dict[Any, Any]
    again: Callable[[], Any]

    def require(self, is_kept: bool, rule: str, told: str) -> None:
        """The plugin must keep to ``rule``.

        Raises:
            ContractViolation: Naming plugin, method and rule.
        """
        if not is_kept:
            self.fail(rule, told)

    def expect(self, is_kept: bool, rule: str, told: str) -> None:
        """The same for the caller's side."""
        self.require(is_kept, rule, f"{told}; this is the caller's fault, not the plugin's")

    def fail(self, rule: str, told: str) -> NoReturn:
        """Raise ``ContractViolation``."""
        kind, _, name = self.label.partition(" ")[0].partition("/")
        message = f"{self.label} breaks the rule {rule!r} in {self.method}(): {told}"
        raise ContractViolation(message, kind=kind, name=name, method=self.method, rule=rule)


def rule(cls: str, *methods: str) -> Callable[[Rule], Rule]:
    """Register a rule for methods of a class of the contracts."""

    def register(function: Rule) -> Rule:
        _RULES.update({(cls, method): function for method in methods})
        return function

    return register


def checked_subclass(cls: type[Any], base: str, *, label: str) -> type[Any]:
    """A subclass of ``cls`` whose contract methods are checked.

    Args:
        cls: The plugin's class.
        base: ``module:Class`` of its contract.
        label: How messages name it.
    """
    from rabbet_sdk.checked import host_rules, tensor_rules  # noqa: F401 - they register their rules

    module, _, name = base.partition(":")
    contract = getattr(import_module(module), name)
    methods: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    for owner in [item for item in contract.__mro__ if item.__module__.startswith("rabbet.contracts")]:
        for key, member in vars(owner).items():
            if key not in methods and (key == "__init__" or not key.startswith("_")):
                if wrapped := _wrapped(cls, key, member, owner.__name__, label):
                    methods[key] = wrapped
    methods[_STATE] = State()
    # The decorator's record stands on exactly one class; this one stands for it.
    methods |= {key: value for key, value in vars(cls).items() if key == "__rabbet_registrations__"}
    made: type[Any] = type(cls).__call__(type(cls), cls.__name__, (cls,), methods)
    return made


def _wrapped(cls: type[Any], key: str, member: Any, owner: str, label: str) -> Any:
    """The checked form of one member, or None for what is no method."""
    if isinstance(member, classmethod):
        return classmethod(_method(member.__func__, cls, key, owner, label))
    return _method(member, cls, key, owner, label) if inspect.isfunction(member) else None


def _original(cls: type[Any], key: str, plugin: Any) -> Callable[..., Any]:
    """The plugin's own method, however it is declared, for an object or class of the checked form."""
    raw = inspect.getattr_static(cls, key)
    if isinstance(raw, classmethod):
        return functools.partial(raw.__func__, plugin if isinstance(plugin, type) else type(plugin))
    return functools.partial(raw, plugin) if inspect.isfunction(raw) else getattr(cls, key)


def _method(contract: Callable[..., Any], cls: type[Any], key: str, owner: str, label: str) -> Callable[..., Any]:
    signature = inspect.signature(contract)

    @functools.wraps(contract)
    def checked(plugin: Any, *args: Any, **named: Any) -> Any:
        state, original, thread = _state_of(plugin), _original(cls, key, plugin), threading.get_ident()
        if thread in state.inside:
            return original(*args, **named)  # the plugin's own use of its methods is its own affair
        try:
            bound = signature.bind(plugin, *args, **named)
        except TypeError as error:
            call = Call(label, key, plugin, {}, state.notes, lambda: None)
            call.expect(False, "arguments", str(error))
        own = next(iter(bound.arguments))
        bound.apply_defaults()

        def run() -> Any:
            return original(*bound.args[1:], **bound.kwargs)

        call = Call(label, key, plugin, bound.arguments, state.notes, run)
        _check_order(call, state, owner)
        hints = hints_of(contract)
        for name, value in bound.arguments.items():
            if name != own and (problem := mismatch(value, hints.get(name, Any), name)):
                call.expect(False, "argument types", problem)
        state.inside.add(thread)
        try:
            result = _guarded(call, run, owner)
        finally:
            state.inside.discard(thread)
        # ``hints`` again: the call may have brought in torch.
        if key != "__init__" and (problem := mismatch(result, hints_of(contract).get("return", Any), "the result")):
            call.fail("result type", problem)
        return _adopted(result, label)

    vars(checked).pop("__isabstractmethod__", None)
    return checked


def _guarded(call: Call, run: Callable[[], Any], owner: str) -> Any:
    """The call between the halves of its rule."""
    if call.method == "supports":
        return _supports(call, run)
    make = _RULES.get((owner, call.method))
    if make is None:
        return run()
    around = make(call)
    next(around)
    result = run()
    try:
        around.send(result)
    except StopIteration as stop:
        return result if stop.value is None else stop.value
    raise AssertionError(f"the rule of {owner}.{call.method} yields twice")


def _supports(call: Call, run: Callable[[], Any]) -> Any:
    answers = []
    for _ in range(2):
        try:
            answers.append(run())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the rule is that it raises nothing
            raised = error if isinstance(error, RabbetError) else f"{type(error).__name__}: {error}"
            call.fail("supports never raises", str(raised))
    call.require(answers[0] == answers[1], "supports is pure", "two equal queries, two answers")
    for item in answers[0] if isinstance(answers[0], tuple) else ():
        call.require(isinstance(item, Refusal) and bool(item.code and item.message), "refusals speak", repr(item))
    return answers[0]


def _check_order(call: Call, state: State, owner: str) -> None:
    key = call.method
    missing = [name for name in _BEFORE.get(owner, {}).get(key, ()) if name not in state.called]
    call.expect(not missing, "call order", f"called before {', '.join(missing)}")
    call.expect((owner, key) not in _ONCE or key not in state.called, "call order", "called twice")
    is_end = key in _LAST and not [name for name in call.arguments if name not in ("self", "cls")]
    if state.ended and not isinstance(call.plugin, type):
        is_again = key == state.ended and _LAST[key]
        call.expect(is_again, "call order", f"called after {state.ended}")
    state.called.add(key)
    if is_end:
        state.ended = key


def _state_of(plugin: Any) -> State:
    holder = plugin if isinstance(plugin, type) else vars(plugin)
    found = vars(plugin).get(_STATE)
    if found is None:
        found = State()
        if isinstance(holder, type):
            setattr(holder, _STATE, found)
        else:
            holder[_STATE] = found
    return found  # type: ignore[no-any-return]


def _adopted(result: Any, label: str) -> Any:
    """Objects of further contracts that a plugin makes (methods of layers, grammars, halves of connectors) are checked
    too: their class is exchanged for its checked form. What has no room for that stays as it is."""
    cls = type(result)
    contract = next((item for item in cls.__mro__ if item.__module__.startswith("rabbet.contracts")), None)
    if contract is None or hasattr(cls, _STATE) or not getattr(contract, "__abstractmethods__", None):
        return result
    key = (cls, label)
    if key not in _inner:
        base = f"{contract.__module__}:{contract.__name__}"
        _inner[key] = checked_subclass(cls, base, label=f"{label} {cls.__qualname__}")
    with contextlib.suppress(TypeError):  # another layout in memory
        result.__class__ = _inner[key]
    return result


_inner: dict[tuple[type[Any], str], type[Any]] = {}
