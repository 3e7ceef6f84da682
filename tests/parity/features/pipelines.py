"""Which cells there are of pipelines; part of `cells.ALL`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.base.layouts import data_parts, parallel_of, strategy_facts
from shardwise.base.schedule.orders import ORDERS
from shardwise.base.schedules import HALVING, V_SHAPED
from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import FAMILIES, Cell
from tests.parity.layouts import PROVEN

MODES = ("lora", "full")
SINGLE = ("gpipe", "1f1b")  # one stage per rank; the others have two
WHOLE = tuple(schedule for schedule in ORDERS if schedule not in HALVING)
FEW_LAYERS = (
    "granitemoehybrid",
    "falcon_h1",
    "jamba",
    "kimi_linear",
)  # two or three in the tiny models
SPINE = ("llama", "qwen3_5_text", "qwen3_next", "olmo_hybrid", "nemotron_h")
WITH_DATA = tuple(layout for data in data_parts() if (layout := f"pp-{data}") in PROVEN)
"""Two stages' ranks, and as many replicas or shards as there are ranks left."""
V_SHARED = tuple(
    layout for layout in WITH_DATA if "weights" not in strategy_facts(parallel_of(layout)).sharded
)
"""Those that a tied weight has in a V, where one rank has both ends: two shards share none."""


def cell(
    family: str,
    schedule: str,
    mode: str,
    nproc: int = 2,
    variant: str = "",
    split: tuple[int, ...] = (),
) -> Cell:
    """A plain pipeline, of a deeper model where there are too many stages for the other.

    DualPipe-V on 4 ranks needs 8 micro-batches, of 2 rows.
    """
    deep = nproc == 4 and (sum(split) > 4 if split else schedule not in SINGLE)
    deep = deep or (family in FEW_LAYERS and schedule not in SINGLE)
    return Cell(
        family, "pp", mode, nproc, variant, schedule, split, deep, rows=16 if nproc == 4 else 8
    )


def _plain() -> Iterator[Cell]:
    for schedule in ORDERS:
        for mode in MODES:
            for nproc in (2, 4):
                yield from (cell(family, schedule, mode, nproc) for family in SPINE)
            for layout in WITH_DATA:
                yield from (
                    Cell(family, layout, mode, 4, schedule=schedule)
                    for family in ("llama", "qwen3_next")
                )
    for mode in MODES:
        for family in FAMILIES:
            if family not in SPINE:
                yield from (
                    cell(family, schedule, mode)
                    for schedule in ORDERS
                    if mode == "lora" or schedule == "1f1b"
                )
            if family not in ("llama", "qwen3_next"):
                yield from (Cell(family, layout, mode, 4, schedule="1f1b") for layout in WITH_DATA)


def _uneven() -> Iterator[Cell]:
    """Stages with one layer and with three, with nothing but the embedding, and with nothing but
    the head."""
    for family, modes in (("llama", MODES), ("qwen3_next", ("lora",))):
        for mode in modes:
            for schedule in SINGLE:
                yield from (
                    cell(family, schedule, mode, split=split)
                    for split in ((3, 1), (1, 3), (4, 0), (0, 4))
                )
                yield cell(family, schedule, mode, 4, split=(0, 1, 3, 0))
                yield cell(family, schedule, mode, 4, split=(3, 2, 2, 1))
            for schedule in ORDERS:
                if schedule not in SINGLE:
                    yield from (
                        cell(family, schedule, mode, split=split)
                        for split in ((0, 2, 2, 0), (1, 1, 2, 0))
                    )
                    yield cell(family, schedule, mode, 4, split=(0, 1, 1, 1, 1, 2, 2, 0))


def _few() -> Iterator[Cell]:
    """Two micro-batches for four ranks, where the schedule can."""
    for schedule in ORDERS:
        if schedule not in ("1f1b", "dualpipe-v"):
            yield from (replace(cell("llama", schedule, mode, 4), rows=4) for mode in MODES)


def _partly_trained() -> Iterator[Cell]:
    """Adapters on two of the four layers: stages with nothing to train, above the others or below
    them."""
    for schedule in ORDERS:
        for family in ("llama", "qwen3_next"):
            yield from (
                cell(family, schedule, "lora", variant=variant) for variant in ("upper", "lower")
            )
        if schedule in SINGLE:
            yield from (
                cell("llama", schedule, "lora", 4, variant) for variant in ("upper", "lower")
            )
        for layout in WITH_DATA:
            yield Cell("llama", layout, "lora", 4, "upper", schedule)


def _variants() -> Iterator[Cell]:
    for schedule in ORDERS:
        for mode in MODES:
            yield cell("qwen3_5_text", schedule, mode, variant="tied")
            layouts = V_SHARED if schedule in V_SHAPED else WITH_DATA
            yield from (
                Cell("qwen3_5_text", layout, mode, 4, "tied", schedule) for layout in layouts
            )
        yield from (
            cell(family, schedule, "lora", variant="dropout")
            for family in ("llama", "qwen3_5_text")
        )
        yield cell("llama", schedule, "lora", variant="head")
        yield cell("llama", schedule, "full", variant="float16")
        yield cell("llama", schedule, "full", variant="bfloat16")
    for schedule in WHOLE:
        yield from (
            cell(family, schedule, "lora", variant="checkpointing")
            for family in ("llama", "qwen3_next")
        )
        yield cell("qwen3_5_text", schedule, "full", variant="operators")
        yield cell("llama", schedule, "lora", variant="checkpointing-dropout")
        yield cell("olmo_hybrid", schedule, "full", variant="checkpointing-isolated")
        yield cell("llama", schedule, "lora", variant="compile")
        yield Cell("olmo_hybrid", "pp-fsdp2", "full", 4, "keep-gathered", schedule)
        yield Cell("olmo_hybrid", "pp-fsdp2", "lora", 4, "checkpointing", schedule)
    yield from (cell("jet_nemotron", "1f1b", mode, variant="tied") for mode in MODES)
    for family in FAMILIES:
        yield cell(family, "1f1b", "full", variant="checkpointing")
        if FAMILY_FACTS[family].keeps_documents_apart:
            yield from (
                cell(family, schedule, "lora", variant="isolated") for schedule in ("1f1b", "zbv")
            )
    yield from (cell("qwen3_5_text", schedule, "full", 4, "tied") for schedule in SINGLE)
    for schedule, rows in (("1f1b", 8), ("interleaved-1f1b", 8), ("zbv", 16), ("dualpipe-v", 16)):
        yield from (
            Cell("llama", "pp-hsdp", mode, 8, schedule=schedule, rows=rows) for mode in MODES
        )


CELLS = (*_plain(), *_uneven(), *_few(), *_partly_trained(), *_variants())
# Where tests/parity/test_pipeline_sensitivity.py plants bugs, and the other shapes and variants.
FIXED = (
    cell("llama", "1f1b", "lora"),
    cell("llama", "gpipe", "full"),
    cell("qwen3_5_text", "1f1b", "full", variant="tied"),
    cell("granitemoehybrid", "1f1b", "lora"),
    cell("afmoe", "1f1b", "lora"),
    cell("gpt2", "1f1b", "full"),
    cell("qwen3_next", "interleaved-1f1b", "full"),
    cell("llama", "zbv", "lora", variant="upper"),
    cell("llama", "1f1b", "lora", variant="lower"),
    Cell("llama", "pp-ddp", "lora", 4, schedule="zbv"),
    Cell("llama", "pp-fsdp2", "full", 4, schedule="1f1b"),
    Cell("qwen3_5_text", "pp-zero1", "full", 4, "tied", "1f1b"),
    cell("llama", "1f1b", "full", 4, split=(0, 1, 3, 0)),
    replace(cell("llama", "interleaved-zero-bubble", "lora", 4), rows=4),
    cell("qwen3_5_text", "interleaved-zero-bubble", "lora", variant="dropout"),
    cell("llama", "1f1b", "lora", variant="checkpointing-dropout"),
    cell("olmo_hybrid", "1f1b", "full", variant="checkpointing-isolated"),
    cell("llama", "zbv", "full", variant="bfloat16"),
)
