"""Faults of import, manifest and options, which the tests of every kind catch; planted in a logger and in a linear backend."""

from __future__ import annotations

from rabbet_sdk.mutants.base import Mutant

__all__ = ["LEVEL_ONE"]

_LOGGER = (
    "from rabbet.contracts import register_stat_logger\n{before}\n"
    "from rabbet_sdk.strict.stat_logger import StrictLogger\n\n\n"
    "@register_stat_logger({name!r})\nclass Plugin(StrictLogger):\n    pass\n"
)
_LINEAR = (
    _LOGGER.replace("stat_logger", "linear_backend")
    .replace("strict.linear_backend", "strict.linear")
    .replace("StrictLogger", "StrictLinear")
)
_MANIFEST = 'schema = 1\n[[provides]]\nkind = "stat_logger"\nname = "{name}"\ncontract = "{contract}"\nroles = ["front"]\n{more}\n'


def _plant(
    name: str, caught_by: str, story: str, before: str = "", *, template: str = _LOGGER, registered: str = "",
    contract: str = "", more: str = "", files: dict[str, str] | None = None,
) -> Mutant:  # fmt: skip
    manifest = _MANIFEST.format(name=name, contract=contract or ">=1.0,<2", more=more) if contract or more else None
    module = template.format(before=before, name=registered or name)
    return Mutant(
        name=name, caught_by=f"test_{caught_by}", story=story, modules={"plugin.py": module} | (files or {}), manifest=manifest
    )  # fmt: skip


_QUIET, _CORE, _MANIFESTED = (
    "import_is_quiet", "import_changes_nothing_of_core", "manifest_says_what_the_distribution_holds",
)  # fmt: skip
LEVEL_ONE: dict[str, tuple[Mutant, ...]] = {
    "stat_logger": (
        _plant("thread_at_import", _QUIET, "a fork keeps the lock, not the thread",
               "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='acme-flush').start()"),
        _plant("torch_in_front", _QUIET, "llm#732: every command of rabbet waits for torch", "import torch"),
        _plant("missing_module", _QUIET, "vllm-plugin-FL#195: a module that moved", "import rabbet.v0.attention"),
        _plant("ends_process", _QUIET, "a library that exits when it dislikes the machine", "import os\nos._exit(3)"),
        _plant("patches_function", _CORE, "edutelligence#862: a function of core replaced",
               "import rabbet.contracts.registration as core\ncore.normalise_name = lambda kind, name: name"),
        _plant("patches_method", _CORE, "sglang#21388: a method wrapped",
               "from rabbet.types.request import Request\nRequest.is_finished = property(lambda self: False)"),
        _plant("private_import", "import_reaches_no_private_part_of_core", "vllm#22082: broken by each refactoring",
               "from rabbet.sched.queue import *"),
        _plant("open_range", "contract_range_is_bounded", "crashes in a core that nobody has seen yet", contract=">=1.0"),
        _plant("second_table", _MANIFESTED, "a name without an entry point",
               more='[[provides]]\nkind = "stat_logger"\nname = "other"\ncontract = ">=1.0,<2"'),
        _plant("other_name", _MANIFESTED, "registered under an old name", registered="other_name_before"),
        _plant("any_option", "options_are_checked", "vllm#12432: a mistyped option changes nothing",
               more='options = "options.json"', files={"options.json": '{"type": "object"}'}),
    ),
    "linear": (
        _plant("cuda_at_import", _QUIET, "vllm-plugin-FL#215: no child can use the GPU after a fork",
               # What making a context leaves behind, on a machine that has none.
               "import torch\ntorch.cuda.is_initialized = lambda: True", template=_LINEAR),
        _plant("foreign_operator", "operators_stand_in_the_own_namespace", "vllm#52802: two owners of one operator",
               "import torch\nlibrary = torch.library.Library('vllm', 'DEF')\nlibrary.define('acme(Tensor x) -> Tensor')",
               template=_LINEAR),
    ),
}  # fmt: skip
"""By the kind that they are planted in."""
