"""Proposer 1.0: the last token again."""

from rabbet.contracts import register_proposer
from rabbet.contracts.proposer import DraftResult, Proposer


@register_proposer("frozen_repeat")
class FrozenRepeat(Proposer):
    @classmethod
    def supports(cls, query):
        return ()

    def propose(self, batch):
        drafts = zip(batch.token_ids, batch.max_drafts, strict=True)
        return DraftResult(token_ids=[[ids[-1]] * count for ids, count in drafts])
