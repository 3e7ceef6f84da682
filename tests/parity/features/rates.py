"""Cells in which LoRA's factors B have a learning rate of their own (LoRA+)."""

from __future__ import annotations

from functools import partial

from tests.parity.harness import Cell

_cell = partial(Cell, mode="lora", faster_b=True)

LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "tp", "tp-sp")),
    ("cp", 2, ""),
    ("pp", 2, "1f1b"),
    *((layout, 4, "") for layout in ("hsdp", "fsdp2-tp", "zero1-tp", "fsdp2-cp")),
    ("pp-fsdp2", 4, "1f1b"),
)
WITH_EXPERTS = (("zero1", 2), ("fsdp1", 2), ("fsdp2", 2), ("ddp-ep", 2), ("fsdp2-ep", 4))

CELLS = (
    *(
        _cell(family, layout, nproc=nproc, schedule=schedule)
        for family in ("llama", "qwen3_5_text", "granitemoehybrid")
        for layout, nproc, schedule in LAYOUTS
    ),
    *(
        _cell("qwen3_next", layout, nproc=nproc, variant=variant)
        for variant in ("experts", "shared")
        for layout, nproc in WITH_EXPERTS
    ),
    _cell("llama", "fsdp1", nproc=2, variant="naive"),
    _cell("llama", "fsdp2", nproc=2, variant="head"),
    _cell("llama", "fsdp2", nproc=2, variant="offload-optimizer"),
)
FIXED = (
    _cell("llama", "fsdp1", nproc=2, variant="naive"),
    _cell("llama", "tp", nproc=2),
    _cell("llama", "pp", nproc=2, schedule="1f1b"),
    _cell("qwen3_next", "ddp-ep", nproc=2, variant="experts"),
)
"""Of these `make test` runs."""
