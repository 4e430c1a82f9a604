"""Proposers for tests: a toy head over hidden states, and one that follows a script."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rabbet.contracts import Refusal, register_proposer
from rabbet.contracts.proposer import DraftBatch, DraftResult, Proposer, ProposerContext, ProposerQuery
from rabbet_sdk.strict import seal

__all__ = ["HEAD_VOCABULARY", "HeadProposer", "ScriptedProposer"]

HEAD_VOCABULARY = 48
"""Tokens that the toy head knows."""


@register_proposer("strict_head")
@seal
class HeadProposer(Proposer):
    """Drafts from the target's hidden states, as EAGLE and MTP heads do: a recurrent head with weights of its own.

    It draws each draft at the request's temperature and reports the distribution that it drew from. Draws depend on the
    request's seed and on the token's position only, so that all ranks draw the same. N is the width of hidden states,
    taken from the first batch, V ``HEAD_VOCABULARY``.
    """

    needs_hidden_states = True

    @classmethod
    def supports(cls, query: ProposerQuery) -> tuple[Refusal, ...]:
        """Only for targets with the head's own vocabulary."""
        if query.vocab_size != HEAD_VOCABULARY:
            message = f"the head knows {HEAD_VOCABULARY} tokens and the target {query.vocab_size}; use a matching head"
            return (Refusal(code="VOCABULARY", message=message),)
        return ()

    def load(self) -> None:
        """Weights from a seed, in place of a checkpoint."""
        generator = torch.Generator().manual_seed(7)
        self.embedding_VV = torch.randn(HEAD_VOCABULARY, HEAD_VOCABULARY, generator=generator)

    def propose(self, batch: DraftBatch) -> DraftResult:
        """Device ids [B, k] with their distributions [B, k, V], k the most drafts that a row wants."""
        assert batch.hidden_states is not None and batch.last_token_index is not None
        most = max(batch.max_drafts, default=0)
        count = len(batch.request_ids)
        ids = torch.full((count, most), -1, dtype=torch.int64)
        q = torch.zeros(count, most, HEAD_VOCABULARY)
        for row in range(count):
            state = self.scores(batch, row)
            for step in range(batch.max_drafts[row]):
                q[row, step] = self.distribution(state, batch.sampling[row].temperature)
                ids[row, step] = self.draw(q[row, step], batch.sampling[row].seed, batch.num_tokens[row] + step)
                state = state / 2 + self.embedding_VV[ids[row, step]]
        return DraftResult(device_token_ids=ids, probabilities=q)

    def scores(self, batch: DraftBatch, row: int) -> torch.Tensor:
        """Logits [V] from the hidden state of the row's last accepted token."""
        assert batch.hidden_states is not None and batch.last_token_index is not None
        hidden = batch.hidden_states[batch.last_token_index[row]].float()
        scores: torch.Tensor = hidden @ self.embedding_VV[: hidden.shape[0]] / 4
        return scores

    def distribution(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """What is drawn from [V]; all weight on one token for greedy requests."""
        if temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(), HEAD_VOCABULARY).float()
        return torch.softmax(logits / temperature, dim=-1)

    def draw(self, q: torch.Tensor, seed: int, position: int) -> int:
        """A token from q [V], the same on each rank."""
        number = random.Random(f"{seed}/{position}").random()
        cumulative = q.double().cumsum(0)
        index = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
        return min(index, int(q.nonzero().max()))


@register_proposer("scripted")
class ScriptedProposer(Proposer):
    """Drafts what ``script`` says: request id to the tokens that it expects after the prompt, from its first output.

    A verifier is tested with it: always right, always wrong, wrong ``q``. Set ``script``, ``prompt_lengths`` and
    ``probabilities`` on the instance.
    """

    @classmethod
    def supports(cls, query: ProposerQuery) -> tuple[Refusal, ...]:
        """Everything."""
        return ()

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        self.script: Mapping[str, Sequence[int]] = {}
        self.prompt_lengths: Mapping[str, int] = {}
        self.probabilities: Any = None
        self.seen: list[tuple[str, int]] = []

    def propose(self, batch: DraftBatch) -> DraftResult:
        """The next tokens of each request's script; ``probabilities`` as set (float32 [B, k, V] or None)."""
        drafts = []
        for name, count, most in zip(batch.request_ids, batch.num_tokens, batch.max_drafts, strict=True):
            start = count - self.prompt_lengths.get(name, 0)
            self.seen.append((name, count))
            drafts.append(list(self.script.get(name, ()))[start : start + most])
        return DraftResult(token_ids=drafts, probabilities=self.probabilities)
