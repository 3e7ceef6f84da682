"""What one training step sends equals a closed formula, to the byte: counted collectives, LoRA and full."""

from __future__ import annotations

import pytest

from tests.communication import count, expected, sent_bytes
from tests.distributed import run_ranks
from tests.parity.harness import Cell

CELLS = [
    *(
        Cell("llama", layout, mode, nproc, schedule="1f1b" if layout == "pp" else "")
        for layout, nproc in (
            ("ddp", 2),
            ("zero1", 2),
            ("zero2", 2),
            ("fsdp2", 2),
            ("hsdp", 4),
            ("tp", 2),
            ("tp-sp", 2),
            ("pp", 2),
        )
        for mode in ("lora", "full")
    ),
    Cell("llama", "ddp-tp", "lora", 4),
    Cell("llama", "zero1-tp", "lora", 4),
    Cell("llama", "fsdp2-tp", "full", 4),
    Cell("llama", "pp-tp-sp", "lora", 4, schedule="1f1b"),
    # A recurrent layer's block sends what an attention layer's does: no reduction for its states, gates or norms.
    *(Cell("qwen3_5_text", layout, mode, 2) for layout, mode in (("tp", "full"), ("tp-sp", "lora"))),
    Cell("nemotron_h", "tp", "lora", 2),
    # Some add a few numbers up within a block, and Falcon-H1 has two mixers side by side.
    *(Cell(family, "tp-sp", "lora", 2) for family in ("olmo_hybrid", "jamba", "falcon_h1")),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_bytes_equal_the_formula(cell, capsys):
    for rank, counted in enumerate(run_ranks(cell.nproc, count, cell)):
        assert counted.bytes == expected(counted.facts), f"rank {rank}"
        if rank == 0:
            with capsys.disabled():
                print(f"\n{cell.id:28} {sent_bytes(counted.bytes, counted.facts.sizes):>10,} B leave a rank", end="")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_block_is_one_collective_each_way(mode):
    """4 layers of 2 blocks, 4 micro-batches; LoRA wants no gradient of the first block's input."""
    blocks, microbatches, below = 8, 4, int(mode == "lora")
    embedding, head, loss, norm = 1, 1, 2, 1
    per_microbatch = embedding + blocks + (blocks - below) + head + loss
    # LoRA has factors that are whole on every rank: their gradients, all in one.
    per_step = norm + (mode == "lora")
    for counted in run_ranks(2, count, Cell("llama", "tp", mode, 2)):
        assert counted.calls == {("all-reduce", "tp"): microbatches * per_microbatch + per_step}
