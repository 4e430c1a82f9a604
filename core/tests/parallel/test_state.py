"""Collectives of two real processes, and of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from rabbet.parallel import ParallelState, init_parallel

RANK = """
import sys, torch
from rabbet.parallel import init_parallel
from rabbet.layers import BuildContext, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from rabbet.layers.reference import TorchLayerOps, TorchLinearBackend

rank = int(sys.argv[1])
state = init_parallel(rank=rank, world_size=2, init_method=sys.argv[2], backend="gloo")
assert (state.tp_rank, state.tp_size) == (rank, 2)
for dtype in (torch.float32, torch.bfloat16):
    assert torch.equal(state.all_reduce(torch.full((3,), rank + 1, dtype=dtype)), torch.full((3,), 3, dtype=dtype))
    part = torch.full((2, 1), rank, dtype=dtype)
    assert state.all_gather(part).tolist() == [[0, 1], [0, 1]]
    assert state.all_gather(part, dim=0).tolist() == [[0], [0], [1], [1]]
assert state.all_reduce(torch.zeros(0, 4)).shape == (0, 4)

torch.manual_seed(0)
up, down, table, x = torch.randn(7, 6), torch.randn(6, 7), torch.randn(9, 6), torch.randn(4, 6)
context = BuildContext(parallel=state, dtype=torch.float32, device=torch.device("cpu"), linear=TorchLinearBackend(),
                       ops=TorchLayerOps())
column = ColumnParallelLinear(6, 7, context=context, prefix="up")
row = RowParallelLinear(7, 6, context=context, prefix="down")
embedding = VocabParallelEmbedding(9, 6, context=context, prefix="table", is_head=True)
for layer, tensor in ((column, up), (row, down), (embedding, table)):
    layer.weight.weight_loader(layer.weight, tensor, None)
    layer.process_weights_after_loading()
torch.testing.assert_close(row(column(x)), x @ up.T @ down.T)
ids = torch.tensor([0, 4, 5, 8])
torch.testing.assert_close(embedding(ids), table[ids])
torch.testing.assert_close(embedding.logits(x), x @ table.T)
torch.distributed.destroy_process_group()
print("done")
"""


def test_two_processes_reduce_gather_and_share_layers(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), meeting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == ["done", "done"]


def test_one_rank_joins_nobody_and_returns_its_input() -> None:
    state = init_parallel(rank=0, world_size=1, init_method="", backend="gloo")
    assert state == ParallelState.single()
    tensor = torch.ones(2)
    assert state.all_reduce(tensor) is tensor
    assert state.all_gather(tensor) is tensor
