"""What the documents show works as it stands: code is pasted and run, links lead somewhere, options exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rabbet import LLM, SamplingParams
from rabbet.config.flags import ALIASES, SHORT, fields

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("libs/*/*.md"),
        *ROOT.glob("plugins/*/*.md"),
        *ROOT.glob("sdk/*.md"),
    )
    if "build" not in path.parts
)
COMMAND = str(Path(sys.executable).with_name("rabbet"))


def blocks(page: str, language: str = "") -> list[str]:
    """Code of a page's fenced blocks of one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for kind, code in found if kind == language]


def named(page: str, language: str, name: str) -> str:
    """The block whose first line is ``# name``."""
    (found,) = [code for code in blocks(page, language) if code.startswith(f"# {name}\n")]
    return found


def answer(model: Path, **options: Any) -> list[int]:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(model), max_model_len=64, dtype="float32", load_format="safetensors", **options) as llm:
        return llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids


def test_the_plugin_of_the_page_serves_from_its_file(
    serve: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    import httpx

    (tmp_path / "backend.py").write_text(named("docs/plugins.md", "python", "backend.py"))
    (line,) = [block.strip() for block in blocks("docs/plugins.md") if block.startswith("rabbet serve MODEL --dtype")]
    options = line.removeprefix("rabbet serve MODEL ").replace("./backend.py", str(tmp_path / "backend.py")).split()
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    server = serve(*options, model=str(tiny_model))
    assert server.process.poll() is None, server.log.read_text()
    got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["token_ids"]
    assert server.stop() == 0
    assert got == answer(tiny_model, engine_process=False)


def test_the_plugin_of_the_page_is_a_distribution(tmp_path: Path, tiny_model: Path) -> None:
    source, site = tmp_path / "my-linear", tmp_path / "site"
    package = source / "src/my_linear"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "backend.py").write_text(named("docs/plugins.md", "python", "backend.py"))
    (package / "rabbet.toml").write_text(named("docs/plugins.md", "toml", "rabbet.toml"))
    (source / "pyproject.toml").write_text(named("docs/plugins.md", "toml", "pyproject.toml"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(site), str(source)], check=True, timeout=120)
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))

    def ask(*words: str) -> str:
        done = subprocess.run(
            [COMMAND, *words], capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = ask("plugins", "list", "--kind", "linear")
    assert re.search(r"linear +mine +my-linear +0\.1\.0 .* compatible", listed), listed
    assert re.search(r"linear +mine +my-linear +ok", ask("plugins", "doctor", "mine"))
    chosen = ask(
        "plugins", "why", "linear", "--model", str(tiny_model), "--dtype", "float32", "--linear-backend", "mine"
    )
    assert "mine" in chosen.splitlines()[0], chosen


def test_the_readmes_script_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("README.md", "python")
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.strip()) > 3


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        # The site has pages and files, and no folders.
        assert found.is_file(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_files_that_the_trip_of_a_request_names_are_there() -> None:
    core, page = ROOT / "core/src/rabbet", (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`(\w+/\w+\.py)`", page))
    assert len(files) > 20 and not sorted(file for file in files if not (core / file).is_file())
    packages = {path.name for path in core.iterdir() if (path / "__init__.py").is_file() and path.name[0] != "_"}
    assert packages == set(re.findall(r"`(\w+)/`", page.partition("## Packages")[2]))


OTHER_PROGRAMS = re.compile(r"^\s*(pip|python3?|curl|bash|git|ruff|vllm|llama|numactl|docker|mypy)\b")


def flags_of_commands() -> set[str]:
    """Long options that the subcommands have, as their help says."""
    from rabbet_sdk.cli import app as sdk
    from typer.main import get_command

    from rabbet.cli.main import app

    found: set[str] = set()

    def collect(command: Any) -> None:
        for parameter in command.params:
            found.update(name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
        for inner in getattr(command, "commands", {}).values():
            collect(inner)

    collect(get_command(app))
    collect(get_command(sdk))
    return found


def test_options_that_pages_show_exist() -> None:
    names = {f"--{flag.name}" for flag in fields().values()} | {f"--{alias}" for alias in ALIASES} | set(SHORT)
    names |= {f"--no-{name[2:]}" for name in names if name.startswith("--")} | flags_of_commands()
    names |= {"--help", "--config", "--keep"}
    wrong = []
    for page in ("README.md", "docs/plugins.md", "docs/serving.md", "docs/architecture.md", "CHANGELOG.md"):
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            if OTHER_PROGRAMS.match(line):
                continue
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w*-])", line):
                if flag not in names:
                    wrong.append(f"{page}: {flag}")
    assert not wrong
