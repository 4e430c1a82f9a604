"""A tokenizer over a list of pieces, with the few methods of transformers' that plugins use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["PieceTokenizer"]


class PieceTokenizer:
    """Token i is the i-th piece; text is split greedily by the longest piece."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        """Piece to id."""
        return {piece: i for i, piece in enumerate(self.pieces)}

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The pieces of ``token_ids``, one after the other."""
        return "".join(self.pieces[i] for i in token_ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``; raises ValueError where no piece fits."""
        ids, at = [], 0
        while at < len(text):
            fitting = [i for i, piece in enumerate(self.pieces) if piece and text.startswith(piece, at)]
            if not fitting:
                raise ValueError(f"no piece for {text[at:]!r}")
            ids.append(max(fitting, key=lambda i: len(self.pieces[i])))
            at += len(self.pieces[ids[-1]])
        return ids
