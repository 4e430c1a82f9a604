"""Who may import whom, and who may not see torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from source import CORE, ROOT, core_files, imports, lib_roots, plugin_files, plugin_roots, tree

FIRST_LINE = {"errors", "_util", "types", "contracts", "registry", "config", "metrics"}
ALLOWED = {
    "errors": set(),
    "_util": set(),
    "types": {"errors", "_util"},
    "contracts": {"errors", "_util", "types"},
    "registry": {"errors", "_util", "types", "contracts"},
    "config": {"errors", "_util", "types", "contracts", "registry"},
    "metrics": {"errors", "_util", "types", "contracts", "config"},
    "kv": FIRST_LINE,
    "sched": FIRST_LINE | {"kv"},
    "parallel": FIRST_LINE - {"registry", "config", "metrics"},
    "layers": (FIRST_LINE - {"registry", "config", "metrics"}) | {"parallel"},
    "weights": (FIRST_LINE - {"registry", "config", "metrics"}) | {"parallel", "layers"},
    "runner": FIRST_LINE | {"parallel", "layers", "weights"},
    "worker": FIRST_LINE | {"parallel", "layers", "weights", "runner"},
    "engine": FIRST_LINE | {"kv", "sched", "worker"},
    "front": FIRST_LINE | {"engine"},
    "server": FIRST_LINE | {"front"},
    "cli": FIRST_LINE | {"front", "server"},
}
"""Package to the packages that it may import at run time, besides itself."""

TORCH_FREE = ("types", "kv", "sched", "front", "server", "cli", "registry", "config", "metrics", "contracts", "engine")
PUBLIC = ("contracts", "types", "errors", "layers", "parallel", "weights")
"""What a plugin may import of core."""

FRONT_MODULES = {"engine.client", "engine.messages"}


def package(path: Path) -> str:
    parts = path.relative_to(CORE).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(CORE)))
def test_core_imports_only_what_stands_left_of_it(path: Path) -> None:
    own = package(path)
    if own in ("__init__", "__main__"):
        return
    wrong = []
    for module, line, typing_only in imports(path):
        if not module.startswith("rabbet.") or typing_only:
            continue
        target = module.split(".")[1]
        if target != own and target not in ALLOWED[own] and not target.startswith("__"):
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong


def test_every_package_has_a_rule() -> None:
    assert {package(path) for path in core_files()} - {"__init__", "__main__"} <= set(ALLOWED)


def test_torch_free_packages_import_torch_for_typing_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in core_files()
        if package(path) in TORCH_FREE
        for module, line, typing_only in imports(path)
        if module.split(".")[0] == "torch" and not typing_only
    ]
    assert not wrong


def test_core_names_no_plugin() -> None:
    """No module, string or name in core mentions a plugin's import name or distribution."""
    import ast

    wrong = []
    names = [root.name for root in lib_roots() + plugin_roots()]
    forbidden = {f"rabbet_{name}" for name in names} | {f"rabbet-{name.replace('_', '-')}" for name in names}
    for path in core_files():
        for node in ast.walk(tree(path)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in forbidden if name in text]
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {module}"
            for module, line, _ in imports(path)
            if module.split(".")[0].startswith("rabbet_")
        ]
    assert not wrong


@pytest.mark.parametrize("root", plugin_roots(), ids=lambda root: root.name)
def test_plugin_imports_the_public_surface_only(root: Path) -> None:
    own = {f"rabbet_{one.name}" for one in (root, *lib_roots())}
    wrong = []
    for path in plugin_files(root):
        for module, line, _ in imports(path):
            top = module.split(".")[0]
            if top.startswith("rabbet_") and top not in own:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports another plugin: {module}")
            if top == "rabbet" and module.split(".")[1] not in PUBLIC:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong


@pytest.mark.parametrize("root", lib_roots(), ids=lambda root: root.name)
def test_a_library_of_plugins_knows_nothing_of_rabbet_and_is_none(root: Path) -> None:
    tops = {module.split(".")[0] for path in plugin_files(root) for module, _, _ in imports(path)}
    assert not {top for top in tops if top == "rabbet" or top.startswith("rabbet_")} - {f"rabbet_{root.name}"}
    assert "entry-points" not in (root / "pyproject.toml").read_text(encoding="utf-8")


def test_only_the_registry_reads_entry_points() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in core_files()
        if package(path) != "registry" and "entry_points(" in path.read_text(encoding="utf-8")
    ]
    assert not wrong


def test_only_config_reads_the_environment() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in core_files()
        if path != CORE / "config" / "load.py"
        and any(word in path.read_text(encoding="utf-8") for word in ("os.environ[", "os.environ.get(", "os.getenv("))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    ["rabbet", "rabbet.contracts", "rabbet.front", "rabbet.server.app", "rabbet.sched.scheduler", "rabbet.cli.main"],
)
def test_importing_a_light_module_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_dangerous_calls() -> None:
    """No pickle, marshal, eval or exec in core and in the bundled plugins."""
    import ast

    wrong = []
    for path in core_files() + [file for root in lib_roots() + plugin_roots() for file in plugin_files(root)]:
        for module, line, _ in imports(path):
            if module.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("eval", "exec", "compile") or name.endswith(("recv_pyobj", "send_pyobj", "torch.load")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {name}")
    assert not wrong
