"""Generated pages are current."""

import subprocess
import sys

from source import ROOT


def test_contract_pages_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "contract_pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_of_options_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "option_pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_catalogue_and_its_page_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "catalog.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
