"""Cells whose loss is one of pairs of answers, or of answers with a label: no sum over tokens.

The reference of dpo and kto is the base with its adapters off and, with `start` and in full
training, what is trained as the run found it.
"""

from __future__ import annotations

from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import FAMILIES as ALL_FAMILIES
from tests.parity.harness import Cell

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "qwen3_moe", "kimi_linear")
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "tp", "tp-sp")),
    ("cp", 2, ""),
    ("pp", 2, "1f1b"),
    *((layout, 4, "1f1b") for layout in ("pp-ddp", "pp-zero1", "pp-fsdp2", "pp-tp", "pp-cp")),
    *((layout, 4, "") for layout in ("ddp", "fsdp2", "hsdp", "fsdp2-tp", "fsdp2-cp", "cp-tp")),
)
HALVED = ("pp", 2, "zbv")
"""For models of four layers."""
WITH_EXPERTS = (("ddp-ep", 2, ""), ("zero1-ep", 4, ""), ("fsdp2-ep", 4, ""), ("fsdp2-ep-tp", 8, ""))
EXPERTS = ("granitemoehybrid", "qwen3_moe", "kimi_linear")
IN_FULL = ("llama", "qwen3_5_text")
OTHERS = ("dpo-start", "dpo-ipo", "orpo", "simpo", "kto", "kto-start")
FEW = (
    ("ddp", 2, ""),
    ("fsdp2", 2, ""),
    ("tp-sp", 2, ""),
    ("cp", 2, ""),
    ("pp", 2, "1f1b"),
    ("fsdp2-cp", 4, ""),
)
BY_ADAMW = (
    *((layout, 2, "") for layout in ("zero1", "zero2", "fsdp1", "fsdp2", "tp", "cp")),
    ("pp", 2, "1f1b"),
    ("pp-zero1", 4, "1f1b"),
    ("fsdp2-tp", 4, ""),
)
"""Layouts that split or repeat the states of AdamW."""

CELLS = (
    *(
        Cell(family, layout, mode, nproc, variant, schedule)
        for family in FAMILIES
        for mode, variant in (
            ("lora", "dpo"),
            ("lora", "kto"),
            *([("full", "dpo")] if family in IN_FULL else []),
        )
        for layout, nproc, schedule in (
            *LAYOUTS,
            *([HALVED] if family in ("llama", "qwen3_5_text", "qwen3_moe") else []),
            *(WITH_EXPERTS if family in EXPERTS else ()),
        )
    ),
    *(
        Cell(family, layout, mode, nproc, variant, schedule)
        for family in IN_FULL
        for variant in OTHERS
        for mode in (("full",) if variant == "kto" else ("lora", "full"))
        for layout, nproc, schedule in FEW
    ),
    *(
        Cell(family, layout, "lora", 2, "dpo", schedule)
        for family in ALL_FAMILIES
        if family not in FAMILIES and FAMILY_FACTS[family].keeps_documents_apart
        for layout, schedule in (("fsdp2", ""), ("tp", ""), ("cp", ""), ("pp", "1f1b"))
    ),
    *(
        Cell(family, layout, mode, nproc, "dpo-adamw", schedule)
        for family in IN_FULL
        for mode in ("lora", "full")
        for layout, nproc, schedule in BY_ADAMW
    ),
    *(
        Cell(family, layout, "full", 4, "simpo-adamw")
        for family in IN_FULL
        for layout in ("zero1-tp", "fsdp2-cp")
    ),
)
FIXED = (
    Cell("llama", "cp", "lora", 2, "dpo"),
    Cell("llama", "fsdp2", "full", 2, "dpo"),
    Cell("llama", "fsdp2-cp", "full", 4, "orpo"),
    Cell("qwen3_5_text", "tp-sp", "full", 2, "simpo"),
    Cell("qwen3_moe", "ddp", "lora", 2, "dpo"),
    Cell("qwen3_5_text", "pp", "lora", 2, "dpo", "1f1b"),
    Cell("llama", "fsdp2", "lora", 2, "dpo-start"),
    Cell("llama", "ddp", "full", 2, "dpo-ipo"),
    Cell("qwen3_5_text", "zero1", "full", 2, "dpo-adamw"),
    Cell("llama", "fsdp2-cp", "lora", 4, "kto"),
    Cell("qwen3_5_text", "pp", "lora", 2, "kto", "1f1b"),
    Cell("llama", "fsdp2", "full", 2, "kto"),
)
"""Of these `make test` runs, and plants bugs in."""
