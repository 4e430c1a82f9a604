"""Writes the tokenizer of a GGUF file as a Hugging Face directory. Run as a program, in a process of its own.

    python -m rabbet_weights_gguf.tokenizer FILE OUTDIR

transformers reads the vocabulary; it may import torch and takes seconds, so the front process does not do it
itself. What transformers cannot know is put back here: the rule by which text is split before merging, which GGUF
names in ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

__all__ = ["main", "splitter", "write_tokenizer"]

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def splitter(rule: str) -> Any | None:
    """The pre-tokenizer that ``tokenizer.ggml.pre`` stands for, or None to keep what transformers made."""
    from tokenizers import Regex, pre_tokenizers

    if rule == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    pattern = {"qwen2": _QWEN, "llama-bpe": _LLAMA3, "llama3": _LLAMA3}.get(rule)
    if pattern is None:
        return None
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )


def write_tokenizer(path: Path, directory: Path, *, rule: str, context_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of ``path`` into ``directory``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    split = splitter(rule)
    if split is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.model_max_length = context_length
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(directory)


def main(arguments: list[str]) -> int:
    """Command line: FILE OUTDIR RULE CONTEXT_LENGTH."""
    path, directory, rule, context_length = arguments
    write_tokenizer(Path(path), Path(directory), rule=rule, context_length=int(context_length))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
