"""Contracts stay small, typed and documented; every kind of the table has one."""

from __future__ import annotations

import importlib
import inspect

import pytest

from rabbet.contracts import CONTRACT_VERSIONS, KINDS, Kind

MAX_ABSTRACT_METHODS = 8
MAX_PARAMETERS = 7


def contract(kind: Kind) -> type:
    module, name = kind.base.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_contract_has_few_abstract_methods(kind: Kind) -> None:
    assert len(getattr(contract(kind), "__abstractmethods__", ())) <= MAX_ABSTRACT_METHODS


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_contract_methods_are_documented_typed_and_narrow(kind: Kind) -> None:
    base = contract(kind)
    assert (base.__doc__ or "").strip()
    for name, member in vars(base).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        assert (function.__doc__ or "").strip(), f"{kind.name}.{name} has no docstring"
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
        assert len(parameters) <= MAX_PARAMETERS, f"{kind.name}.{name} takes {len(parameters)} parameters"
        untyped = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
        assert not untyped, f"{kind.name}.{name}: {untyped} have no type"
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty, f"{kind.name}.{name}"


def test_every_kind_has_a_version_and_a_decorator() -> None:
    import rabbet.contracts as contracts

    assert set(CONTRACT_VERSIONS) == set(KINDS)
    decorators = [name for name in contracts.__all__ if name.startswith("register_")]
    assert len(decorators) == len(KINDS)
