"""Checkpoints in safetensors: what is read, and every way in which a file can lie."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rabbet.contracts.weights import ResolveQuery
from rabbet.errors import WeightsError
from rabbet.weights.safetensors import SafetensorsFormat, read_infos

CONFIG = {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}
INDEX = "model.safetensors.index.json"


def model_dir(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def resolve(path: Path) -> Any:
    return SafetensorsFormat.resolve(ResolveQuery(model=str(path)))


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with a header of our choice."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_of_every_type_are_equal_to_what_was_saved(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    saved = {
        str(dtype): (torch.arange(6).view(2, 3) % 2).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }  # fmt: skip
    saved |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    save_file(saved, directory / "model.safetensors")
    files = resolve(directory)
    read = dict(SafetensorsFormat.tensors(files))
    assert read.keys() == saved.keys()
    for name, tensor in saved.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    infos = {info.name: info for info in SafetensorsFormat.infos(files)}
    assert (infos["empty"].shape, infos["empty"].dtype) == ((0, 4), "float32")


def test_index_chooses_the_files(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    for number in (1, 2):
        save_file({f"t{number}": torch.full((2,), number)}, directory / f"part-{number}.safetensors")
    save_file({"other": torch.ones(1)}, directory / "consolidated.safetensors")
    weight_map = {"t1": "part-1.safetensors", "t2": "part-2.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    files = resolve(directory)
    assert [path.name for path in files.weight_files] == ["part-1.safetensors", "part-2.safetensors"]
    assert {name: tensor[0].item() for name, tensor in SafetensorsFormat.tensors(files)} == {"t1": 1, "t2": 2}


def test_files_around_the_weights_are_found(tmp_path: Path) -> None:
    directory = model_dir(tmp_path / "My-Model")
    save_file({"t": torch.ones(1)}, directory / "model.safetensors")
    files = resolve(directory)
    assert (files.name, files.config, files.tokenizer_dir) == ("My-Model", CONFIG, None)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    files = resolve(directory)
    assert (files.tokenizer_dir, files.generation_config) == (directory, {"eos_token_id": 7})
    assert files.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"t": entry(0, 400, [100])}, b"\0" * 16, "t' .* lies at bytes 0 to 400, but there are 16"),
        ({"t": entry(0, 16, [3])}, b"\0" * 16, "needs 12 bytes, but has 16"),
        ({"t": entry(16, 0, [4])}, b"\0" * 16, "lies at bytes 16 to 0"),
        ({"t": entry(-16, 0, [4])}, b"\0" * 16, "non-negative"),
        ({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, b"\0" * 24, "'b' .* overlaps with 'a'"),
        ({"a": entry(0, 16, [4]), "b": entry(0, 16, [4])}, b"\0" * 16, "overlaps"),
        ({"a": entry(0, 16, [4]), "b": entry(20, 36, [4])}, b"\0" * 36, "hole after 'a'"),
        ({"a": entry(4, 20, [4])}, b"\0" * 20, "hole after 'the header'"),
        ({"a": entry(0, 16, [4])}, b"\0" * 20, "belong to no tensor"),
        ({"t": entry(0, 16, [4], "F99")}, b"\0" * 16, "unknown dtype 'F99'; known: F64"),
        ({"t": entry(0, 16, [4], ["F32"])}, b"\0" * 16, "unknown dtype"),
        ({"t": entry(0, 16, [4.0])}, b"\0" * 16, "non-negative integers"),
        ({"t": entry(0, 16, [True])}, b"\0" * 16, "non-negative integers"),
        ({"t": entry(0, 16, [2**62, 2**62])}, b"\0" * 16, "needs"),
        ({"t": entry(0, 16, [2**70])}, b"\0" * 16, "non-negative integers"),
        ({"t": entry(0, 4, [1] * 1000)}, b"\0" * 4, "non-negative integers"),
        ({"t": {"dtype": "F32"}}, b"", "no dtype, shape or data_offsets"),
        ({"t": 5}, b"", "no dtype, shape or data_offsets"),
        ([], b"", "no JSON object"),
        (b"\xff\xfe{}", b"", "no valid JSON"),
        (b"{" * 100_000, b"", "no valid JSON"),
        (b'{"t": ' + b"9" * 5000 + b"}", b"", "no valid JSON"),
        (b'{"t": {}, "t": {}}', b"", "no valid JSON"),
    ],
)
def test_lying_header_is_refused_with_file_and_tensor(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    directory = model_dir(tmp_path)
    write(directory / "model.safetensors", header, data)
    with pytest.raises(WeightsError, match=words) as caught:
        resolve(directory)
    assert "model.safetensors" in str(caught.value)
    assert caught.value.file == str(directory / "model.safetensors")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [0, 1, 10**8 + 1, 2**40, 2**64 - 1])
def test_header_of_an_impossible_length_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    directory = model_dir(tmp_path)
    write(directory / "model.safetensors", b"{}", length=length)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        resolve(directory)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\0" * 8, b"PK\x03\x04 a zip file, as torch.save makes"])
def test_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = model_dir(tmp_path)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        resolve(directory)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(position=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 60))
def test_any_changed_byte_is_read_rightly_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    """Never another error, never bytes of outside the file."""
    path = tmp_path_factory.mktemp("f") / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.int8)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content[: len(content) - cut])
    try:
        infos = read_infos(path)
    except WeightsError as error:
        assert error.file == str(path)
    else:
        assert sum(_bytes_of(info) for info in infos) <= len(content)


def _bytes_of(info: Any) -> int:
    size = torch.empty(0, dtype=getattr(torch, info.dtype)).element_size()
    for axis in info.shape:
        size *= axis
    return size


@pytest.mark.parametrize(
    "name",
    [
        "../../secret.safetensors",
        "/etc/secret.safetensors",
        "..",
        "sub/x.safetensors",
        "x.bin",
        "a\\b.safetensors",
        5,
        None,
    ],
)
def test_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: Any) -> None:
    directory = model_dir(tmp_path)
    save_file({"t": torch.ones(1)}, directory / "good.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"u": "good.safetensors", "t": name}}))
    with pytest.raises(WeightsError, match=r"'t' is in .* no safetensors file of this directory") as caught:
        resolve(directory)
    assert caught.value.tensor == "t"


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{", "\x00"])
def test_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    directory = model_dir(tmp_path)
    save_file({"t": torch.ones(1)}, directory / "model.safetensors")
    (directory / INDEX).write_text(content)
    with pytest.raises(WeightsError, match=r"index\.json"):
        resolve(directory)


def test_index_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    save_file({"t": torch.ones(1)}, directory / "a.safetensors")
    index = directory / INDEX
    index.write_text(json.dumps({"weight_map": {"t": "a.safetensors", "u": "a.safetensors"}}))
    with pytest.raises(WeightsError, match=r"'u' is in a\.safetensors, but it is not"):
        resolve(directory)
    index.write_text(json.dumps({"weight_map": {"t": "a.safetensors", "u": "b.safetensors"}}))
    with pytest.raises(WeightsError, match=r"b\.safetensors \(1 of 2 files are missing\)"):
        resolve(directory)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    for name in ("a", "b"):
        save_file({"t": torch.ones(1)}, directory / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"'t' stands in a\.safetensors and again"):
        resolve(directory)


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_alone_are_refused_and_not_opened(tmp_path: Path, name: str) -> None:
    directory = model_dir(tmp_path)
    (directory / name).write_bytes(pickle.dumps(Touch(str(tmp_path / "ran"))))
    with pytest.raises(WeightsError, match=r"only pickled weights .* convert them to safetensors"):
        resolve(directory)
    assert not (tmp_path / "ran").exists()


def test_directory_without_weights_or_configuration_says_so(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors file; --load-format dummy"):
        resolve(directory)
    save_file({"t": torch.ones(1)}, directory / "model.safetensors")
    (directory / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"no config\.json"):
        resolve(directory)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 50_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_broken_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = model_dir(tmp_path)
    save_file({"t": torch.ones(1)}, directory / "model.safetensors")
    (directory / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        resolve(directory)


def test_file_that_changes_after_resolving_is_checked_again(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    path = directory / "model.safetensors"
    save_file({"t": torch.ones(100)}, path)
    files = resolve(directory)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="truncated"):
        dict(SafetensorsFormat.tensors(files))


def test_matches_by_form_and_without_network(tmp_path: Path) -> None:
    def matches(model: str) -> bool:
        return SafetensorsFormat.matches(ResolveQuery(model=model))

    assert not matches(str(tmp_path))
    assert matches(str(model_dir(tmp_path)))
    assert matches("organisation/model") and matches("gpt2")
    for name in ("/no/such/directory", "a/b/c", "../x", "a/..", "", "a b", "https://x/y"):
        assert not matches(name)


def test_front_half_imports_no_torch(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    save_file({"t": torch.ones(1)}, directory / "model.safetensors")
    code = (
        "import sys\n"
        "from rabbet.contracts.weights import ResolveQuery\n"
        "from rabbet.weights.safetensors import SafetensorsFormat as S\n"
        "from rabbet.weights.dummy import DummyFormat\n"
        f"query = ResolveQuery(model={str(directory)!r})\n"
        "assert S.matches(query) and len(S.infos(S.resolve(query))) == 1\n"
        "assert not DummyFormat.matches(query) and DummyFormat.resolve(query).weight_files == ()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
