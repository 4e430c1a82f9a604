"""Token counts of answers."""

from __future__ import annotations

from typing import Any

__all__ = ["usage"]


def usage(num_prompt: int, num_output: int, *, num_cached: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object; cached tokens only where the server reports them."""
    value: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    if num_cached is not None:
        value["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return value
