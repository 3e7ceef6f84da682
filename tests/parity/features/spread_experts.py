"""Which cells there are of expert parallelism; part of `cells.ALL`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.base.schedule.orders import ORDERS
from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import BALANCED, FAMILIES, STILL, Cell

WITH_EXPERTS = tuple(family for family in FAMILIES if FAMILY_FACTS[family].named("experts"))
COMPOSED = {
    **dict.fromkeys(("ddp-ep", "zero1-ep", "zero2-ep", "fsdp2-ep"), (2, 4)),
    "hsdp-ep": (4,),
    **dict.fromkeys(("cp-ep", "ddp-cp-ep", "fsdp2-cp-ep"), (4,)),
    **dict.fromkeys(("ddp-ep-tp", "fsdp2-ep-tp", "ddp-ep-tp-sp"), (4,)),
    **dict.fromkeys(("pp-ddp-ep", "pp-zero1-ep", "pp-fsdp2-ep"), (4,)),
    **dict.fromkeys(("pp-fsdp2-ep-tp", "fsdp2-cp-ep-tp"), (8,)),
}
"""Layouts with the numbers of processes: of 2 ranks along each axis, `ep` of 2."""
WIDE = (("ddp-ep", 4), ("fsdp2-ep", 8))
"""Layouts whose experts are shared by 4 ranks."""
WITH_BIASES = (
    *("afmoe", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "kimi_linear", "lfm2_moe", "nemotron_h"),
)
"""Families whose routers add a bias to their scores."""
EVENED = {
    **dict.fromkeys(("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "tp", "tp-sp", "cp", "pp"), 2),
    **{"hsdp": 4, "ddp-ep": 2, "fsdp2-ep": 4},
    **dict.fromkeys(("cp-ep", "ddp-ep-tp", "pp-fsdp2-ep"), 4),
}
"""Layouts, with the numbers of processes, in which biases of routers even out the loads."""
MODES = (("lora", ""), ("lora", "experts"), ("full", ""))
LIMITED = {"ddp": 2, "fsdp2-ep": 2, "tp": 2, "tp-sp": 2, "pp": 2, "ddp-ep-tp": 4}
"""Layouts, with the numbers of processes, in which experts have a capacity."""

SHARED = {"zero1-ep": 2, "fsdp2-ep": 2, "tp": 2, "pp": 2, "ddp-ep-tp": 4, "cp-ep": 2}
"""Layouts, with the numbers of processes, in which experts share an adapter."""


def _all() -> Iterator[Cell]:
    for family in WITH_EXPERTS:
        for layout, num_ranks in LIMITED.items():
            schedule = "1f1b" if layout == "pp" else ""
            yield Cell(family, layout, "full", num_ranks, "capacity", schedule=schedule)
        yield Cell(family, "fsdp2-ep", "full", 2, "capacity-compile")
        for layout, num_ranks in SHARED.items():
            schedule = "1f1b" if layout == "pp" else ""
            yield Cell(family, layout, "lora", num_ranks, "shared", schedule=schedule)
    for family in WITH_BIASES:
        for layout, num_ranks in EVENED.items():
            schedule = "1f1b" if layout.startswith("pp") else ""
            yield Cell(family, layout, "full", num_ranks, BALANCED, schedule=schedule)
    for mode, variant in MODES:
        for family in WITH_EXPERTS:
            for layout, sizes in COMPOSED.items():
                for num_ranks in sizes:
                    schedule = "1f1b" if layout.startswith("pp") else ""
                    yield Cell(family, layout, mode, num_ranks, variant, schedule=schedule)
            for layout, num_ranks in WIDE:
                yield Cell(family, layout, mode, num_ranks, variant, spread=4)
        yield Cell("qwen3_moe", "ddp-ep", mode, 8, variant, spread=8)
        # Of 4 shards of each replica 2 have the same experts.
        yield Cell("qwen3_moe", "hsdp-ep", mode, 8, variant)
    for family in ("qwen3_moe", "kimi_linear", "nemotron_h"):
        for precision in ("bfloat16", f"float16-{STILL}"):
            yield Cell(family, "ddp-ep", "full", 2, precision)
            yield Cell(family, "fsdp2-ep", "lora", 4, precision)
    for mode, variant in MODES:
        for schedule in ORDERS:
            if schedule != "1f1b":
                yield Cell("qwen3_moe", "pp-ddp-ep", mode, 4, variant, schedule=schedule)


CELLS = tuple(_all())
FIXED = (
    Cell("qwen3_moe", "ddp-ep", "full", 4),
    Cell("qwen3_moe", "fsdp2-ep", "lora", 4, "experts"),
    Cell("qwen3_moe", "fsdp2-ep", "full", 2, "capacity"),
    Cell("qwen3_moe", "fsdp2-ep", "lora", 2, "shared"),
    Cell("deepseek_v3", "ddp-ep", "full", 2, BALANCED),
    Cell("ernie4_5_moe", "ddp-ep", "full", 2, BALANCED),
    Cell("gpt_oss", "ddp-ep-tp", "full", 4),
)
"""What `make test` runs."""
