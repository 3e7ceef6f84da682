"""Cells in which each row of an adapted matrix has a trained length (DoRA)."""

from __future__ import annotations

from functools import partial

from tests.parity.features.pipelines import FEW_LAYERS
from tests.parity.harness import Cell

_cell = partial(Cell, mode="lora", dora=True)

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "jamba", "gpt2")
LAYOUTS = (
    *((layout, 2, "") for layout in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "tp", "tp-sp")),
    ("cp", 2, ""),
    *(("pp", 2, schedule) for schedule in ("1f1b", "zbv")),
    *((layout, 4, "") for layout in ("hsdp", "fsdp2-tp", "zero1-tp", "fsdp2-cp")),
    *((layout, 4, "1f1b") for layout in ("pp-zero1", "pp-fsdp2", "pp-tp")),
)
WITH_EXPERTS = (("ddp-ep", 2), ("fsdp2-ep", 4))
"""Layouts that shard frozen experts, beside adapters on everything else."""

CELLS = (
    *(
        _cell(
            family,
            layout,
            nproc=nproc,
            schedule=schedule,
            deep=schedule == "zbv" and family in FEW_LAYERS,
        )
        for family in FAMILIES
        for layout, nproc, schedule in LAYOUTS
    ),
    *(
        _cell(family, layout, nproc=nproc)
        for family in ("granitemoehybrid", "jamba")
        for layout, nproc in WITH_EXPERTS
    ),
    *(
        _cell("qwen3_5_text", layout, nproc=nproc, variant=base)
        for base in ("nf4", "int8", "fp8")
        for layout, nproc in (("fsdp2", 2), ("tp", 2), ("zero1", 2))
    ),
    *(
        _cell("qwen3_5_text", "fsdp2", nproc=2, variant=variant)
        for variant in ("checkpointing", "operators", "compile", "head", "offload-all")
    ),
    _cell("llama", "fsdp1", nproc=2, variant="naive"),
    *(_cell("llama", "tp", nproc=2, variant=variant) for variant in ("checkpointing", "bfloat16")),
    *(
        _cell(family, "fsdp2-tp", nproc=4)
        for family in ("nemotron_h", "falcon_h1", "kimi_linear", "jet_nemotron")
    ),
    # Adapters on attention alone, in a family of whose MLPs PEFT takes the linears for experts.
    *(_cell("qwen3_moe", layout, nproc=2, variant="upper") for layout in ("ddp-ep", "tp")),
)
FIXED = (
    _cell("llama", "tp", nproc=2),
    _cell("gpt2", "tp-sp", nproc=2),
    _cell("jamba", "tp", nproc=2),
    _cell("qwen3_5_text", "pp", nproc=2, schedule="zbv"),
    _cell("qwen3_5_text", "tp", nproc=2, variant="nf4"),
    _cell("granitemoehybrid", "fsdp1", nproc=2),
)
"""Of these `make test` runs."""
