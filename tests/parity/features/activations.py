"""Cells that keep activations in CPU memory, under every strategy and axis."""

from __future__ import annotations

from functools import partial

from tests.parity.harness import Cell

_kept = partial(Cell, variant="activations")
_inputs = partial(Cell, variant="checkpointing-activations")
_compiled = partial(Cell, variant="activations-compile")

FAMILIES = ("llama", "qwen3_5_text", "granitemoehybrid", "kimi_linear", "jet_nemotron")
LAYOUTS = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "hsdp", "tp", "tp-sp", "cp")

CELLS = (
    *(
        of(family, layout, mode, 2)
        for family in FAMILIES
        for layout in LAYOUTS
        for mode, of in (("lora", _kept), ("full", _kept), ("lora", _inputs))
    ),
    *(
        of(family, "pp", mode, 2, schedule=schedule)
        for family in FAMILIES
        for mode in ("lora", "full")
        for schedule, of in (("gpipe", _kept), ("1f1b", _kept), ("1f1b", _inputs))
    ),
    *(
        _kept("qwen3_5_text", "pp", mode, 2, schedule=schedule)
        for mode in ("lora", "full")
        for schedule in (
            *("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipe-v"),
        )
    ),
    *(
        _kept(family, layout, mode, 4)
        for family in FAMILIES
        for layout in ("fsdp2-tp", "fsdp2-cp", "cp-tp-sp")
        for mode in ("lora", "full")
    ),
    *(
        _kept(f, "pp-fsdp2", mode, 4, schedule="1f1b")
        for f in FAMILIES
        for mode in ("lora", "full")
    ),
    *(
        of("qwen3_moe", layout, mode, 2)
        for layout in ("ddp-ep", "cp-ep", "fsdp2-ep")
        for mode, of in (("lora", _kept), ("full", _kept), ("lora", _inputs))
    ),
    *(
        _compiled("llama", layout, mode, 2)
        for layout in ("ddp", "fsdp2")
        for mode in ("lora", "full")
    ),
)
FIXED = (
    _kept("qwen3_5_text", "fsdp2", "full", 2),
    _compiled("llama", "fsdp2", "lora", 2),
    _kept("granitemoehybrid", "tp-sp", "lora", 2),
    _kept("qwen3_5_text", "pp", "full", 2, schedule="zbv"),
)
