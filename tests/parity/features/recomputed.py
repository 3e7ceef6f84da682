"""Cells whose layers differ in what is computed again of them, as a budget of memory chooses."""

from __future__ import annotations

from tests.parity.harness import Cell


def _mixed(family: str, layout: str, mode: str, nproc: int, schedule: str = "") -> Cell:
    """A cell of four layers at least, of which one is computed again by operators and two whole."""
    is_deep = family in ("granitemoehybrid", "kimi_linear")
    return Cell(family, layout, mode, nproc, "mixed", schedule, deep=is_deep)


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
FIXED = (_mixed("kimi_linear", "pp", "full", 2, schedule="1f1b"),)
