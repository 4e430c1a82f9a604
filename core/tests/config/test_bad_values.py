"""Absurd values, by every way into the configuration: each is refused with its place, itself and what may stand there."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbet._util.text import check_plain, kinds_of
from rabbet._util.yaml import parse_yaml
from rabbet.config import EngineConfig, ServerConfig, engine_config_from_kwargs, parse_configs
from rabbet.config.flags import Flag, fields
from rabbet.errors import ConfigError, RabbetError, WeightsError


def parse(*words: str, environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    return parse_configs(["m", *words], environment=environment or {})


def parse_file(folder: Path, text: str | bytes) -> tuple[EngineConfig, ServerConfig]:
    (folder / "c.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return parse("--config", str(folder / "c.yaml"))


INTEGERS = [flag for flag in fields().values() if int in kinds_of(flag.annotation)]
TEXTS = [flag for flag in fields().values() if str in kinds_of(flag.annotation)]
EMPTY = ("model.model", "server.root_path")


# ---- numbers


@pytest.mark.parametrize("flag", INTEGERS, ids=lambda flag: flag.name)
def test_no_integer_is_larger_than_what_another_process_can_be_told(flag: Flag) -> None:
    for value in ("9" * 400, "-" + "9" * 400, str(1 << 63), "99999999T", str(-(1 << 63) - 1)):
        with pytest.raises(ConfigError, match=rf"^--{flag.name} is .*must lie between -2\^63 and 2\^63 - 1"):
            parse(f"--{flag.name}={value}")
    with pytest.raises(ConfigError, match=rf"^--{flag.name} is an integer of 13288 bits, but"):
        parse(f"--{flag.name}=1{'0' * 4000}")


@pytest.mark.parametrize(
    "value", ["1e30", "nan", "inf", "-inf", "1.5.2k", "1.5", "0x10", "1kk", "k", "1 k", "9" * 5000, "\u00bd"]
)
@pytest.mark.parametrize("flag", INTEGERS, ids=lambda flag: flag.name)
def test_what_is_no_integer_is_named_with_the_suffixes_that_are_taken(flag: Flag, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--{flag.name} is .*must be an integer; k m g t \(1000\) and K M G T"):
        parse(f"--{flag.name}={value}")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e30", "1e400", "x"])
@pytest.mark.parametrize("name", [flag.name for flag in fields().values() if float in kinds_of(flag.annotation)])
def test_numbers_are_finite_and_bounded(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--{name}"):
        parse(f"--{name}={value}")


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("flag", [*INTEGERS, *TEXTS], ids=lambda flag: flag.name)
def test_a_truth_value_is_no_number_and_no_text(flag: Flag, value: bool) -> None:
    if flag.path == "model.model" or flag.place[0] == "server":
        return
    section, _, name = flag.path.rpartition(".")
    options = {f"{section}_config": {name: value}} if section else {name: value}
    with pytest.raises(ConfigError, match=rf"{name} is {str(value).lower()}, but is no switch"):
        engine_config_from_kwargs("m", **options)


# ---- texts


@pytest.mark.parametrize("flag", TEXTS, ids=lambda flag: flag.name)
def test_an_empty_text_is_a_variable_that_was_not_set(flag: Flag) -> None:
    if flag.path in EMPTY:
        return
    for value in ("", "  "):
        with pytest.raises(ConfigError, match=f"^--{flag.name} is empty; give a value or leave the option out"):
            parse(f"--{flag.name}={value}")
    with pytest.raises(ConfigError, match=f"^{flag.environment} is empty"):
        parse(environment={flag.environment: ""})


@pytest.mark.parametrize("name", ["served_model_name", "plugins_allow", "plugins_deny", "stat_loggers", "plugin"])
def test_a_list_holds_no_empty_text(name: str) -> None:
    for value in ([""], ["a", " "]):
        with pytest.raises(ConfigError, match="is empty; give a value or leave the option out"):
            engine_config_from_kwargs("m", **{name: value})


@pytest.mark.parametrize("value", ["a\nb", "a\x1b[2Jb", "a\u2028b", "a\u202eb", "a\u200bb", "\x7f"])
@pytest.mark.parametrize(
    "name",
    [
        "served-model-name",
        "tokenizer",
        "model-config.revision",
        "host",
        "scheduling-policy",
        "download-dir",
        "plugins-deny",
    ],
)
def test_texts_that_go_into_the_log_hold_no_control_characters(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="must hold no control characters"):
        parse(f"--{name}", value)


def test_a_key_that_is_refused_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--api-key", "")
    assert "api-key is empty" in str(caught.value)
    assert parse("--api-key", "hunter\n2")[1].api_key == ["hunter\n2"]


def test_other_scripts_and_spaces_are_no_control_characters() -> None:
    engine, _ = parse("--served-model-name", "\u30e2\u30c7\u30eb \u00e9", "--tokenizer", "/a b/\u3000c")
    assert engine.model.served_model_name == ["\u30e2\u30c7\u30eb \u00e9"] and engine.model.tokenizer == "/a b/\u3000c"


@pytest.mark.parametrize("value", ["a\0b", "a\udcff", "\ud800"])
@pytest.mark.parametrize(
    "name", ["tokenizer", "served-model-name", "hf-overrides.a", "plugin-config.acme.a", "model", "chat-template"]
)
def test_bytes_that_are_no_text_are_refused(name: str, value: str) -> None:
    words = ["m", f"--{name}", value] if name != "model" else [value]
    with pytest.raises(ConfigError, match=r"text holds no NUL and no half characters \(use UTF-8\)"):
        parse_configs(words, environment={})


@pytest.mark.parametrize("error", [ConfigError, WeightsError, RabbetError])
def test_a_message_is_no_longer_than_a_reader_bears(error: type[RabbetError]) -> None:
    text = str(error(f"there is no option {'x' * 1_000_000}; did you mean y?"))
    assert len(text) < 1000 and text.startswith("there is no option") and text.endswith("did you mean y?")
    table = "\n".join(["row"] * 1000)
    assert str(error(table)) == table


def test_long_names_and_values_are_cut_in_messages() -> None:
    long = "x" * 100_000
    for words in (
        ["--" + long, "1"],
        ["--hf-overrides.a." + long],
        ["--cache-config." + long + "=1"],
        [long],
        ["-" + long],
    ):
        with pytest.raises(ConfigError) as caught:
            parse(*words)
        assert len(str(caught.value)) < 2100


# ---- mappings


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": 1 << 64}}, "holds 18446744073709551616 under 'b', but must lie between"),
        ({"a": [10**400]}, "holds an integer of 1329 bits under 'a'"),
        ({"a": float("nan")}, "holds nan under 'a', but numbers must be finite"),
        ({"a": [1, float("inf")]}, "holds inf under 'a', but numbers must be finite"),
        ({"a": "\ud800"}, "holds .*half characters"),
        ({"a\0": 1}, "holds .*no NUL"),
        ({"a": datetime.date(2026, 1, 1)}, "holds a date under 'a'; use text, numbers"),
        ({"a": {1, 2}}, "holds a set under 'a'; use text"),
        ({"a": b"x"}, "holds a bytes under 'a'; use text"),
        ({"a": object()}, "holds a object under 'a'; use text"),
        ({str(key): 1 for key in range(2001)}, "holds too much: at most 64 levels and 2000 keys"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["hf_overrides", "additional_config", "override_generation_config", "plugin_config"])
def test_a_mapping_holds_what_json_can_say(name: str, value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} {message}"):
        engine_config_from_kwargs("m", **{name: value})


def test_a_mapping_that_holds_itself_is_refused() -> None:
    for inner in ([], {}):
        value: dict[str, Any] = {"a": inner}
        inner.append(value) if isinstance(inner, list) else inner.update(b=value)
        with pytest.raises(ConfigError, match="holds too much"):
            engine_config_from_kwargs("m", additional_config=value)


@pytest.mark.parametrize(
    "text", ['{"a":' * 65 + "1" + "}" * 65, '{"a":' + "[" * 65 + "]" * 65 + "}", '{"a":1e400}', '{"a":NaN}']
)
def test_a_flag_that_holds_too_much_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="^--hf-overrides (holds|is no valid JSON)"):
        parse("--hf-overrides", text)


def test_what_another_process_can_be_told_passes() -> None:
    value = {"a": [1, -(1 << 63), (1 << 63) - 1, 1.5, None, True, "\u00e9", {"b": ()}], "c" * 1000: {}}
    check_plain(value)
    check_plain({str(key): {} for key in range(2000)})


# ---- the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf_overrides: &a {b: *a}\n", r"no valid YAML: \*a: aliases are not taken.* line 1"),
        ("additional_config:\n  a: &a [x, x]\n  b: [*a, *a]\n", r"no valid YAML: \*a: aliases are not taken.* line 3"),
        ("hf_overrides:\n  <<: {a: 1}\n  a: &x 2\n  b: *x\n", "aliases"),
        ("additional_config: {1: a, '1': b}\n", "the key '1' stands twice"),
        ("? [1]\n: 2\n", "unhashable key"), ("a: 1\n---\nb: 2\n", "single document"), ("port: !!python/name:os.system\n", "tag"),
        ("port:\t1\n\tx: 1\n", "no valid YAML"), ("a: " + "[" * 5000, "no valid YAML"), ("max_num_seqs: " + "9" * 5000, "no valid YAML"),
        ("- 1\n", "must hold a mapping"), ("3\n", "must hold a mapping"), ("false\n", "must hold a mapping"), ("''\n", "must hold a mapping"),
        ("[]\n", "must hold a mapping"), ("0\n", "must hold a mapping"),
        ("# \xe9\n".encode("latin-1"), r"cannot be read: it is no UTF-8 text \(byte 2\)"), ("port: 1\n".encode("utf-16"), "no UTF-8"),
        ("port: 1\0\n", "no valid YAML"), ("x: " + "y" * (1 << 18), "larger than 0.25 MiB"),
        ("additional_config: " + "{a: " * 70 + "1" + "}" * 70, "additional_config holds too much"),
        ("max_num_seqs: 1e30\n", "max_num_seqs is 1e\\+30"), ("max_num_seqs: " + "9" * 400, "max_num_seqs is an integer of 1329 bits"),
        ("max_num_seqs: true\n", "max_num_seqs is true, but is no switch"), ("port: yes\n", "port is 'yes', but must be an integer"),
        ("port: 1:30\n", "port is '1:30', but must be an integer"), ("enforce_eager: y\n", "must be true or false"),
        ("enforce_eager: 2\n", "enforce_eager is 2"), ("enforce_eager:\n", "enforce_eager is None"),
        ("hf_overrides: {a: .nan}\n", "holds nan"), ('served_model_name: ["\\ud800"]\n', "half characters"),
        ("additional_config: {a: !!binary aGVsbG8=}\n", "holds a bytes"), ("additional_config: {a: !!set {b}}\n", "holds a set"),
        ("kv_cache_memory_bytes: 1.5.2k\n", "must be an integer"), ("~: 2\n", "no option"), ("'': 2\n", "no option"),
        ("tokenizer: ''\n", "tokenizer is empty"), ("served_model_name: true\n", "is true, but is no switch; give a value, text in quotes"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_file(tmp_path, text)
    assert "\n" not in str(caught.value) and "c.yaml" in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "---\n", "{}\n", "\ufeff"])
def test_a_file_without_options_is_none(tmp_path: Path, text: str) -> None:
    assert parse_file(tmp_path, text) == parse()


@pytest.mark.parametrize(("word", "value"), [(word, word.lower() in ("true", "yes", "on")) for word in ("true", "True", "yes", "Yes", "on", "ON", "false", "no", "off", "'yes'", "'off'", '"true"')])  # fmt: skip
def test_switches_take_the_words_of_either_yaml(tmp_path: Path, word: str, value: bool) -> None:
    engine, _ = parse_file(tmp_path, f"enforce_eager: {word}\n")
    assert engine.model.enforce_eager is (value or word in ("'yes'", '"true"'))


def test_words_and_numbers_of_a_file_are_what_they_look_like(tmp_path: Path) -> None:
    engine, server = parse_file(
        tmp_path,
        "served_model_name: [no, 2026-01-01, on]\nport: 010\nmax_num_seqs: 1_000\nkv_cache_memory_bytes: 1.5G\n"
        "hf_overrides: {a: yes, b: 1:30, c: 1e3, d: -1, e: ~, f: .5, g: 0x10, h: '1'}\ngpu_memory_utilization: 5e-1\n",
    )
    assert engine.model.served_model_name == ["no", "2026-01-01", "on"]
    assert (server.port, engine.scheduler.max_num_seqs, engine.cache.kv_cache_memory_bytes) == (10, 1000, 3 << 29)
    assert engine.cache.gpu_memory_utilization == 0.5
    assert engine.model.hf_overrides == {
        "a": "yes", "b": "1:30", "c": 1000.0, "d": -1, "e": None, "f": 0.5, "g": "0x10", "h": "1",
    }  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.text(alphabet="a1:-[]{}&*!?|>'\"%@`#,. \n\tyes", max_size=30))
def test_any_text_is_yaml_or_an_error_of_one_line(text: str) -> None:
    try:
        parse_yaml(text)
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
