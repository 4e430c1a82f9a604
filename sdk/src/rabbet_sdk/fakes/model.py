"""Small models for engines in tests: one that says what the test says, and one with random weights.

Both are found by the name of their architecture as soon as this module is imported, in worker processes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from rabbet.contracts import Refusal, register_model
from rabbet.contracts.model import Model, ModelQuery
from rabbet.layers import Attention, BuildContext
from rabbet.weights import WeightRules
from rabbet_sdk.strict.model import StrictForCausalLM

__all__ = [
    "END",
    "UNSCRIPTED",
    "VOCABULARY",
    "ScriptedForCausalLM",
    "TinyForCausalLM",
    "scripted_config",
    "tiny_config",
]

VOCABULARY = 64
END, UNSCRIPTED = 0, 1
"""What the scripted model says after the end of a script, and where no script holds what stands before."""
_DIM = 16
_MAX_LEN = 512
_HEADS = 2
_COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": _MAX_LEN, "dtype": "float32", "eos_token_id": END}


def scripted_config(script: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """config.json of a model that answers each (prompt, output) of ``script``; ids from 2 to ``VOCABULARY`` - 1."""
    return _COMMON | {
        "architectures": ["ScriptedForCausalLM"], "hidden_size": _DIM * _HEADS, "num_attention_heads": _HEADS,
        "script": [[list(prompt), list(output)] for prompt, output in script],
    }  # fmt: skip


def tiny_config() -> dict[str, Any]:
    """config.json of a small decoder; with the weights format ``dummy`` it has the same random weights everywhere."""
    return _COMMON | {
        "architectures": ["TinyForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip


@register_model("TinyForCausalLM")
class TinyForCausalLM(StrictForCausalLM):
    """The strict twin under a name of its own."""


@register_model("ScriptedForCausalLM")
class ScriptedForCausalLM(nn.Module, Model):
    """Looks up what stands before a token, through its KV cache: who loses, mixes up or repeats a block changes its answer.

    All keys are equal, so that attention takes the mean of the values of a prefix; a value is a random vector of token
    and position. The mean times its length is told apart from that of any other prefix. D is the head size.
    """

    is_capturable: ClassVar[bool] = False

    @classmethod
    def supports(cls, query: ModelQuery) -> tuple[Refusal, ...]:
        """One head a rank at least."""
        if _HEADS % query.tensor_parallel_size:
            return (Refusal(code="RANKS", message=f"{query.tensor_parallel_size} ranks for {_HEADS} heads"),)
        return ()

    def __init__(self, *, config: Any, context: BuildContext) -> None:
        super().__init__()
        self.parallel, self.num_heads = context.parallel, _HEADS // context.parallel.tp_size
        self.attention = Attention(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=_DIM, scale=1.0, context=context,
            prefix="layers.0.attn",
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        noise_ND = torch.randn(VOCABULARY + _MAX_LEN, _DIM, generator=generator, device="cpu")
        tokens_VD, places_PD = noise_ND[:VOCABULARY], noise_ND[VOCABULARY:]
        table = _next_tokens(config.script)
        digests = [(tokens_VD[list(known)] * places_PD[: len(known)]).sum(0) for known in table]
        device = context.device
        self.tokens_VD, self.places_PD = tokens_VD.to(device), places_PD.to(device)
        self.digests_SD = torch.stack(digests).to(device)
        self.answers_S = torch.tensor([*table.values()], device=device)
        # The loader wants something to fill.
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Digests [T, D] of what stands before and at each token."""
        assert input_ids is not None
        value_TD = self.tokens_VD[input_ids % VOCABULARY] * self.places_PD[positions % _MAX_LEN]
        value_TN = value_TD.repeat(1, self.num_heads)
        zeros_TN = torch.zeros_like(value_TN)
        mean_TN: torch.Tensor = self.attention(zeros_TN, zeros_TN, value_TN)
        mean_TD = mean_TN.view(-1, self.num_heads, _DIM).sum(1)
        return self.parallel.all_reduce(mean_TD) / _HEADS * (positions + 1).unsqueeze(1)

    def compute_logits(self, hidden_TN: torch.Tensor) -> torch.Tensor:
        """All weight on one token."""
        distance_TS = torch.cdist(hidden_TN.float(), self.digests_SD, compute_mode="donot_use_mm_for_euclid_dist")
        nearest_T, index_T = distance_TS.min(dim=1)
        answers_T = torch.where(nearest_T < 0.05, self.answers_S[index_T], UNSCRIPTED)
        return nn.functional.one_hot(answers_T, VOCABULARY).float() * 50

    @classmethod
    def weight_rules(cls, config: Any) -> WeightRules:
        """Nothing is stored."""
        return WeightRules()


def _next_tokens(script: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Mapping[tuple[int, ...], int]:
    """Each prefix to the token after it; what an output says goes before what stands in the middle of a prompt.

    Raises:
        ValueError: If two outputs differ after the same tokens.
    """
    inner: dict[tuple[int, ...], int] = {}
    outputs: dict[tuple[int, ...], int] = {}
    for prompt, output in script:
        whole = [*prompt, *output, END]
        for end in range(1, len(prompt)):
            inner[tuple(whole[:end])] = whole[end]
        for end in range(len(prompt), len(whole)):
            if outputs.setdefault(tuple(whole[:end]), whole[end]) != whole[end]:
                raise ValueError(f"two outputs of the script differ after {whole[:end]}")
    return inner | outputs
