"""Cells whose layers differ in what is computed again of them, as a budget of memory chooses."""

from __future__ import annotations

from functools import partial

from tests.parity.harness import Cell

_mixed = partial(Cell, variant="mixed")

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "kimi_linear", "jet_nemotron")
LAYOUTS = ("ddp", "zero2", "fsdp1", "fsdp2", "tp", "tp-sp", "cp")

CELLS = (
    *(
        _mixed(family, layout, mode, 2)
        for family in FAMILIES
        for layout in LAYOUTS
        for mode in ("lora", "full")
    ),
    *(
        _mixed(family, "pp", mode, 2, schedule=schedule)
        for family in FAMILIES
        for mode in ("lora", "full")
        for schedule in ("1f1b", "interleaved-1f1b")
    ),
    *(_mixed("qwen3_moe", "fsdp2-ep", mode, 2) for mode in ("lora", "full")),
)
FIXED = (
    _mixed("qwen3_5_text", "fsdp2", "lora", 2),
    _mixed("kimi_linear", "pp", "full", 2, schedule="1f1b"),
)
