#!/usr/bin/env python3
"""Write a GGUF file anew with every quantised tensor unpacked to F16 or BF16: the same weights in the dense type.

python tests/perf/dense_gguf.py IN.gguf OUT.gguf [--type f16|bf16]
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

TYPES = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16}


def main() -> None:
    """Copy the metadata, unpack the tensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--type", choices=TYPES, default="f16")
    arguments = parser.parse_args()
    reader = gguf.GGUFReader(arguments.source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(arguments.target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=element)
    writer.add_file_type(FILE_TYPES[arguments.type])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            kind = TYPES[arguments.type]
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
