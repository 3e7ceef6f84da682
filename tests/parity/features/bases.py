"""Cells of frozen weights in few bits, against plain copies of what is stored on one process."""

from __future__ import annotations

from tests.parity.harness import BASES, Cell

FAMILIES = (
    *("qwen3_5_text", "granitemoehybrid", "kimi_linear", "jamba", "lfm2_moe"),
    "jet_nemotron",
)
"""With every kind of layer between them; each has a model of wide matrices."""
PAIR = ("qwen3_5_text", "granitemoehybrid")
"""Families of forms of four bits whose codes take the ways of nf4's: one has experts."""
AS_PUBLISHED = {"mxfp4": ("gpt_oss",)}
"""Families whose experts are published in a form, with stacks [E, in, out]."""
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp2", "tp", "tp-sp", "cp")),
    ("pp", 2, "1f1b"),
    ("pp-fsdp2", 4, "1f1b"),
    ("pp-tp", 4, "1f1b"),
    *((layout, 4, "") for layout in ("hsdp", "fsdp2-tp", "fsdp2-tp-sp", "fsdp2-cp", "ddp-tp")),
)
WITH_EXPERTS = (("ddp-ep", 2, ""), ("fsdp2-ep", 4, ""), ("fsdp2-ep-tp", 8, ""))

CELLS = tuple(
    Cell(family, layout, "lora", nproc, base, schedule)
    for base in BASES
    for family in (FAMILIES if base in BASES[:3] else (*PAIR, *AS_PUBLISHED.get(base, ())))
    for layout, nproc, schedule in (
        ("single", 1, ""),
        *LAYOUTS,
        *(() if family in ("qwen3_5_text", "jet_nemotron") else WITH_EXPERTS),
    )
)
FIXED = (
    Cell("qwen3_5_text", "tp", "lora", 2, "nf4"),
    Cell("granitemoehybrid", "ddp-ep", "lora", 2, "nf4"),
    Cell("lfm2_moe", "fsdp2", "lora", 2, "int8"),
    Cell("jamba", "pp", "lora", 2, "fp8", "1f1b"),
    Cell("qwen3_5_text", "tp", "lora", 2, "mxfp4"),
    Cell("granitemoehybrid", "fsdp2-ep", "lora", 4, "mxfp4"),
    Cell("gpt_oss", "tp", "lora", 2, "mxfp4"),
    Cell("qwen3_5_text", "pp-tp", "lora", 4, "nvfp4", "1f1b"),
    Cell("granitemoehybrid", "fsdp2-ep", "lora", 4, "nvfp4"),
)
"""Of these `make test` runs."""
