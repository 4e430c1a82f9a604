"""Content hashes of full blocks: sha256 over the parent's hash, the tokens, and what else makes content differ."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

from rabbet.types.request import Request

__all__ = ["block_hash", "extend_hashes", "group_key", "random_seed"]


def random_seed() -> bytes:
    """A secret for one engine: hashes of two engines differ, so that nobody can prepare colliding prompts."""
    return secrets.token_bytes(32)


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of one block. ``extra`` is prefixed by its length, so that tokens cannot imitate it."""
    digest = hashlib.sha256(parent)
    digest.update(len(extra).to_bytes(4, "little"))
    digest.update(extra)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def extra_key(request: Request) -> bytes:
    """Salt and adapter, unambiguously: requests that differ in one never share a block. Chained through parents."""
    parts = (request.spec.cache_salt, request.spec.adapter)
    return b"".join(
        b"\0" if part is None else b"\1" + len(raw := part.encode()).to_bytes(4, "little") + raw for part in parts
    )


def extend_hashes(request: Request, unit: int, seed: bytes) -> None:
    """Bring ``request.block_hashes`` up to all full units of its known tokens. Each unit is hashed once."""
    hashes = request.block_hashes
    full = len(request.token_ids) // unit
    while len(hashes) < full:
        index = len(hashes)
        tokens = request.token_ids[index * unit : (index + 1) * unit]
        if index == 0:
            hashes.append(block_hash(seed, tokens, extra_key(request)))
        else:
            hashes.append(block_hash(hashes[-1], tokens))


def group_key(value: bytes, group_id: int) -> bytes:
    """The key of a block of one cache group."""
    return value + group_id.to_bytes(4, "little")
