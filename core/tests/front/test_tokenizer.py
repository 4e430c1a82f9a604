"""The tokenizer agrees with transformers' and brings in no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rabbet.errors import ConfigError
from rabbet.front.tokenizer import Tokenizer, load_tokenizer, tokenizer_directory


@pytest.mark.parametrize("mode", ["auto", "slow"])
def test_it_agrees_with_transformers(model_dir: Path, mode: str) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(model_dir, mode=mode), AutoTokenizer.from_pretrained(str(model_dir))
    for text in ("", "Hello w\u00f6rld", "<start>a<end>", "\u20ac\U0001f600", "a" * 50):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
    assert ours.size == len(theirs) and ours.special_ids == set(theirs.all_special_ids)


def test_ids_outside_the_vocabulary_are_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([104, 10**9, -1, 105]) == "hi"
    assert byte_level.token(10**9) == ""


def test_the_models_special_tokens_and_template_are_found(byte_level: Tokenizer) -> None:
    assert byte_level.special_tokens == {"bos_token": "<start>", "eos_token": "<end>"}
    assert byte_level.chat_template is not None and "add_generation_prompt" in byte_level.chat_template


def test_byte_tokens_are_known_where_they_stand_for_bytes(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert [byte_fallback.byte_of(i) for i in (2, 3, 258, 259)] == [None, 0, 255, None]
    assert all(byte_level.byte_of(i) is None for i in range(byte_level.size))


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_corrupt_tokenizer_is_a_configuration_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_a_corrupt_tokenizer_config_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_front_and_names_bring_in_no_torch() -> None:
    code = (
        "import sys, rabbet\n"
        "assert not {'torch', 'transformers', 'zmq', 'pydantic'} & set(sys.modules), 'import rabbet'\n"
        "for name in rabbet.__all__: getattr(rabbet, name)\n"
        "import rabbet.front.async_llm, rabbet.front.llm\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_token_has_its_bytes(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert [byte_level.bytes_of(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert byte_level.bytes_of(258) == b"\xe2\x82" and byte_level.bytes_of(256) == b"<end>"
    assert [byte_fallback.bytes_of(3 + i) for i in range(256)] == [bytes([i]) for i in range(256)]
    text = "A\u20ac \U0001f600 \u00e9\n"
    ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(byte_level.bytes_of(i) or b"?" for i in ids).decode() == text


def test_what_reads_as_a_replacement_character_and_is_no_spelling_has_no_known_bytes(byte_level: Tokenizer) -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            return getattr(byte_level._backend, name)

        def decode(self, ids: Any, skip: bool) -> str:
            return "\ufffd\ufffd" if list(ids) == [65] else byte_level._backend.decode(ids, skip)

    tokenizer: Any = Tokenizer(Odd(), special_tokens={}, chat_template=None)  # type: ignore[arg-type]
    assert tokenizer.bytes_of(65) is None and tokenizer.bytes_of(66) == b"B"


def test_a_tokenizer_may_have_a_hub_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options.pop("revision"), options.pop("cache_dir"), options.pop("local_files_only")))
        assert not any("safetensors" in pattern or "bin" in pattern for pattern in options["allow_patterns"])
        return str(model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = tokenizer_directory("org/name", revision="v1", download_dir="/cache", is_offline=True)
    assert asked == [("org/name", "v1", "/cache", True)] and load_tokenizer(found).encode("a") == [257, 97]
    assert tokenizer_directory(str(model_dir)) == model_dir and len(asked) == 1, "a directory asks nobody"


@pytest.mark.parametrize("name", ["org/never-downloaded", "never-downloaded"])
def test_offline_only_the_cache_is_asked_for_a_tokenizer(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--tokenizer {name} \(revision 'v9'\).*offline mode is on") as caught:
        tokenizer_directory(name, revision="v9", download_dir=str(tmp_path), is_offline=True)
    assert caught.value.field == "model.tokenizer"


@pytest.mark.parametrize(
    "name",
    ["/no/such/directory", "a/b/c", "../x", "a/..", "~nobody-here", "x\0y", "x" * 5000],
    ids=lambda name: name[:9].replace("\0", "0"),
)
def test_what_is_no_tokenizer_is_said_before_anybody_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_a, **_m: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match="neither a directory nor a hub name"):
        tokenizer_directory(name)


def test_the_tokenizers_own_code_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote code although switched off: with the flag off nothing of the directory is imported."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory, marker = tmp_path / "model", tmp_path / "ran"
    directory.mkdir()
    (directory / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import ByT5Tokenizer\n"
        f"Path({str(marker)!r}).touch()\nclass Own(ByT5Tokenizer):\n    pass\n"
    )
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}'
    )
    with pytest.raises(ConfigError, match="--trust-remote-code") as caught:
        load_tokenizer(directory)
    assert caught.value.field == "model.trust_remote_code" and not marker.exists()
    assert load_tokenizer(directory, trust_remote_code=True).encode("a", add_special_tokens=False) == [100]
    assert marker.exists()


def test_a_token_keeps_its_space(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    """Alone, tokenizers of pieces write a token like the first of a text; tokens, joined, are the text they stand in."""
    text = "Hello world  a b"
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode("a" + text, add_special_tokens=False)
        assert "".join(map(tokenizer.token, ids)).lstrip(" ") == "a" + text
        assert b"".join(tokenizer.bytes_of(i) or b"?" for i in ids).lstrip(b" ") == b"a" + text.encode()
    pieces = {byte_fallback._backend.id_to_token(i): byte_fallback.token(i) for i in range(byte_fallback.size)}
    assert pieces["\u2581"] == " " and pieces["\u2581Hello"] == " Hello" and pieces["\u2581a"] == " a"
    assert pieces["a"] == "a" and pieces["<end>"] == "<end>" and pieces["<0x41>"] == "A"
