"""The tokenizer agrees with transformers' and brings in no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rabbet.errors import ConfigError
from rabbet.front.tokenizer import Tokenizer, load_tokenizer


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
