"""The kernels as they are launched; imported where a device is about to be used."""

from __future__ import annotations

from rabbet_triton.launch import Kernel, dependence

from rabbet_attention_triton.kernels import chunk_kernel, decode_kernel, store_kernel

__all__ = ["chunk", "decode", "dependence", "store"]

store, decode, chunk = Kernel(store_kernel), Kernel(decode_kernel), Kernel(chunk_kernel)
