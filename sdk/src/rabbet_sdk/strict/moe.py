"""Gated experts in plain torch, expert by expert.

Shapes: T tokens, I inputs, N inner size, X local experts, A experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rabbet.contracts import Refusal, register_moe_backend
from rabbet.contracts.linear import MoEBackend, MoEQuery
from rabbet_sdk.strict import seal

__all__ = ["StrictExperts"]

Packed = tuple[torch.Tensor, torch.Tensor]


@register_moe_backend("strict")
@seal
class StrictExperts(MoEBackend):
    """Products and sums in float32, rounded once."""

    @classmethod
    def supports(cls, query: MoEQuery) -> tuple[Refusal, ...]:
        """Refuse whatever would be computed wrongly, or not at all; any number of experts works, on any rank."""
        refusals = []
        if query.device_type != "cpu":
            refusals.append(Refusal(code="DEVICE", message=f"runs on cpu, not on {query.device_type}"))
        if query.dtype not in ("float32", "bfloat16"):
            refusals.append(Refusal(code="DTYPE", message=f"{query.dtype}; float32 and bfloat16 are supported"))
        if query.activation != "silu":
            refusals.append(Refusal(code="ACTIVATION", message=f"silu only, not {query.activation}"))
        if query.scheme != "none":
            refusals.append(Refusal(code="SCHEME", message=f"dense experts only, not {query.scheme}"))
        return tuple(refusals)

    def pack(self, gate_up_X2NI: torch.Tensor, down_XIN: torch.Tensor) -> Packed:
        """Copies in the order in which ``apply`` reads; the caller drops the originals, so memory does not double."""
        return gate_up_X2NI.detach().mT.contiguous(), down_XIN.detach().mT.contiguous()

    def apply(
        self,
        x_TI: torch.Tensor,
        packed: Packed,
        topk_weights_TA: torch.Tensor,
        topk_ids_TA: torch.Tensor,
        expert_map_X: torch.Tensor | None,
    ) -> torch.Tensor:
        """Each expert once, for the tokens that chose it."""
        gate_up_XI2N, down_XNI = packed
        # Global ids to this rank's: what is elsewhere becomes -1, which is no expert of the loop below.
        ids_TA = topk_ids_TA if expert_map_X is None else expert_map_X[topk_ids_TA.long()]
        # Zeros, not memory as it comes: a token may have no expert here.
        out_TI = torch.zeros(x_TI.shape, dtype=torch.float32, device=x_TI.device)
        for expert in range(len(down_XNI)):
            tokens, places = (ids_TA == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            gate, up = (x_TI[tokens].float() @ gate_up_XI2N[expert].float()).chunk(2, dim=-1)
            part = (F.silu(gate) * up) @ down_XNI[expert].float()
            # Adds up where a token is named twice.
            out_TI.index_add_(0, tokens, part * topk_weights_TA[tokens, places].unsqueeze(-1))
        return out_TI.to(x_TI.dtype)
