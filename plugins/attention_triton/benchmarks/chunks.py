"""Times the kernels for chunks, shape by shape, each in a process of its own that may fail: python chunks.py [--only WORD]

Answers come first: odd lengths, groups, windows and the rest against float64, unused slots full of NaN. Then the cases of
attention.py that have chunks, with heads of 128 and 64, in CUDA graphs; outputs are compared with those of the plain kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

_VARIANTS: dict[str, dict[str, Any]] = {
    "plain 64": {},
    "plain 128": {"plain": 128},
    "hopper 128 x 2": {"columns": 128, "stages": 2},
    "hopper 64 x 4": {"columns": 64, "stages": 4},
    "hopper 128 x 2, 240": {"columns": 128, "stages": 2, "registers": 240, "least": 24},
}


_SETUPS: dict[str, dict[str, Any]] = {
    "base": {}, "group 1": {"kv_heads": 8}, "group 2": {"kv_heads": 4}, "group 8": {"kv_heads": 1},
    "head 64": {"head_dim": 64}, "head 80": {"head_dim": 80}, "head 96": {"head_dim": 96}, "float16": {"dtype": "float16"},
    "block 32": {"block_size": 32}, "block 48": {"block_size": 48}, "block 64": {"block_size": 64},
    "window": {"window": 37}, "soft cap": {"soft_cap": 5.0}, "sinks": {"has_sinks": True}, "alibi": {"has_alibi": True},
}  # fmt: skip


def _check(name: str) -> None:
    """Chunks of odd lengths against the SDK's oracle."""
    import torch
    from rabbet_attention_triton.backend import TritonAttention
    from rabbet_sdk.conformance._attention_rig import Rig, Setup

    base = {"dtype": "bfloat16", "heads": 8, "kv_heads": 2, "head_dim": 128, "device": "cuda"}
    rig = Rig(
        backend_class=TritonAttention, setup=Setup(**{**base, **_SETUPS[name]}), device=torch.device("cuda"),
        generator=torch.Generator().manual_seed(1), num_blocks=64,
    )  # fmt: skip
    used = rig.backend._hopper is not None
    worst = []
    for before, now in ((0, 200), (77, 100), (0, 17), (128, 97), (5, 33)):
        request = rig.started(before, now) if before else rig.request(now)
        found = rig.step([(request, now)])[0].double()
        off = (found - rig.expected(request, now)).abs()
        worst.append(f"{float(off.max()):.4f}" + (f" ({int(off.isnan().sum())} NaN)" if off.isnan().any() else ""))
    print(f"  {name:10s} hopper {used}: worst differences {' '.join(worst)}", flush=True)


def _measure(changes: dict[str, Any]) -> None:
    """A line a case."""
    import torch
    from attention import CASES, HEADS, build, graphed_us
    from rabbet_attention_triton import launches

    def tune(backend: Any) -> None:
        given = backend._hopper
        if "plain" in changes or not changes:
            backend._hopper = None
            backend._columns = changes.get("plain", 64)
        else:
            assert given is not None, "no kernel for this GPU"
            shape = {**asdict(given), "short": 0, **changes}
            if backend.context.query.head_dim <= 64 and changes.get("columns") == 128:
                shape["stages"] = 4
            backend._hopper = launches.HopperShape(**shape)

    def untuned(backend: Any) -> None:
        backend._hopper = None

    for dim in (128, 64):
        for name, rows in CASES.items():
            if max(count for count, _ in rows) == 1 or (dim == 64 and "2048" in name):
                continue
            call, out = build(rows, dim, tune)
            call()
            torch.cuda.synchronize()
            found = out.float()
            other, reference = build(rows, dim, untuned)
            other()
            off = float((found - reference.float()).abs().max())
            del other, reference, found
            took = graphed_us(call)
            seen = sum(count * length - count * (count - 1) // 2 for count, length in rows)
            print(
                f"  {name:44s} head {dim:3d} {took:8.1f} us {4 * seen * HEADS * dim / took / 1e6:6.1f} TFLOP/s, "
                f"off by {off:.4f}", flush=True,
            )  # fmt: skip


def main() -> None:
    """Run each part in its own process, so that one that hangs or breaks the device ends alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="variants whose name has this word")
    parser.add_argument("--part", default="", help="(for its own processes)")
    arguments = parser.parse_args()
    if arguments.part in _SETUPS:
        return _check(arguments.part)
    if arguments.part:
        return _measure(json.loads(arguments.part))
    print("answers", flush=True)
    checks = {name: _start(name) for name in _SETUPS if arguments.only in f"answers {name}"}
    for name, process in checks.items():
        _finish(name, process, 100)
    for name, changes in _VARIANTS.items():
        if arguments.only in name:
            print(name, flush=True)
            _finish(name, _start(json.dumps(changes)), 60)
    return None


def _start(part: str) -> subprocess.Popen[str]:
    command = [sys.executable, os.path.abspath(__file__), "--part", part]  # noqa: PTH100  a script
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _finish(name: str, process: subprocess.Popen[str], seconds: float) -> None:
    """Wait, and say in a few lines what went wrong if something did."""
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        print(f"  {name}: not done after {seconds} s", flush=True)
        return
    if process.returncode:
        print(f"  {name} FAILED:\n    " + "\n    ".join(line[:300] for line in errors.strip().splitlines()[-6:]), flush=True)


if __name__ == "__main__":
    main()
