"""Which cells there are of tensor parallelism; part of `cells.ALL`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.base.schedule.orders import ORDERS
from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import FAMILIES, STILL, TIED, Cell
from tests.parity.layouts import WITH_TENSOR

MODES = ("lora", "full")
PROCESSES = {"tp": 2, "ddp-tp": 4, "zero1-tp": 4, "fsdp2-tp": 4, "pp-tp": 4}
"""By layout, with or without sequence parallelism: as many as give each axis 2 ranks, or 8."""
HALF = f"float16-{STILL}"
"""Variant: products in float16. The first steps of a llama overflow, and the last one does not."""
NARROW = ("falcon_h1", "kimi_linear")
"""Their tiny models cannot be dealt out to 4 ranks. Of the others, some have fewer key/value heads
or groups, which are then held by two ranks each."""


def cell(
    family: str, layout: str, mode: str, variant: str = "", nproc: int = 0, schedule: str = "1f1b"
) -> Cell:
    """A cell of a layout with `tp` in it."""
    plain = layout.removesuffix("-sp")
    in_pipeline = plain.startswith("pp")
    return Cell(
        family,
        layout,
        mode,
        nproc or PROCESSES.get(plain, 8),
        variant,
        schedule if in_pipeline else "",
    )


def _plain() -> Iterator[Cell]:
    for mode in MODES:
        for family in FAMILIES:
            yield from (cell(family, layout, mode) for layout in WITH_TENSOR)
        for family in [name for name in FAMILIES if name not in NARROW]:
            yield from (cell(family, layout, mode, nproc=4) for layout in ("tp", "tp-sp"))
        for schedule in ORDERS:
            if schedule != "1f1b":
                yield from (
                    cell(family, "pp-tp", mode, schedule=schedule)
                    for family in ("llama", "qwen3_next")
                )
                yield cell("llama", "pp-tp-sp", mode, schedule=schedule)


def _variants() -> Iterator[Cell]:
    for layout in ("tp", "tp-sp"):
        for mode in MODES:
            yield from (cell(family, layout, mode, "tied") for family in TIED)
            yield from (
                cell(family, layout, mode, "bfloat16") for family in ("llama", "olmo_hybrid")
            )
        yield from (
            cell(family, layout, "full", "operators") for family in ("llama", "qwen3_5_text")
        )
        for family in FAMILIES:
            yield cell(family, layout, "lora", "checkpointing")
            if FAMILY_FACTS[family].keeps_documents_apart:
                yield cell(family, layout, "lora", "isolated")
            if FAMILY_FACTS[family].named("experts"):
                yield cell(family, layout, "lora", "experts")
        for family in ("llama", "qwen3_5_text", "gpt2", "jet_nemotron"):
            yield cell(family, layout, "lora", "dropout")
        yield cell("llama", layout, "lora", "head")
    for layout in ("tp", "tp-sp", "ddp-tp", "zero1-tp", "fsdp2-tp", "pp-tp"):
        yield from (cell(family, layout, "full", HALF) for family in ("llama", "gpt2"))
        yield cell("qwen3_5_text", layout, "lora", HALF)
    for schedule in ORDERS:
        yield cell("qwen3_5_text", "pp-tp", "full", "tied", schedule=schedule)
    for layout in ("ddp-tp", "fsdp2-tp", "pp-tp-sp"):
        yield cell("qwen3_5_text", layout, "full", "tied")
        yield cell("llama", layout, "lora", "dropout")
        yield cell("qwen3_next", layout, "lora", "checkpointing")
    for layout in ("zero1-tp", "pp-zero1-tp"):
        yield cell("qwen3_5_text", layout, "full", "tied")


CELLS = (*_plain(), *_variants())
# Where tests/parity/test_tensor_sensitivity.py plants bugs, and the variants.
FIXED = (
    cell("llama", "tp", "lora"),
    cell("llama", "tp-sp", "lora"),
    cell("llama", "tp-sp", "full", "bfloat16"),
    cell("llama", "tp", "full", HALF),
    cell("llama", "pp-tp", "full", HALF),
    cell("gpt2", "fsdp2-tp", "full", HALF),
    cell("qwen3_5_text", "tp", "full"),
    cell("qwen3_5_text", "tp-sp", "full", "tied"),
    cell("qwen3_next", "tp", "full"),
    cell("qwen3_next", "tp-sp", "lora", "experts"),
    cell("qwen3_moe", "tp", "full"),
    cell("olmo_hybrid", "tp", "full"),
    cell("gpt2", "tp", "full"),
    cell("gemma3_text", "tp", "full"),
    cell("cohere2", "tp", "full"),
    cell("apertus", "tp", "full"),
    cell("gpt_oss", "tp", "full"),
    cell("phi3", "tp", "full"),
    cell("llama", "tp", "lora", "dropout"),
    cell("granitemoehybrid", "tp", "full", nproc=4),
    cell("llama", "tp-sp", "full", "operators"),
    cell("jet_nemotron", "tp", "full"),
    cell("qwen3_next", "fsdp2-tp", "full"),
    cell("llama", "ddp-tp", "lora"),
    cell("llama", "pp-tp", "full", schedule="zbv"),
    cell("llama", "pp-fsdp2-tp-sp", "full"),
)
