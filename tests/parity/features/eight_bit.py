"""Cells in which AdamW keeps moments in 8 bits, against one process that does.

Most have a curve in the place of rounding, and the tolerances of float32: see
`harness.bent_moment`. Those that round may differ by three times what 8 bits change on one process.
"""

from __future__ import annotations

from tests.parity.harness import CURVE, EIGHT_BIT, Cell

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "qwen3_moe", "kimi_linear")
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp2", "tp", "tp-sp", "cp")),
    ("pp", 2, "1f1b"),
    *((layout, 4, "1f1b") for layout in ("pp-ddp", "pp-zero1", "pp-fsdp2", "pp-tp")),
    *((layout, 4, "") for layout in ("zero2", "fsdp2", "hsdp", "tp", "zero1-tp", "fsdp2-tp")),
    *((layout, 4, "") for layout in ("fsdp2-tp-sp", "fsdp2-cp", "cp-tp")),
)
HALVED = ("pp", 2, "zbv")
"""For models of four layers."""
WITH_EXPERTS = (("ddp-ep", 2, ""), ("zero1-ep", 4, ""), ("fsdp2-ep", 4, ""), ("fsdp2-ep-tp", 8, ""))
ROUNDED = (("ddp", 2, ""), ("zero1", 2, ""), ("fsdp2", 2, ""), ("tp", 2, ""), ("pp", 2, "1f1b"))
MODES = ("lora", "full")
REFUSED = ("zero1-tp", "fsdp2-tp", "fsdp2-tp-sp", "fsdp2-ep-tp")
"""Under these, and on 4 ranks of tp, tiny kimi_linear would have parts of blocks on a rank."""

CELLS = (
    *(
        Cell(family, layout, mode, nproc, EIGHT_BIT + CURVE, schedule)
        for family in FAMILIES
        for mode in MODES
        for layout, nproc, schedule in (
            *LAYOUTS,
            *([HALVED] if family in ("llama", "qwen3_5_text", "qwen3_moe") else []),
            *(WITH_EXPERTS if family in ("granitemoehybrid", "qwen3_moe", "kimi_linear") else ()),
        )
        if family != "kimi_linear" or (layout not in REFUSED and (layout, nproc) != ("tp", 4))
    ),
    *(
        Cell(family, layout, mode, nproc, EIGHT_BIT, schedule)
        for family in FAMILIES
        for mode in MODES
        for layout, nproc, schedule in ROUNDED
    ),
)
FIXED = (
    Cell("llama", "fsdp2", "full", 2, "adamw8bit-curve"),
    Cell("qwen3_5_text", "zero1", "lora", 2, "adamw8bit-curve"),
    Cell("granitemoehybrid", "tp", "full", 4, "adamw8bit-curve"),  # groups and heads are shared
    Cell("qwen3_moe", "ddp-ep", "full", 2, "adamw8bit-curve"),
    Cell("qwen3_5_text", "tp", "full", 2, "adamw8bit-curve"),
    Cell("llama", "pp", "full", 2, "adamw8bit-curve", "zbv"),
    Cell("qwen3_5_text", "cp", "full", 2, "adamw8bit-curve"),
    Cell("granitemoehybrid", "ddp", "full", 2, "adamw8bit"),
)
"""Of these `make test` runs."""
