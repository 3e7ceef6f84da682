"""Cells whose optimizer, or all that is sharded, is on the CPU, beside every axis.

Those of fsdp2 and hsdp alone are in cells.py.
"""

from __future__ import annotations

from functools import partial

from tests.parity.harness import Cell

_optimizer = partial(Cell, variant="offload-optimizer")
_all = partial(Cell, variant="offload-all")

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "nemotron_h", "olmo_hybrid")

CELLS = (
    *(
        _optimizer(family, layout, mode, 2)
        for family in FAMILIES
        for layout in ("ddp", "tp", "tp-sp", "cp")
        for mode in ("lora", "full")
    ),
    *(
        _optimizer(family, "pp", mode, 2, schedule="1f1b")
        for family in FAMILIES
        for mode in ("lora", "full")
    ),
    *(
        of(family, layout, mode, 4)
        for family in FAMILIES
        for layout in ("fsdp2-tp", "fsdp2-tp-sp")
        for mode, of in (("full", _optimizer), ("full", _all), ("lora", _all))
    ),
    *(
        of(family, "pp-fsdp2", mode, 4, schedule="1f1b")
        for family in FAMILIES
        for mode, of in (("full", _optimizer), ("full", _all), ("lora", _all))
    ),
    *(
        _optimizer("qwen3_5_text", "pp-ddp", "full", 4, schedule=schedule)
        for schedule in ("gpipe", "interleaved-1f1b")
    ),
    *(_optimizer("llama", "pp", "full", 2, schedule=s) for s in ("zbv", "dualpipe-v")),
    # Rows that several ranks of tp hold, and numbers per head that fsdp2 leaves whole.
    *(_optimizer("granitemoehybrid", "tp", mode, 4) for mode in ("lora", "full")),
    *(of("llama", "hsdp-tp", "full", 8) for of in (_optimizer, _all)),
    *(of("llama", "pp-fsdp2-tp", "full", 8, schedule="1f1b") for of in (_optimizer, _all)),
    *(_optimizer("qwen3_moe", layout, "full", 2) for layout in ("ddp-ep", "cp-ep")),
    *(of("qwen3_moe", "fsdp2-ep", "full", 4) for of in (_optimizer, _all)),
)
FIXED = (
    _optimizer("granitemoehybrid", "tp", "full", 2),
    _all("llama", "fsdp2-tp", "full", 4),
    _all("llama", "pp-fsdp2", "full", 4, schedule="1f1b"),
)
