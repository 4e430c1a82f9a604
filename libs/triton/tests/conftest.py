"""Where there is no GPU, kernels run in Triton's interpreter; whoever imports Triton first decides that for the process."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
