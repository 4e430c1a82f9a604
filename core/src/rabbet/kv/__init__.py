"""KV cache bookkeeping: blocks, hashes, groups. No torch."""

from rabbet.kv.manager import BlockKVManager

__all__ = ["BlockKVManager"]
