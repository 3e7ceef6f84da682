"""Copies of weights are compared by their bits, whatever the layout shards."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.kernels import eight_bit
from shardwise.parallel import copies
from shardwise.parallel.copies import Difference, differences, explain
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import local
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import EIGHT_BIT, Cell, microbatches, numerics_of, run_config

CELLS = [
    *(Cell("qwen3_5_text", layout, "lora", 2) for layout in ("ddp", "zero1", "zero2", "tp", "cp")),
    Cell("qwen3_next", "ddp-ep", "full", 2),
    Cell("llama", "hsdp", "full", 4),
]
"""With copies: of all weights, of those that `tp` does not shard, or of each shard."""


def flipped(cell: Cell, steps: int, wrong_rank: int, name: str) -> tuple[list[Any], list[Any]]:
    """Return what differs after some steps, and after a bit of a rank's weight was flipped."""
    cfg = replace(run_config(cell))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    for step in range(steps):
        training_step(job, microbatches(cfg, mesh, step), mesh, 0.1)
    before = differences(job.pm, mesh, job.optimizer)
    if dist.get_rank() == wrong_rank:
        weight = next(p for n, p in job.pm.named_parameters() if name in n)
        bits = local(weight.detach()).flatten()
        bits[:1].view(torch.int32).bitwise_xor_(1)
    return before, differences(job.pm, mesh, job.optimizer)


LATER = ("zero2", "cp")
"""Layouts whose copies are those of others: `make parity` flips their bits."""


@pytest.mark.parametrize(
    "cell",
    some_now(CELLS, [cell for cell in CELLS if cell.layout not in LATER]),
    ids=lambda cell: cell.id,
)
def test_copies_are_equal_after_steps_until_a_bit_flips(cell):
    name = "model.norm.weight" if cell.tp > 1 else "embed_tokens"
    for before, after in run_ranks(cell.nproc, flipped, cell, 2, 1, name):
        assert before == []
        (difference,) = after
        assert name in difference.name
        assert 1 in difference.ranks
        assert not difference.is_certain


def test_most_of_three_ranks_name_the_wrong_one():
    cell = replace(Cell("llama", "ddp", "full", 3), rows=6, micro_rows=1)
    for before, after in run_ranks(3, flipped, cell, 1, 2, "layers.1.mlp.up_proj"):
        assert before == []
        assert after == [Difference("model.layers.1.mlp.up_proj.weight", (2,), True)]
        assert "on rank 2 from those of most ranks" in explain(after)


def test_nothing_is_compared_where_all_is_sharded(monkeypatch):
    monkeypatch.setattr(copies, "_digest", None)
    for layout in ("fsdp1", "fsdp2"):
        assert (
            run_ranks(2, flipped, Cell("llama", layout, "lora", 2), 0, 0, "norm") == [([], [])] * 2
        )


SCALES = eight_bit.names_of("exp_avg_sq")[1]


def with_a_flipped_state(optimizer: Any, name: str) -> list[Difference]:
    cell = Cell("llama", "ddp", "full", 2, variant=EIGHT_BIT)  # whose matrices are large enough
    cfg = run_config(cell)
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, name=optimizer))
    mesh = build_mesh(cfg, torch.device("cpu"))
    with numerics_of(cell):
        job = build(cfg, mesh)
        training_step(job, microbatches(cfg, mesh, 0), mesh, 0.1)
    if dist.get_rank() == 1:
        state = next(s[name] for s in job.optimizer.state.values() if name in s)
        state.flatten()[:1].view(torch.int32).bitwise_xor_(1)
    return differences(job.pm, mesh, job.optimizer)


@pytest.mark.parametrize(("optimizer", "name"), [("adamw", "exp_avg_sq"), ("adamw8bit", SCALES)])
def test_copies_of_states_count(optimizer, name):
    for (difference,) in run_ranks(2, with_a_flipped_state, optimizer, name):
        assert difference.name.endswith(f"({name})")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_any_bit_of_any_dtype_counts(dtype):
    weight = torch.zeros(3, 5, dtype=dtype).T
    before = copies._digest(weight)
    weight[1, 2] = 1
    assert copies._digest(weight) != before


def test_elements_that_change_places_count(monkeypatch):
    weight = torch.tensor([1.5, 2.5, 3.0])
    whole = copies._digest(weight)
    assert copies._digest(weight[[1, 0, 2]]) != whole
    monkeypatch.setattr(copies, "_AT_ONCE", 2)
    assert copies._digest(weight) == whole


@pytest.mark.parametrize("bit", [0, 31])
def test_two_flips_do_not_cancel(bit):
    bits = torch.zeros(4, dtype=torch.int32)
    before = copies._digest(bits)
    for place, other in itertools.combinations(range(4), 2):
        flipped = bits.clone()
        flipped[[place, other]] ^= torch.tensor(1 << bit).to(torch.int32)
        assert copies._digest(flipped) != before
