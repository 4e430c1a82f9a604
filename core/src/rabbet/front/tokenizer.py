"""Text to token ids and back, without torch: by tokenizer.json, or by transformers where there is none."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rabbet._util.files import disk_problem, read_text
from rabbet.errors import ConfigError, InvalidRequestError, shorten

__all__ = ["Tokenizer", "load_tokenizer", "tokenizer_directory"]

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")
_HUB_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_SPACE_MARK = "\u2581"
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _spelled_bytes() -> dict[str, int]:
    """Characters of byte-level vocabularies to the bytes that they spell: printable ones stand for themselves.

    Source: the byte-to-unicode table of GPT-2, which its heirs share.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_SPELLED_BYTES = _spelled_bytes()


class _Backend(Protocol):
    """What both tokenizer libraries can do."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def special_ids(self) -> set[int]: ...
    def size(self) -> int: ...


class _Fast:
    """The ``tokenizers`` library."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_file(str(path))
        self._library.no_truncation()
        self._library.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id)

    def special_ids(self) -> set[int]:
        added = self._library.get_added_tokens_decoder()
        return {token_id for token_id, token in added.items() if token.special}

    def size(self) -> int:
        return self._library.get_vocab_size(with_added_tokens=True)


class _Slow:
    """transformers, for models without a tokenizer.json. It brings torch into this process where torch is installed."""

    def __init__(self, directory: Path, *, trust_remote_code: bool) -> None:
        from transformers import AutoTokenizer

        self._library: Any = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._library.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(  # type: ignore[no-any-return]
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def id_to_token(self, token_id: int) -> str | None:
        return self._library.convert_ids_to_tokens(token_id)  # type: ignore[no-any-return]

    def special_ids(self) -> set[int]:
        return set(self._library.all_special_ids)

    def size(self) -> int:
        return len(self._library)


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        special_tokens: ``bos_token``, ``eos_token``, ... as text, for templates.
        chat_template: The model's own template, or None.
        special_ids: Ids of special tokens.
        size: Number of ids, added ones included.
    """

    def __init__(self, backend: _Backend, *, special_tokens: dict[str, str], chat_template: str | None) -> None:
        self._backend = backend
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.special_ids = backend.special_ids()
        self.size = backend.size()
        self._bytes = _byte_tokens(backend, self.size)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequestError: If it is no Unicode text (lone surrogates).
        """
        try:
            return self._backend.encode(text, add_special_tokens)
        except (UnicodeError, TypeError) as error:
            message = "the text holds lone surrogates, which no tokenizer can read"
            raise InvalidRequestError(message, field="prompt") from error

    def byte_of(self, token_id: int) -> int | None:
        """The byte that a token stands for, in tokenizers that spell unknown characters as byte tokens."""
        return self._bytes.get(token_id)

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token, also where it is a part of a character; None if they cannot be known."""
        byte, text = self._bytes.get(token_id), self.token(token_id)
        if byte is not None:
            return bytes([byte])
        if "\ufffd" not in text:
            return text.encode("utf-8", "surrogatepass")
        spelling = self._backend.id_to_token(token_id) or ""
        if not all(character in _SPELLED_BYTES for character in spelling):
            return None
        found = bytes(_SPELLED_BYTES[character] for character in spelling)
        # Only a byte-level vocabulary reads its spelling like that.
        return found if found.decode("utf-8", "replace") == text else None

    @cached_property
    def anchor(self) -> list[int]:
        """Tokens of some text, for decoding what follows as the middle of a text."""
        return self.encode("a", add_special_tokens=False)

    @cached_property
    def _anchor_chars(self) -> int:
        return len(self._backend.decode(self.anchor, False))

    @cached_property
    def max_token_chars(self) -> int:
        """Most characters that one token stands for: a text of n characters has at least n / this many tokens."""
        return max((len(self._backend.id_to_token(i) or "") for i in range(self.size)), default=1) or 1

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing."""
        return self._backend.decode([token_id for token_id in ids if 0 <= token_id < self.size], skip_special_tokens)

    def token(self, token_id: int) -> str:
        """One token as text, special ones included, as it stands in the middle of a text."""
        if not 0 <= token_id < self.size:
            return ""
        if not (self._backend.id_to_token(token_id) or "").startswith(_SPACE_MARK):
            return self._backend.decode([token_id], False)
        # Alone it would be the first of a text, which loses its space.
        return self._backend.decode([*self.anchor, token_id], False)[self._anchor_chars :]


def _byte_tokens(backend: _Backend, size: int) -> dict[int, int]:
    """Ids of ``<0x00>`` .. ``<0xFF>`` to bytes; empty where these are text like any other."""
    found = {i: int(text[3:5], 16) for i in range(size) if _BYTE_TOKEN.fullmatch(text := backend.id_to_token(i) or "")}
    letter = next((i for i, byte in found.items() if byte == ord("A")), None)
    return found if letter is not None and backend.decode([letter], False) == "A" else {}


def tokenizer_directory(
    name: str, *, revision: str | None = None, download_dir: str | None = None, is_offline: bool = False
) -> Path:
    """The directory of ``--tokenizer``: a directory, or what the hub, or its local cache, has under a name.

    Raises:
        ConfigError: Saying what is not there and what to do.
    """
    # A text may be no path at all: NUL, too long, an unknown user.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if (path := Path(name).expanduser()).is_dir():
            return path
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"--tokenizer {shorten(name)} is neither a directory nor a hub name (organisation/model); check the path",
            field="model.tokenizer",
        )
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=is_offline,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # the library has no base class for what it raises, and httpx's pass through it
        at = f" (revision {shorten(revision)})" if revision is not None else ""
        if (problem := disk_problem(error, download_dir or "the hub's cache (HF_HUB_CACHE)")) is not None:
            raise ConfigError(f"--tokenizer {name}{at} {problem}", field="model.tokenizer") from error
        hint = (
            "offline mode is on and the local hub cache does not have it; download it first"
            if is_offline
            else "check the name and --tokenizer-revision, set HF_TOKEN if it is private, or try again later"
        )
        raise ConfigError(
            f"--tokenizer {name}{at} cannot be had from the hub ({type(error).__name__}): {hint}",
            field="model.tokenizer",
        ) from error
    return Path(found)


def load_tokenizer(directory: Path, *, mode: str = "auto", trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model's directory.

    Raises:
        ConfigError: If it is not readable.
    """
    settings = _settings(directory)
    fast = directory / "tokenizer.json"
    is_fast = fast.is_file() and mode != "slow"
    if not is_fast and not trust_remote_code and settings.get("auto_map"):
        raise ConfigError(
            f"the tokenizer in {directory} is Python code of its own (auto_map in tokenizer_config.json), which runs only "
            "with --trust-remote-code; read it first, or name another tokenizer with --tokenizer",
            field="model.trust_remote_code",
        )
    try:
        backend: _Backend = _Fast(fast) if is_fast else _Slow(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # both libraries raise plain exceptions of their own
        raise ConfigError(f"the tokenizer in {directory} cannot be read: {error}", field="model.tokenizer") from error
    special = {key: text for key in _SPECIAL_KEYS if (text := _token_text(settings.get(key))) is not None}
    return Tokenizer(backend, special_tokens=special, chat_template=_template(directory, settings))


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no readable JSON file: {error}", field="model.tokenizer") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_text(path, limit=1 << 20)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", field="model.tokenizer") from error
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
