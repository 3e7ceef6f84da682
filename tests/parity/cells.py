"""Which cells there are: the full product (`make parity`), and the subset that `make test` runs."""

from __future__ import annotations

import pkgutil
from collections import Counter
from importlib import import_module
from itertools import combinations, product

from shardwise.base.schedules import HALVING
from shardwise.models.families import FAMILIES as FAMILY_FACTS
from shardwise.models.kinds import KINDS
from tests.parity import features
from tests.parity.features.pipelines import WITH_DATA
from tests.parity.features.pipelines import cell as pipeline
from tests.parity.harness import FAMILIES, Cell
from tests.parity.layouts import PROVEN, WITH_TENSOR

FEATURES = [
    import_module(f"{features.__name__}.{module.name}")
    for module in pkgutil.iter_modules(features.__path__)
]
LAYOUTS = tuple(
    layout
    for layout in PROVEN
    if layout != "single" and not layout.startswith("pp") and layout not in WITH_TENSOR
)
MODES = ("lora", "full")
BESIDE = {*WITH_DATA, *(name for name in WITH_TENSOR if name.removesuffix("-sp").count("-") < 2)}
"""Layouts of two axes, with stages or tp among them, and tp alone."""

# One more thing that differs from the plain cell. `naive`: one flat parameter per layer under
# fsdp1; `offload-...`: parallel.offload; `keep-gathered`: reshard_after_forward is false.
VARIANTS = (
    *(Cell(family, "fsdp2", "lora", 2, "checkpointing") for family in FAMILIES),
    *(
        Cell("qwen3_next", layout, "lora", 2, "checkpointing")
        for layout in LAYOUTS
        if layout != "fsdp2"
    ),
    *(
        Cell(family, layout, "lora", 4, "dropout")
        for family in ("llama", "qwen3_5_text")
        for layout in LAYOUTS
    ),
    *(Cell("qwen3_5_text", layout, mode, 2, "tied") for layout in LAYOUTS for mode in MODES),
    *(
        Cell("jet_nemotron", layout, mode, 2, "tied")
        for layout in ("ddp", "fsdp1", "fsdp2")
        for mode in MODES
    ),
    *(Cell(family, "fsdp1", "lora", 2, "naive") for family in FAMILIES),
    *(Cell("llama", layout, "lora", 2, "head") for layout in LAYOUTS),
    Cell("olmo_hybrid", "fsdp2", "full", 2, "keep-gathered"),
    *(
        Cell(family, layout, mode, 2, variant)
        for family in ("llama", "qwen3_next")
        for layout, mode in (("fsdp2", "full"), ("fsdp2", "lora"), ("hsdp", "lora"))
        for variant in ("offload-optimizer", "offload-all")
    ),
    *(
        Cell(family, layout, mode, 2, "isolated")
        for family in FAMILIES
        if FAMILY_FACTS[family].keeps_documents_apart
        for layout, mode in (("ddp", "lora"), ("fsdp2", "full"))
    ),
    *(Cell(family, "fsdp2", "full", 2, "operators") for family in ("qwen3_5_text", "jet_nemotron")),
    *(Cell("llama", layout, "full", 2, "float16") for layout in LAYOUTS),
    *(
        Cell(family, layout, "lora", 2, "compile")
        for family in ("llama", "qwen3_5_text", "jet_nemotron")
        for layout in ("ddp", "fsdp2")
    ),
)

# Adapters on routed experts, in layouts without tensor parallelism.
EXPERTS = (
    *(
        Cell(family, layout, "lora", 2, "experts")
        for family in FAMILIES
        if FAMILY_FACTS[family].named("experts")
        for layout in LAYOUTS
    ),
    *(
        pipeline(family, schedule, "lora", variant="experts")
        for family in ("qwen3_next", "nemotron_h")
        for schedule in ("1f1b", "zbv")
    ),
    Cell("qwen3_next", "pp-fsdp2", "lora", 4, "experts", schedule="1f1b"),
    Cell("qwen3_moe", "fsdp2-tp", "lora", 4, "experts"),
)

# At 2 processes hsdp has 1 shard and 2 replicas: still its own code path.
ALL = (
    *(Cell(*point) for point in product(FAMILIES, LAYOUTS, MODES, (2, 4))),
    *VARIANTS,
    *EXPERTS,
    *(cell for feature in FEATURES for cell in feature.CELLS),
)

# Where tests/parity/test_sensitivity.py plants bugs, and each variant.
_FIXED = (
    Cell("llama", "ddp", "lora", 2),
    Cell("llama", "fsdp2", "full", 2),
    Cell("llama", "hsdp", "lora", 4),
    Cell("llama", "zero1", "full", 2),
    Cell("llama", "zero2", "lora", 2),
    Cell("llama", "fsdp1", "lora", 2),
    Cell("qwen3_next", "ddp", "lora", 2),
    Cell("olmo_hybrid", "fsdp2", "lora", 2),
    Cell("granitemoehybrid", "fsdp2", "lora", 2),
    Cell("qwen3_5_text", "ddp", "lora", 4, "dropout"),
    Cell("qwen3_5_text", "fsdp2", "full", 2, "tied"),
    Cell("llama", "fsdp2", "lora", 2, "head"),
    Cell("olmo_hybrid", "fsdp2", "full", 2, "keep-gathered"),
    Cell("llama", "fsdp2", "full", 2, "offload-optimizer"),
    Cell("olmo_hybrid", "fsdp2", "full", 2, "isolated"),
    Cell("llama", "ddp", "full", 2, "float16"),
    Cell("llama", "fsdp2", "full", 2, "float16"),
    *(cell for feature in FEATURES for cell in feature.FIXED),
)


def pairs(cell: Cell) -> set[tuple[str, ...]]:
    """What a plain cell covers.

    Each family runs once over its data; its stages are compared with the whole model by
    tests/models/test_stage.py. Each kind of block runs in a pipeline, under tensor parallelism and
    in a layout over data. Each layout over data runs in both modes, each schedule and layout with
    stages in one. Of layouts with tp beside other axes, each two axes run together, with or without
    `sequence_parallel`.
    """
    kinds = [f"kind {KINDS.index(block.kind)}" for block in FAMILY_FACTS[cell.family].blocks]
    if cell.variant or cell.split or cell.cp > 1 or cell.ep > 1 or cell.faster_b or cell.dora:
        return set()
    together = set(combinations(cell.layout.removesuffix("-sp").split("-"), 2))
    if cell.tp > 1:
        return {*(together or {(cell.layout,)}), *((kind, "tp") for kind in kinds)}
    if cell.schedule:
        backward = "halved" if cell.schedule in HALVING else "whole"
        return {
            *together,
            *((kind, "pp") for kind in kinds),
            (cell.schedule,),
            (cell.layout, backward),
        }
    return {(cell.family, "data"), (cell.layout, cell.mode), *((kind, "data") for kind in kinds)}


def _covering(chosen: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """`chosen`, and plain cells until every pair is covered: each time one that covers most, of the
    rarest kind.

    Those of 2 processes; of layouts of two axes, which take more, those of the model with the
    shortest step, and in full if either mode will do, which needs no adapters made.
    """
    plain = [
        c
        for c in ALL
        if pairs(c) and (c.nproc == 2 or (c.layout in BESIDE and c.family == "llama"))
    ]
    left = set().union(*map(pairs, plain)) - set().union(*map(pairs, chosen))
    while left:
        kinds = Counter((cell.layout, cell.schedule) for cell in chosen)
        best = max(
            plain,
            key=lambda cell: (
                len(pairs(cell) & left),
                cell.nproc > 2 and cell.mode == "full",
                -kinds[cell.layout, cell.schedule],
            ),
        )
        chosen = (*chosen, best)
        left -= pairs(best)
    return chosen


FAST = _covering(_FIXED)

_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "hsdp", "tp", "tp-sp", "pp")
QUICK = tuple(
    min((c for c in FAST if c.layout == name), key=lambda c: (c.nproc, c.variant, not pairs(c)))
    for name in _STRATEGIES
)
"""One cell of each strategy alone, for `make test-quick`."""
