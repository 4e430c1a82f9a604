"""A grammar of choices: the output is one of a list of strings. Allowed tokens are found in a trie of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rabbet.contracts import Refusal, register_grammar
from rabbet.contracts.grammar import Grammar, GrammarBackend, GrammarContext, GrammarQuery
from rabbet.errors import InvalidRequestError
from rabbet.types.sampling import StructuredOutputsParams
from rabbet_sdk.strict import seal

__all__ = ["StrictGrammar"]


class _Choices(Grammar):
    """One request: the text after each accepted token, so that going back is dropping entries."""

    def __init__(self, choices: Sequence[str], backend: StrictGrammar) -> None:
        self.choices, self.backend, self.texts = tuple(choices), backend, [""]
        self.ends = frozenset(backend.context.end_token_ids)

    def follow(self, text: str, token: int) -> str | None:
        """The text with ``token``, or None where no choice begins like that."""
        if token in self.ends:
            return text if text in self.choices else None
        longer = text + self.backend.pieces.get(token, "")
        return longer if longer != text and any(choice.startswith(longer) for choice in self.choices) else None

    def count_accepted(self, token_ids: Sequence[int]) -> int:
        return len(self.walk(token_ids))

    def accept(self, token_ids: Sequence[int]) -> int:
        texts = self.walk(token_ids)
        self.texts += texts
        return len(texts)

    def walk(self, token_ids: Sequence[int]) -> list[str]:
        """Texts after each token of the longest prefix that is allowed."""
        texts: list[str] = []
        for token in token_ids:
            text = self.follow(texts[-1] if texts else self.texts[-1], token)
            if text is None:
                break
            texts.append(text)
        return texts

    def rollback(self, num_tokens: int) -> None:
        del self.texts[len(self.texts) - num_tokens :]

    def fill_bitmask(self, row: np.ndarray) -> None:
        row.fill(0)  # rows are used again: bits of another request may stand in them
        text = self.texts[-1]
        allowed = set(self.ends) if text in self.choices else set()
        for choice in self.choices:
            node = self.backend.trie if choice.startswith(text) else {}
            for letter in choice[len(text) :]:
                node = node.get(letter, {})
                allowed.update(node.get("", ()))
        for token in allowed:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    @property
    def is_terminated(self) -> bool:
        text = self.texts[-1]
        return text in self.choices and not any(c.startswith(text) and c != text for c in self.choices)


@register_grammar("strict")
@seal
class StrictGrammar(GrammarBackend):
    """Choices only."""

    @classmethod
    def supports(cls, query: GrammarQuery) -> tuple[Refusal, ...]:
        """One refusal for each kind of specification beside ``choice``."""
        others = sorted(query.kinds - {"choice"})
        return tuple(Refusal(code="KIND", message=f"{kind} is not supported; choice is") for kind in others)

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        vocabulary = range(min(context.vocab_size, len(context.tokenizer)))
        self.pieces = {i: context.tokenizer.decode([i]) for i in vocabulary if i not in context.end_token_ids}
        self.trie: dict[str, Any] = {}
        for token, piece in self.pieces.items():
            node = self.trie
            for letter in piece:
                node = node.setdefault(letter, {})
            if piece:  # a token without text would never come to an end
                node.setdefault("", []).append(token)

    def compile(self, spec: StructuredOutputsParams) -> Grammar:
        """A fresh state for ``spec.choice``."""
        if not spec.choice or not all(spec.choice):
            raise InvalidRequestError("choice needs one string or more, none empty", field="structured_outputs.choice")
        return _Choices(spec.choice, self)
