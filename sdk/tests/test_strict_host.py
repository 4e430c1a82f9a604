"""A host that offers nothing but the contracts: what reaches further is found, whatever way it is written."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable

import pytest
from rabbet_sdk.strict import OutsideContract, seal
from rabbet_sdk.strict.host import PUBLIC, strict_host

Write = Callable[..., str]
ALLOWED = """
import json
import rabbet.contracts
import rabbet.types.plan as plan
from rabbet.contracts import Refusal
from rabbet import errors
from rabbet.errors import RabbetError
from . import other
"""


@pytest.fixture
def package(fake_dist: Write) -> Callable[[str], str]:
    """Writes a package with one module, and gives the module's name."""
    made: list[str] = []

    def write(source: str) -> str:
        made.append(f"acme-host-{len(made)}")
        return fake_dist(made[-1], provides={}, modules={"plugin.py": source, "other.py": ""}) + ".plugin"

    return write


def test_public_packages_and_all_others_are_there(package: Callable[[str], str]) -> None:
    name = package(ALLOWED)
    with strict_host(name.partition(".")[0]):
        assert importlib.import_module(name).Refusal.__name__ == "Refusal"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import rabbet.sched.queue", "imports rabbet.sched.queue"), ("from rabbet import config", "imports rabbet.config"),
        ("import rabbet.kv as contracts", "imports rabbet.kv"), ("from rabbet.engine import core", "imports rabbet.engine"),
        ("import rabbet", "imports rabbet;"), ("from rabbet.registry.catalog import Catalog", "imports rabbet.registry.catalog"),
        ("def load():\n    import rabbet.front\nload()", "imports rabbet.front"),
    ],
    ids=lambda text: text.split("\n")[0],
)  # fmt: skip
def test_what_reaches_further_is_refused_with_who_and_what(
    source: str, told: str, package: Callable[[str], str]
) -> None:
    name = package(source)
    own = name.partition(".")[0]
    with strict_host(own), pytest.raises(OutsideContract) as caught:
        importlib.import_module(name)
    assert f"{name} {told}" in str(caught.value) and "contracts" in str(caught.value)


def test_it_can_be_told_instead(package: Callable[[str], str]) -> None:
    found: list[str] = []
    name = package("from rabbet import _util, kv\nimport rabbet.contracts")
    with strict_host(name.partition(".")[0], found):
        importlib.import_module(name)
    assert [text.split(";")[0] for text in found] == [f"{name} imports rabbet._util", f"{name} imports rabbet.kv"]


def test_others_are_not_held_to_it_and_it_ends(package: Callable[[str], str]) -> None:
    other = package("import rabbet.sched.queue")
    before = builtins.__import__
    with strict_host("acme_somebody_else"):
        importlib.import_module(other)
    assert builtins.__import__ is before
    with pytest.raises(OutsideContract), strict_host("acme"):
        raise OutsideContract("of the block")
    assert builtins.__import__ is before


def test_the_public_packages_are_those_of_the_architecture() -> None:
    for name in PUBLIC:
        importlib.import_module(f"rabbet.{name}")


def test_a_sealed_object_refuses_what_is_not_there_and_lets_python_ask() -> None:
    @seal
    class Sealed:
        known = 1

    sealed = Sealed()
    assert sealed.known == 1 and not hasattr(sealed, "__fspath__")
    with pytest.raises(OutsideContract, match="Sealed.supports_speed is no part"):
        hasattr(sealed, "supports_speed")
