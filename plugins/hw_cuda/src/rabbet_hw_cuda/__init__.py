"""NVIDIA GPUs as a hardware platform."""
