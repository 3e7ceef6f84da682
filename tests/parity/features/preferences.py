"""Cells whose loss is one of pairs of answers: it is no sum over tokens."""

from __future__ import annotations

from tests.parity.harness import FAMILIES as ALL_FAMILIES
from tests.parity.harness import PAIRS, Cell

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "qwen3_moe", "kimi_linear")
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "tp", "tp-sp")),
    ("cp", 2, ""),
    ("pp", 2, "1f1b"),
    *((layout, 4, "1f1b") for layout in ("pp-ddp", "pp-zero1", "pp-fsdp2", "pp-tp", "pp-cp")),
    *((layout, 4, "") for layout in ("ddp", "fsdp2", "hsdp", "fsdp2-tp", "fsdp2-cp", "cp-tp")),
)
CELLS = tuple(
    Cell(family, layout, "lora", nproc, "dpo", schedule)
    for family in FAMILIES
    for layout, nproc, schedule in LAYOUTS
)
FIXED = ()
