"""A proposer by lookup: what followed the last time that the request's latest tokens stood in its own text."""

from __future__ import annotations

from collections.abc import Sequence

from rabbet.contracts import Refusal, register_proposer
from rabbet.contracts.proposer import DraftBatch, DraftResult, Proposer, ProposerQuery
from rabbet_sdk.strict import seal

__all__ = ["StrictProposer"]

_LONGEST = 3
"""Longest run of latest tokens that is looked for, in tokens."""


@register_proposer("strict")
@seal
class StrictProposer(Proposer):
    """n-gram lookup. Keeps no state: what it needs stands in each batch, so nothing can be left of a finished request."""

    @classmethod
    def supports(cls, query: ProposerQuery) -> tuple[Refusal, ...]:
        """Lookup reads tokens on the host, which a step that runs ahead of the host does not have."""
        if query.is_async:
            return (
                Refusal(code="ASYNC", message="lookup needs sampled tokens on the host", fix="--no-async-scheduling"),
            )
        return ()

    def propose(self, batch: DraftBatch) -> DraftResult:
        """Deterministic drafts; an empty list where nothing is found."""
        assert batch.token_ids is not None, "supports() refused asynchronous steps"
        rows = zip(batch.token_ids, batch.num_tokens, batch.max_drafts, strict=True)
        return DraftResult(token_ids=[self.look_up(tokens[:count], most) for tokens, count, most in rows])

    def look_up(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that followed the latest earlier place of the longest run."""
        for length in range(min(_LONGEST, len(tokens) - 1), 0, -1):
            run = list(tokens[-length:])
            # The latest place comes first: text that was written last predicts best.
            for start in range(len(tokens) - length - 1, -1, -1):
                if list(tokens[start : start + length]) == run:
                    return list(tokens[start + length : start + length + most])
        return []
