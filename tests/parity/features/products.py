"""Cells whose linears multiply in 8 bits, against one process that does.

Most have a curve in the place of rounding, and the tolerances of float32: see `harness.curved`.
Those that round may differ by three times what 8 bits change on one process.
"""

from __future__ import annotations

from tests.parity.harness import CURVE, RECIPES, Cell

FAMILIES = ("qwen3_5_text", "granitemoehybrid", "kimi_linear", "lfm2_moe")
"""Gated DeltaNet, Mamba2, KDA, short convolutions; attention and MLPs; each has a model of wide
matrices."""
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "fsdp1", "fsdp2", "tp", "tp-sp", "cp")),
    ("pp", 2, "1f1b"),
    ("pp-fsdp2", 4, "1f1b"),
    ("pp-tp", 4, "1f1b"),
    *((layout, 4, "") for layout in ("tp", "hsdp", "fsdp2-tp", "fsdp2-tp-sp", "fsdp2-cp", "cp-tp")),
)
ROUNDED = (("ddp", 2, ""), ("fsdp2", 2, ""), ("tp", 2, ""), ("cp", 2, ""), ("pp", 2, "1f1b"))
HALVED = ("pp", 2, "zbv")
"""For models of four layers."""
WITH_EXPERTS = (("ddp-ep", 2, ""), ("fsdp2-ep-tp", 8, ""))
MODES = ("lora", "full")

CELLS = (
    *(
        Cell(family, layout, mode, nproc, recipe + CURVE, schedule)
        for recipe in RECIPES
        for family in FAMILIES
        for mode in MODES
        for layout, nproc, schedule in (
            *LAYOUTS,
            *([HALVED] if family in ("qwen3_5_text", "lfm2_moe") else []),
            *(() if family == "qwen3_5_text" else WITH_EXPERTS),
        )
    ),
    *(
        Cell(family, layout, mode, nproc, recipe, schedule)
        for recipe in RECIPES
        for family in FAMILIES
        for mode in MODES
        for layout, nproc, schedule in ROUNDED
    ),
)
FIXED = (
    Cell("qwen3_5_text", "tp", "lora", 2, "tensorwise-curve"),
    Cell("granitemoehybrid", "tp", "full", 4, "rowwise-curve"),  # groups and heads are shared
    Cell("kimi_linear", "tp-sp", "lora", 2, "tensorwise-curve"),  # a linear is replicated
    Cell("kimi_linear", "cp", "full", 2, "rowwise-curve"),
    Cell("lfm2_moe", "fsdp2", "full", 2, "tensorwise-curve"),
    Cell("qwen3_5_text", "pp", "full", 2, "rowwise-curve", "zbv"),
    Cell("granitemoehybrid", "ddp", "lora", 2, "tensorwise"),
)
"""Of these `make test` runs."""
