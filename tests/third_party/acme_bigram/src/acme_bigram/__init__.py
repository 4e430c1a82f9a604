"""Drafts what followed each pair of tokens the last time that the request had it; an index per request, which grows with it."""

from rabbet.contracts import Refusal, register_proposer
from rabbet.contracts.proposer import DraftResult, Proposer


class _Index:
    def __init__(self):
        self.tokens, self.after = [], {}

    def follow(self, tokens):
        if tokens[: len(self.tokens)] != self.tokens:
            # Another request of that name, or drafts that were taken back.
            self.tokens, self.after = [], {}
        for place in range(max(2, len(self.tokens)), len(tokens)):
            self.after[tokens[place - 2], tokens[place - 1]] = tokens[place]
        self.tokens = tokens

    def drafts(self, most):
        pair, found = tuple(self.tokens[-2:]), []
        while len(found) < most and pair in self.after:
            found.append(self.after[pair])
            pair = (pair[1], found[-1])
        return found


@register_proposer("acme_bigram")
class Bigram(Proposer):
    def __init__(self, context):
        super().__init__(context)
        self.indices = {}

    @classmethod
    def supports(cls, query):
        if query.is_async:
            return (Refusal(code="ASYNC", message="acme_bigram reads tokens on the host", fix="--no-async-scheduling"),)
        return ()

    def propose(self, batch):
        for name in batch.finished_request_ids:
            self.indices.pop(name, None)
        drafts = []
        for name, tokens, count, most in zip(batch.request_ids, batch.token_ids, batch.num_tokens, batch.max_drafts, strict=True):
            index = self.indices.setdefault(name, _Index())
            index.follow(list(tokens[:count]))
            drafts.append(index.drafts(most))
        return DraftResult(token_ids=drafts)
