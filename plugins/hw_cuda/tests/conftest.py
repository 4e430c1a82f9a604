"""Where there is no GPU, the kernels run in Triton's interpreter, on small shapes."""

from __future__ import annotations

import os

import pytest
import torch

# Read when triton is imported, by the kernels' modules.
IS_INTERPRETED = not torch.cuda.is_available()
if IS_INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where tensors of the kernels live."""
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
