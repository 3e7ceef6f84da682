"""Cells whose weights and states lie on disk, under every layout that may have it."""

from __future__ import annotations

from functools import partial

from tests.parity.harness import FAMILIES, Cell

_disk = partial(Cell, variant="offload-disk")
_again = partial(Cell, variant="checkpointing-offload-disk")
_products = partial(Cell, variant="operators-offload-disk")

SOME = ("llama", "qwen3_5_text", "granitemoehybrid", "kimi_linear", "jet_nemotron")

CELLS = (
    *(_disk(family, "single", mode, 1) for family in FAMILIES for mode in ("lora", "full")),
    *(
        of(family, "single", mode, 1)
        for family in SOME
        for mode in ("lora", "full")
        for of in (_again, _products)
    ),
    *(
        _disk(family, layout, mode, 2)
        for family in SOME
        for layout in ("ddp", "tp", "tp-sp", "cp")
        for mode in ("lora", "full")
    ),
    *(
        of(family, "pp", mode, 2, schedule="1f1b")
        for family in SOME
        for mode in ("lora", "full")
        for of in (_disk, _again)
    ),
    *(
        _disk("qwen3_5_text", "pp", mode, 2, schedule=schedule)
        for mode in ("lora", "full")
        for schedule in (
            *("gpipe", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv"),
            "dualpipe-v",
        )
    ),
    *(_disk("qwen3_5_text", "single", mode, 1, dora=True) for mode in ("lora",)),
    *(_disk("granitemoehybrid", "tp", mode, 4) for mode in ("lora", "full")),
    *(
        _disk(family, layout, mode, 4)
        for family in SOME
        for layout in ("ddp-tp-sp", "ddp-cp")
        for mode in ("lora", "full")
    ),
    *(_disk("llama", "pp-ddp-tp", mode, 8, schedule="1f1b") for mode in ("lora", "full")),
    *(_disk("qwen3_moe", layout, m, 2) for layout in ("ddp-ep", "cp-ep") for m in ("lora", "full")),
)
FIXED = (
    _disk("qwen3_5_text", "single", "full", 1),
    _disk("kimi_linear", "single", "lora", 1),
    _again("granitemoehybrid", "single", "full", 1),
    _disk("qwen3_5_text", "pp", "full", 2, schedule="dualpipe-v"),
    _disk("granitemoehybrid", "tp-sp", "full", 2),
)
