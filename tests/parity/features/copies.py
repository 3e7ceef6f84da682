"""Cells that compute with copies of their weights in bfloat16: `training.cast: weights`.

Full training alone has it. Against one process that does the same, within what 16 bits change where
products are cut; elsewhere within the tolerances of float32.
"""

from __future__ import annotations

from tests.parity.harness import COPIES, Cell

FAMILIES = ("llama", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "nemotron_h", "gpt_oss")
"""Plain attention; Gated DeltaNet, in one that keeps weights in float32 too; KDA, Mamba2, and
experts beside them; attention with sinks."""
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp2", "tp", "tp-sp", "cp")),
    ("pp", 2, "1f1b"),
    *((layout, 4, "") for layout in ("hsdp", "fsdp2-tp", "fsdp2-cp", "zero1-tp")),
    ("pp-zero1", 4, "1f1b"),
    ("pp-fsdp2", 4, "1f1b"),
    ("pp-tp", 4, "1f1b"),
)
HALVED = ("pp", 2, "zbv")
"""For models of four layers."""
WITH_EXPERTS = (("ddp-ep", 2, ""), ("fsdp2-ep", 2, ""), ("fsdp2-ep", 4, ""))
CELLS = tuple(
    Cell(family, layout, "full", nproc, variant, schedule)
    for family in FAMILIES
    for layout, nproc, schedule, variant in (
        *((*place, COPIES) for place in LAYOUTS),
        *((*place, COPIES) for place in WITH_EXPERTS if family in FAMILIES[3:]),
        *((*HALVED, COPIES) for _ in range(family != "kimi_linear")),
        ("fsdp2", 2, "", f"checkpointing-{COPIES}"),
    )
)
FIXED = (
    Cell("llama", "fsdp2", "full", 2, COPIES),
    Cell("olmo_hybrid", "fsdp2", "full", 2, COPIES),  # with weights that stay in float32
    Cell("qwen3_5_text", "zero2", "full", 2, COPIES),
    Cell("nemotron_h", "tp-sp", "full", 2, COPIES),
    Cell("gpt_oss", "fsdp2-ep", "full", 2, COPIES),
    Cell("kimi_linear", "pp-fsdp2", "full", 4, COPIES, "1f1b"),
)
"""Of these `make test` runs."""
