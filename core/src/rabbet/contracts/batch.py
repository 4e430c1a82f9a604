"""What an attention backend is told about a step. One object for each cache group.

Shapes: T tokens, B requests, M blocks a request at most. A request's tokens stand together, in the order of the
block table's rows. There are no phases: a decode is a request with one query token, a chunk has several, a verify
row has its drafts.

    query_start   0        3    4              9          (B = 3, T = 9: a chunk of 3, a decode, a chunk of 5)
                  |--------|----|--------------|
    seq_lens      keys of each request after this step: computed before + its query tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """Where the tokens of one step stand, for the layers of one cache group.

    Attributes:
        num_requests: B. Rows past it in padded tensors are not real.
        num_tokens: T. Rows past it in padded tensors are not real; their slots are -1.
        max_query_len: Most query tokens of one request.
        max_seq_len: Longest context of one request, this step included.
        query_start: int32 [B + 1] on the device; tokens of request b are query_start[b] .. query_start[b + 1].
        query_start_cpu: The same on the host.
        seq_lens: int32 [B] on the device.
        seq_lens_cpu: The same on the host.
        positions: int64 [T] on the device: position of each token in its request.
        block_table: int32 [B, M] on the device: block of tokens m * block_size .. of request b. Entries that the
            request does not use (past its end, or left of a sliding window) are the null block or stale: never read them.
        slot_mapping: int64 [T] on the device: block * block_size + offset where the token's key and value go;
            -1 writes nothing.
        is_causal: Each token sees itself and what is before it; otherwise all of its request. Windows as in
            ``AttentionLayerSpec``.
        is_ragged: The step is being captured, and at each replay ``query_start`` holds what it holds then: the host knows
            nothing but bounds (``GraphSupport.RAGGED``). Tokens past ``query_start[B]`` belong to no request.
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start: torch.Tensor
    query_start_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    is_causal: bool = True
    is_ragged: bool = False
