"""Small tokenizers made on the spot: bytes (as GPT-2 and its heirs), and pieces with byte fallback (as Llama)."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_byte_level(directory: Path) -> None:
    """Ids 0..255 are bytes, 256 is the end token, 257 the start token, 258.. a few pieces that cut characters."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = _byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)} | {"<end>": 256, "<start>": 257}
    # Pieces of two and three bytes that end inside a character.
    merges: list[tuple[str, str]] = []
    for first, second in ((0xE2, 0x82), (0xF0, 0x9F), (0x41, 0xE2), (0x20, 0x61)):
        piece = alphabet[first] + alphabet[second]
        vocab[piece] = len(vocab)
        merges.append((alphabet[first], alphabet[second]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 257)])
    _write(directory, tokenizer)


def write_byte_fallback(directory: Path) -> None:
    """Pieces with a mark for spaces, and byte tokens for all else; the first space of a text is cut off."""
    vocab = {"<unk>": 0, "<end>": 1, "<start>": 2}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    for piece in ("\u2581", "\u2581Hello", "\u2581world", "a", "b", "\u2581a", "er", "\u00e9"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<start>", special=True)])
    _write(directory, tokenizer)


def _byte_alphabet() -> list[str]:
    """Byte to the character that stands for it in byte-level vocabularies: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write(directory: Path, tokenizer: Tokenizer) -> None:
    assert pre_tokenizers is not None
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<start>", "eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
