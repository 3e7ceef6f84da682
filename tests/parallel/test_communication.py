"""A training step sends what the library's formulas say: calls and bytes, under every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from tests.communication import Accumulation, Counted, Dtype, count, described
from tests.distributed import run_ranks
from tests.parity.cells import FAST
from tests.parity.harness import Cell
from tests.parity.layouts import CONTEXT, EXPERTS, PROVEN
from tests.parity.together import groups

ALONE = {
    "ddp": 2,
    "zero1": 2,
    "zero2": 2,
    "fsdp1": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tp": 2,
    "tp-sp": 2,
    "pp": 2,
}
"""In both modes, on so many processes. Their compositions are sums of the same formulas, each
counted in one mode."""
TOGETHER = {
    **{"pp-ddp": "lora", "pp-zero1": "full", "pp-fsdp2": "full", "pp-hsdp": "lora"},
    **{"ddp-tp": "lora", "zero1-tp": "lora", "fsdp2-tp": "full", "hsdp-tp": "lora"},
    **{"ddp-tp-sp": "full", "zero1-tp-sp": "full", "fsdp2-tp-sp": "lora", "hsdp-tp-sp": "full"},
    **{"pp-tp": "full", "pp-ddp-tp": "lora", "pp-zero1-tp": "full", "pp-fsdp2-tp": "lora"},
    **{
        "pp-hsdp-tp": "full",
        "pp-tp-sp": "lora",
        "pp-ddp-tp-sp": "full",
        "pp-zero1-tp-sp": "lora",
        "pp-fsdp2-tp-sp": "full",
        "pp-hsdp-tp-sp": "lora",
    },
}
KEPT = ("fsdp2-tp",)
"""Compositions of llama that `make test` counts; beside stages it counts a tied weight. `make
parity` counts the others; that they compute the right thing `make test` shows
(tests/parity/cells.py), of two that differ in `sequence_parallel` for one at least."""


def cell(family: str, layout: str, mode: str, nproc: int, variant: str = "") -> Cell:
    return Cell(family, layout, mode, nproc, variant, "1f1b" if layout.startswith("pp") else "")


def processes(layout: str) -> int:
    """Return 4 for two axes, 8 for three (hsdp then has 2 replicas and no shards)."""
    parts = set(layout.removesuffix("-sp").split("-"))
    return 8 if len(parts) == 3 or "hsdp" in parts else 4


WITH_EXPERTS = [
    # All data ranks have different experts; those of fsdp2 are then not sharded.
    *(cell("qwen3_moe", layout, "full", 2) for layout in ("ddp-ep", "zero2-ep", "fsdp2-ep")),
    cell("qwen3_moe", "cp-ep", "lora", 2, "experts"),
    # The backward sends what a recomputed forward does once more. Experts' products have the dtype
    # of their weights, under autocast too.
    *(
        cell("qwen3_moe", "ddp-ep", mode, 2, variant)
        for mode, variant in (
            ("lora", "checkpointing"),
            ("full", "operators"),
            ("lora", "bfloat16"),
        )
    ),
    # Two ranks have the same experts.
    cell("qwen3_moe", "ddp-ep", "lora", 4, "experts"),
    cell("qwen3_moe", "zero1-ep", "full", 4),
    cell("qwen3_moe", "zero2-ep", "lora", 4),
    *(cell("qwen3_moe", "fsdp2-ep", "lora", 4, variant) for variant in ("experts", "")),
    cell("deepseek_v3", "fsdp2-ep", "full", 4),
    replace(cell("qwen3_moe", "zero1-ep", "lora", 4, "experts"), spread=4),
    # The backward ends at a dense layer, above one with experts.
    cell("qwen3_moe", "fsdp2-ep", "lora", 4, "upper"),
    *(cell("qwen3_moe", "hsdp-ep", "lora", nproc, "experts") for nproc in (4, 8)),
    # Beside other axes. Routers choose the same experts on every rank of `tp`.
    cell("qwen3_moe", "cp-ep", "full", 4),
    cell("jamba", "ddp-cp-ep", "lora", 4),
    cell("qwen3_moe", "fsdp2-cp-ep", "full", 4),
    cell("nemotron_h", "ddp-ep-tp", "full", 4),
    cell("granitemoehybrid", "fsdp2-ep-tp", "lora", 4, "experts"),
    cell("qwen3_moe", "ddp-ep-tp-sp", "lora", 4, "experts"),
    cell("qwen3_moe", "pp-ddp-ep", "lora", 4, "experts"),
    cell("qwen3_moe", "pp-fsdp2-ep", "full", 4),
]

CELLS = [
    *(
        cell("llama", layout, mode, nproc)
        for layout, nproc in ALONE.items()
        for mode in ("lora", "full")
    ),
    *(cell("llama", layout, mode, processes(layout)) for layout, mode in TOGETHER.items()),
    cell("llama", "fsdp1", "lora", 2, "naive"),
    cell("llama", "fsdp1", "lora", 2, "head"),
    # With adapters in the upper layers only, the backward ends there.
    *(cell("llama", layout, "lora", 2, "upper") for layout in ("tp", "tp-sp", "fsdp2", "pp")),
    cell("llama", "fsdp2", "full", 2, "keep-gathered"),
    # Muon gathers matrices, but not stacks that are cut between their experts.
    *(cell(family, "fsdp2", "full", 2, "muon") for family in ("llama", "qwen3_moe")),
    cell("llama", "ddp", "full", 2, "muon"),
    # 8-bit AdamW sends nothing.
    *(cell("llama", layout, "full", 2, "adamw8bit") for layout in ("zero1", "fsdp2", "tp")),
    # A recomputation repeats what its forward sends, except after its last product, which a norm
    # follows in olmo2. Autocast halves what blocks return, unless experts are added up.
    *(cell("llama", "tp-sp", mode, 2, "checkpointing") for mode in ("lora", "full")),
    cell("llama", "tp", "full", 2, "operators"),
    cell("olmo2", "tp", "full", 2, "checkpointing"),
    cell("llama", "tp-sp", "full", 2, "bfloat16"),
    cell("jamba", "tp", "lora", 2, "bfloat16"),
    # What is gathered is what is stored.
    *(cell("qwen3_5_text", "fsdp2", "lora", 2, base) for base in ("nf4", "int8", "mxfp4")),
    cell("kimi_linear", "fsdp2-tp", "lora", 4, "nf4"),
    cell("granitemoehybrid", "fsdp2-ep", "lora", 4, "fp8"),
    # A recurrent layer's block sends what an attention layer's does: nothing is summed for its
    # states, gates or norms.
    *(
        cell("qwen3_5_text", layout, mode, 2)
        for layout, mode in (("tp", "full"), ("tp-sp", "lora"))
    ),
    *(cell(family, "tp", "lora", 2) for family in ("nemotron_h", "jet_nemotron")),
    # Some add a few numbers up within a block, and Falcon-H1 has two mixers side by side.
    *(cell(family, "tp-sp", "lora", 2) for family in ("olmo_hybrid", "jamba", "falcon_h1")),
    # Rates that tp shards have no other dim for fsdp2 or zero1; a tied weight has two stages.
    *(cell("qwen3_5_text", layout, "full", 4) for layout in ("fsdp2-tp", "zero1-tp")),
    *(cell("qwen3_5_text", name, "full", 4, "tied") for name in ("pp-fsdp2", "pp-zero1")),
    # 2 key/value heads, and 2 groups of Mamba2, are held by two of 4 ranks each.
    cell("jamba", "tp", "full", 4),
    *(cell("granitemoehybrid", "tp", mode, 4) for mode in ("lora", "full")),
    # Each kind of state and of convolution, a window, routers, and documents, which change nothing.
    cell("qwen3_5_text", "cp", "lora", 2),
    cell("qwen3_5_text", "cp", "full", 4, "isolated"),
    *(cell("qwen3_5_text", "cp", "lora", 2, name) for name in ("checkpointing", "gather")),
    *(cell(family, "cp", "full", 2) for family in ("jamba", "kimi_linear", "qwen3_moe")),
    *(
        cell(family, "cp", "lora", 2)
        for family in ("falcon_h1", "jet_nemotron", "granitemoehybrid")
    ),
    *(cell(family, "cp", "full", 4) for family in ("lfm2", "qwen3")),
    *(cell("llama", "cp", mode, 4, way) for way, mode in (("ring", "lora"), ("gather", "full"))),
    cell("jamba", "cp", "lora", 2, "bfloat16"),
    cell("qwen3_next", "cp", "lora", 2, "upper"),
    # Beside other axes: a group of convolution channels, or a key/value head, that ranks share.
    *(cell(family, "cp-tp", "full", 4) for family in ("qwen3_5_text", "granitemoehybrid")),
    *(cell(family, "cp-tp-sp", "lora", 4) for family in ("kimi_linear", "jamba")),
    *(cell(family, "pp-cp", "full", 4) for family in ("qwen3_5_text", "qwen3_moe")),
    cell("qwen3", "pp-cp", "lora", 4),
    *(cell("llama", layout, "lora", 4) for layout in ("ddp-cp", "zero1-cp", "hsdp-cp")),
    *(cell("qwen3_5_text", "fsdp2-cp", mode, 4) for mode in ("lora", "full")),
    *(cell("llama", layout, "full", 4) for layout in ("zero2-cp", "fsdp1-cp")),
    *(cell("llama", layout, "full", 8) for layout in ("fsdp2-cp-tp", "pp-fsdp2-cp", "pp-cp-tp-sp")),
    *WITH_EXPERTS,
    # DoRA adds up squares of parts of rows.
    *(
        replace(cell(family, layout, "lora", nproc, variant), dora=True)
        for family, layout, nproc, variant in (
            ("llama", "tp", 2, ""),
            ("llama", "tp-sp", 2, "checkpointing"),
            ("qwen3_5_text", "tp", 2, "operators"),
            ("jamba", "tp", 4, ""),
            ("llama", "fsdp2-tp", 4, ""),
            ("llama", "zero1", 2, ""),
        )
    ),
]


LATER = (
    # Of each layout over data alone one mode; adapters beside a head are counted below.
    *(cell("llama", name, "lora", 2) for name in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "pp")),
    *(cell("llama", layout, "full", ALONE[layout]) for layout in ("hsdp", "tp-sp")),
    cell("llama", "fsdp1", "lora", 2, "head"),
    *(cell("llama", layout, "lora", 2, "upper") for layout in ("tp", "tp-sp")),
    *(cell("llama", layout, "full", 2, "muon") for layout in ("fsdp2", "ddp")),
    *(cell("llama", layout, "full", 2, "adamw8bit") for layout in ("zero1", "fsdp2", "tp")),
    cell("llama", "tp-sp", "full", 2, "checkpointing"),
    cell("qwen3_5_text", "fsdp2", "lora", 2, "int8"),
    cell("kimi_linear", "fsdp2-tp", "lora", 4, "nf4"),
    cell("granitemoehybrid", "fsdp2-ep", "lora", 4, "fp8"),
    cell("qwen3_5_text", "tp", "full", 2),
    cell("qwen3_5_text", "tp-sp", "lora", 2),
    *(cell(family, "tp", "lora", 2) for family in ("nemotron_h", "jet_nemotron")),
    cell("jamba", "tp-sp", "lora", 2),
    *(cell("qwen3_5_text", layout, "full", 4) for layout in ("fsdp2-tp", "zero1-tp")),
    *(cell(family, "tp", "full", 4) for family in ("jamba", "granitemoehybrid")),
    # Rows cut over 4 ranks are counted without a model, too (test_neighbours.py,
    # test_context_attention.py).
    cell("qwen3_5_text", "cp", "full", 4, "isolated"),
    *(cell(family, "cp", "full", 2) for family in ("jamba", "kimi_linear")),
    cell("falcon_h1", "cp", "lora", 2),
    cell("qwen3_next", "cp", "lora", 2, "upper"),
    *(cell(family, "cp", "full", 4) for family in ("lfm2", "qwen3")),
    cell("llama", "cp", "full", 4, "gather"),
    cell("qwen3_5_text", "cp-tp", "full", 4),
    *(cell(family, "cp-tp-sp", "lora", 4) for family in ("kimi_linear", "jamba")),
    cell("qwen3_moe", "pp-cp", "full", 4),
    cell("qwen3", "pp-cp", "lora", 4),
    *(cell("llama", layout, "lora", 4) for layout in ("zero1-cp", "hsdp-cp")),
    cell("qwen3_5_text", "fsdp2-cp", "full", 4),
    *(cell("llama", layout, "full", 4) for layout in ("zero2-cp", "fsdp1-cp")),
    # Of three axes, and of axes beside experts, each two are counted together in other cells.
    *(cell("llama", layout, "full", 8) for layout in ("fsdp2-cp-tp", "pp-fsdp2-cp", "pp-cp-tp-sp")),
    *(cell("qwen3_moe", f"{data}-ep", "full", nproc) for data, nproc in (("ddp", 2), ("zero1", 4))),
    cell("qwen3_moe", "ddp-ep", "lora", 2, "checkpointing"),
    cell("qwen3_moe", "ddp-ep", "lora", 4, "experts"),
    cell("qwen3_moe", "zero2-ep", "lora", 4),
    *(cell("qwen3_moe", "fsdp2-ep", "lora", 4, variant) for variant in ("", "upper")),
    cell("deepseek_v3", "fsdp2-ep", "full", 4),
    replace(cell("qwen3_moe", "zero1-ep", "lora", 4, "experts"), spread=4),
    *(cell("qwen3_moe", "hsdp-ep", "lora", nproc, "experts") for nproc in (4, 8)),
    cell("qwen3_moe", "cp-ep", "full", 4),
    cell("jamba", "ddp-cp-ep", "lora", 4),
    cell("qwen3_moe", "fsdp2-cp-ep", "full", 4),
    cell("nemotron_h", "ddp-ep-tp", "full", 4),
    cell("qwen3_moe", "ddp-ep-tp-sp", "lora", 4, "experts"),
    cell("qwen3_moe", "pp-ddp-ep", "lora", 4, "experts"),
    *(
        replace(cell(family, layout, "lora", nproc, variant), dora=True)
        for family, layout, nproc, variant in (
            ("llama", "tp", 2, ""),
            ("qwen3_5_text", "tp", 2, "operators"),
            ("jamba", "tp", 4, ""),
            ("llama", "fsdp2-tp", 4, ""),
            ("llama", "zero1", 2, ""),
        )
    ),
)
"""Cells of which `make test` counts the other mode, or one that is like it in all that is sent."""


def is_slow(cell: Cell) -> bool:
    of_pair = cell.family == "llama" and cell.layout in TOGETHER and cell.layout not in KEPT
    return of_pair or cell in LATER


TOGETHER_AT_MOST = 12
"""Cells that the same processes count, one after another: start-up takes longest."""
GROUPS = {
    cell: group
    for slow in (False, True)
    for group in groups([cell for cell in CELLS if is_slow(cell) == slow], TOGETHER_AT_MOST)
    for cell in group
}


@cache
def counted_together(group: tuple[Cell, ...]) -> dict[Cell, tuple[Counted, ...]]:
    """Return what each rank counted, for each cell of a group."""
    described.cache_clear()
    for cell in group:
        described(cell)
    return dict(zip(group, zip(*run_ranks(group[0].nproc, count_each, group)), strict=True))


def params() -> list[Any]:
    return [
        pytest.param(cell, id=cell.id, marks=[pytest.mark.slow] * is_slow(cell)) for cell in CELLS
    ]


def count_each(
    cells: tuple[Cell, ...], dtype: Dtype = "float32", accumulation: Accumulation = "model"
) -> list[Counted]:
    return [count(cell, dtype, accumulation) for cell in cells]


@pytest.mark.parametrize("cell", params())
def test_a_step_sends_what_the_formula_says(cell):
    for rank, counted in enumerate(counted_together(GROUPS[cell])[cell]):
        assert counted.sent == counted.predicted, f"rank {rank}"


def test_float32_adapters_beside_a_bfloat16_head():
    """Weights of two dtypes share no bucket."""
    layouts = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2")
    cells = tuple(cell("llama", layout, "lora", 2, "head") for layout in layouts)
    for rank, each in enumerate(run_ranks(2, count_each, cells, "bfloat16")):
        for layout, counted in zip(layouts, each, strict=True):
            assert counted.sent == counted.predicted, f"{layout}, rank {rank}"


def test_float32_sums_of_bfloat16_weights():
    cells = [cell("llama", layout, "full", 2) for layout in ("ddp", "zero1", "zero2", "fsdp2")]
    cells.append(cell("qwen3_moe", "ddp-ep", "full", 2))
    stages = [cell("qwen3_5_text", name, "full", 4, "tied") for name in ("pp-ddp", "pp-zero1")]
    for nproc, group in ((2, cells), (4, stages)):
        for rank, each in enumerate(
            run_ranks(nproc, count_each, tuple(group), "bfloat16", "float32")
        ):
            for one, counted in zip(group, each, strict=True):
                assert counted.sent == counted.predicted, f"{one.layout}, rank {rank}"


def test_every_layout_is_counted():
    layouts = {cell.layout for cell in CELLS}
    assert layouts - {*CONTEXT, *EXPERTS} == set(PROVEN) - {"single"}
    # Of compositions with `cp` those are counted that join another formula with it.
    assert {"cp", "cp-tp", "cp-tp-sp", "pp-cp", "ddp-cp", "zero1-cp", "fsdp1-cp"} <= layouts
    assert {"fsdp2-cp", "hsdp-cp"} <= layouts <= {*PROVEN, *CONTEXT, *EXPERTS}
    assert set(LATER) <= set(CELLS)
    # Each two axes of what is left to `make parity` here are counted together, or compared with
    # one process in `make test`, both with or without shared tokens.
    run_here = [cell.layout for cell in (*FAST, *(c for c in CELLS if not is_slow(c)))]
    left = [cell.layout for cell in filter(is_slow, CELLS)]
    assert {two for name in left for two in axes_together(name)} <= {
        two for name in run_here for two in axes_together(name)
    }


ALIKE = {"zero1": "ddp", "zero2": "ddp", "fsdp1": "fsdp2", "hsdp": "fsdp2"}


def axes_together(layout: str) -> set[frozenset[str]]:
    """Return each two axes of a layout; the axis of one that has no other.

    All layouts over data count as ddp or, if they shard weights, as fsdp2.
    """
    axes = [ALIKE.get(axis, axis) for axis in layout.removesuffix("-sp").split("-")]
    return {frozenset(two) for two in combinations(axes, 2)} or {frozenset(axes)}


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_block_is_one_collective_each_way(mode):
    """Check numbers of calls by hand: 4 layers of 2 blocks, 4 micro-batches.

    LoRA needs no gradient of the first block's input.
    """
    blocks, microbatches, below = 8, 4, int(mode == "lora")
    embedding, head, loss, norm = 1, 1, 2, 1
    per_microbatch = embedding + blocks + (blocks - below) + head + loss
    # LoRA has factors that are whole on every rank; their gradients are summed in one call.
    per_step = norm + (mode == "lora")
    where = cell("llama", "tp", mode, 2)
    for counted in counted_together(GROUPS[where])[where]:
        assert {key: calls for key, (calls, _) in counted.sent.items()} == {
            ("all-reduce", "tp"): microbatches * per_microbatch + per_step
        }
