"""What the suite learns of an import in a process of its own: changes of core, threads, operators; nothing of a quiet one."""

from __future__ import annotations

from collections.abc import Callable

from rabbet_sdk.conformance.subject import import_facts

LOUD = """
import threading
import rabbet.layers.reference as reference
import torch
from rabbet.contracts import register_linear_backend
from rabbet.contracts.linear import LinearBackend

reference.TorchLinearBackend.apply = lambda self, x, packed, bias=None: x
LinearBackend.extra = lambda self: None
torch.library.define("elsewhere_ns::twice", "(Tensor x) -> Tensor")
threading.Thread(target=threading.Event().wait, args=(2,), name="lingers").start()

@register_linear_backend("loud")
class Loud(reference.TorchLinearBackend):
    pass
"""
QUIET = """
from rabbet.contracts import register_linear_backend
from rabbet.layers.reference import TorchLinearBackend

@register_linear_backend("quiet")
class Quiet(TorchLinearBackend):
    pass
"""


def test_what_an_import_does_is_seen(fake_dist: Callable[..., str]) -> None:
    fake_dist("acme-loud", provides={"linear/loud": "acme_loud.plugin:Loud"}, modules={"plugin.py": LOUD})
    facts = import_facts("linear/loud")
    assert not facts.error
    assert "rabbet.layers.reference:TorchLinearBackend.apply" in facts.patched
    assert "rabbet.contracts.linear:LinearBackend.extra" in facts.patched
    assert facts.threads == ("lingers",)
    assert "elsewhere_ns::twice" in facts.ops


def test_a_quiet_import_leaves_no_trace(fake_dist: Callable[..., str]) -> None:
    fake_dist("acme-quiet", provides={"linear/quiet": "acme_quiet.plugin:Quiet"}, modules={"plugin.py": QUIET})
    facts = import_facts("linear/quiet")
    assert (facts.error, facts.patched, facts.threads, facts.ops, facts.has_cuda) == ("", (), (), (), False)
    assert "acme_quiet.plugin" in facts.modules


def test_a_broken_import_is_an_error(fake_dist: Callable[..., str]) -> None:
    fake_dist(
        "acme-bad", provides={"linear/bad": "acme_bad.plugin:Bad"}, modules={"plugin.py": "raise OSError('no libfoo')"}
    )
    assert "no libfoo" in import_facts("linear/bad").error
