"""The checkpoint format ``gguf``: one file with everything in it, unpacked to dense tensors while loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rabbet.contracts import register_weight_format
from rabbet.contracts.weights import ModelFiles, ResolveQuery, TensorInfo, WeightFormat
from rabbet.errors import WeightsError
from rabbet_weights_gguf.architectures import generation_config, hf_config, hf_name, needs_unpermute
from rabbet_weights_gguf.bundled import SHORT_NAME, find_bundled
from rabbet_weights_gguf.cache import derived_directory, load_header
from rabbet_weights_gguf.header import GGUFHeader, GGUFTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["GGUFFormat"]

_STORED_TYPE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@register_weight_format("gguf")
class GGUFFormat(WeightFormat):
    """GGUF files: ``model.gguf``, a directory with exactly one such file, or the short name ``smollm2``."""

    @classmethod
    def matches(cls, query: ResolveQuery) -> bool:
        """A name that ends in .gguf, a directory without safetensors but with a .gguf file, or the short name."""
        if query.model.endswith(".gguf"):
            return True
        path = Path(query.model)
        if _kind(path) == "directory":
            return bool(list(path.glob("*.gguf"))) and not list(path.glob("*.safetensors"))
        return query.model == SHORT_NAME and not path.exists()

    @classmethod
    def resolve(cls, query: ResolveQuery) -> ModelFiles:
        """Locate the file and derive configuration and tokenizer from its metadata."""
        path = _locate(query.model)
        directory = derived_directory(path, query.download_dir)
        header = load_header(directory)
        has_tokenizer = (directory / "tokenizer.json").is_file()
        return ModelFiles(
            name=SHORT_NAME if query.model == SHORT_NAME else path.stem,
            config=hf_config(header, path),
            weight_files=(path,),
            tokenizer_dir=directory if has_tokenizer else None,
            generation_config=generation_config(header),
            chat_template=header.fields.get("tokenizer.chat_template"),
        )

    @classmethod
    def infos(cls, files: ModelFiles) -> tuple[TensorInfo, ...]:
        """Tensors under their Hugging Face names; the dtype is the stored one, or the block type of packed ones."""
        path, header = _open(files)
        infos = []
        for tensor in header.tensors:
            name = _checked_name(tensor, path)
            if name is not None:
                dtype = _STORED_TYPE.get(tensor.block_type, tensor.block_type)
                infos.append(TensorInfo(name=name, shape=tensor.shape, dtype=dtype, file=path))
        return tuple(infos)

    @classmethod
    def tensors(cls, files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in float32 (16-bit types as they are), rows of rotary projections in Hugging Face's order."""
        import numpy as np

        path, header = _open(files)
        architecture = header.fields["general.architecture"]
        heads = (files.config["num_attention_heads"], files.config["num_key_value_heads"])
        data = np.memmap(path, mode="r", dtype=np.uint8)
        for tensor in header.tensors:
            name = _checked_name(tensor, path)
            if name is None:
                continue
            if tensor.offset + tensor.size_bytes > data.size:
                raise WeightsError(
                    f"tensor {tensor.name} reaches past the end of {path.name}", file=str(path), tensor=tensor.name
                )
            values = _unpack(tensor, data[tensor.offset : tensor.offset + tensor.size_bytes])
            if needs_unpermute(architecture, tensor.name):
                num_heads = heads[1] if ".attn_k." in tensor.name else heads[0]
                if num_heads < 1 or values.shape[0] % (2 * num_heads):
                    message = (
                        f"{tensor.name} of {path.name} has {values.shape[0]} rows, no even number for each of the "
                    )
                    raise WeightsError(f"{message}{num_heads} heads", file=str(path), tensor=tensor.name)
                values = _unpermute(values, num_heads)
            yield name, values


def _kind(path: Path) -> str:
    """``directory``, ``file`` or nothing; what no system takes as a path, such as very long text, is nothing."""
    try:
        return "directory" if path.is_dir() else "file" if path.is_file() else ""
    except OSError:
        return ""


def _locate(model: str) -> Path:
    if model == SHORT_NAME and not Path(model).exists():
        return find_bundled()
    path = Path(model)
    with suppress(RuntimeError):  # "~name" of nobody
        path = path.expanduser()
    if _kind(path) == "directory":
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found)
            raise WeightsError(f"{path} holds {len(found)} GGUF files ({names}); name one of them", file=str(path))
        path = found[0]
    if _kind(path) != "file":
        raise WeightsError(f"the file {model} does not exist", file=model)
    return path.resolve()


def _open(files: ModelFiles) -> tuple[Path, GGUFHeader]:
    path = Path(files.weight_files[0])
    if files.tokenizer_dir is not None:
        return path, load_header(Path(files.tokenizer_dir))
    from rabbet_weights_gguf.header import read_header

    return path, read_header(path)


def _checked_name(tensor: GGUFTensor, path: Path) -> str | None:
    try:
        return hf_name(tensor.name)
    except KeyError:
        raise WeightsError(
            f"{path.name} holds the tensor {tensor.name}, which no supported architecture has",
            file=str(path),
            tensor=tensor.name,
        ) from None


def _unpack(tensor: GGUFTensor, data: np.ndarray) -> torch.Tensor:
    import gguf
    import torch

    if tensor.block_type in _STORED_TYPE:
        dtype = getattr(torch, _STORED_TYPE[tensor.block_type])
        # A copy: the mapping is read-only and torch has no read-only tensors.
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tensor.shape)
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[tensor.block_type])
    return torch.from_numpy(values).reshape(tensor.shape)


def _unpermute(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from interleaved pairs to halves; what llama.cpp's converter did, undone."""
    rows = values.shape[0]
    return values.reshape(num_heads, rows // num_heads // 2, 2, -1).transpose(1, 2).reshape(values.shape)
