"""The kernels as they are launched; imported where a device is about to be used."""

from __future__ import annotations

from rabbet_attention_triton.kernels import chunk_kernel, decode_kernel, store_kernel
from rabbet_attention_triton.launch import Kernel, dependence

__all__ = ["chunk", "decode", "dependence", "store"]

store, decode, chunk = Kernel(store_kernel), Kernel(decode_kernel), Kernel(chunk_kernel)
