"""The standard suites; what needs a GPU is unavailable where there is none."""

from __future__ import annotations

import pytest
import torch
from rabbet_sdk.conformance import LinearConformance, PlatformConformance


class TestCudaPlatform(PlatformConformance):
    plugin = "platform/cuda"
    hidden = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter cuts bfloat16 off where a GPU rounds")
class TestCudaLinear(LinearConformance):
    plugin = "linear/cuda"
