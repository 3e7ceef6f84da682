"""Which cells there are of context parallelism; part of `cells.ALL`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.base.schedule.orders import ORDERS
from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import FAMILIES, STILL, Cell

ONLY_ATTENTION = tuple(
    name
    for name, family in FAMILY_FACTS.items()
    if all(block.kind.is_attention for mixer in family.mixers.values() for block in mixer.blocks)
)
"""Those whose rows are cut in pairs of chunks, except with `ulysses`."""
COMPOSED = {
    **dict.fromkeys(("ddp-cp", "zero1-cp", "zero2-cp", "fsdp1-cp", "fsdp2-cp", "hsdp-cp"), 4),
    **dict.fromkeys(("cp-tp", "cp-tp-sp", "pp-cp"), 4),
    **dict.fromkeys(("fsdp2-cp-tp", "pp-fsdp2-cp", "pp-cp-tp-sp"), 8),
}
"""Layouts of other axes too, of 2 ranks each, and their processes."""
MODES = ("lora", "full")


def _all() -> Iterator[Cell]:
    for mode in MODES:
        for family in FAMILIES:
            for num_ranks in (2, 4):
                yield Cell(family, "cp", mode, num_ranks)
            if FAMILY_FACTS[family].keeps_documents_apart:
                yield Cell(family, "cp", mode, 4, "isolated")
            if family in ONLY_ATTENTION:
                yield Cell(family, "cp", mode, 4, "ring")
                yield Cell(family, "cp", mode, 4, "gather")
            for layout, num_ranks in COMPOSED.items():
                schedule = "1f1b" if layout.startswith("pp") else ""
                yield Cell(family, layout, mode, num_ranks, schedule=schedule)
                if FAMILY_FACTS[family].keeps_documents_apart:
                    yield Cell(family, layout, mode, num_ranks, "isolated", schedule)
        for schedule in ORDERS:
            if schedule != "1f1b":
                yield Cell("qwen3_5_text", "pp-cp", mode, 4, schedule=schedule)
        yield Cell("qwen3_5_text", "pp-zero1-cp", mode, 8, schedule="1f1b")
    yield Cell("llama", "cp", "lora", 4, "isolated-ring")
    for family in ("llama", "qwen3_5_text", "kimi_linear", "nemotron_h", "jamba"):
        for precision in ("bfloat16", f"float16-{STILL}"):
            yield Cell(family, "cp", "lora", 2, precision)
            yield Cell(family, "fsdp2-cp", "full", 4, precision)
    for variant in ("checkpointing", "dropout", "ring", "gather", "compile"):
        yield Cell("qwen3_5_text", "cp", "lora", 2, variant)
    yield Cell("llama", "cp", "lora", 2, "compile")
    for variant in ("offload-optimizer", "offload-all"):
        yield Cell("llama", "fsdp2-cp", "full", 4, variant)


CELLS = tuple(_all())
FIXED = (
    Cell("qwen3_5_text", "cp", "full", 4, "isolated"),
    Cell("llama", "cp", "lora", 4, "isolated-ring"),
    Cell("gpt2", "cp", "full", 2),
    Cell("qwen3_5_text", "cp", "lora", 2, "gather"),
    Cell("qwen3_moe", "cp", "full", 2),
    Cell("qwen2_moe", "cp", "full", 2),
    Cell("gpt_oss", "cp", "full", 2),
    *(Cell(name, "cp", "full", 4, "isolated") for name in ("hunyuan_v1_dense", "ministral3")),
    Cell("qwen3_5_text", "cp", "lora", 2, "dropout"),
    Cell("qwen3_5_text", "cp", "lora", 2, f"float16-{STILL}"),
    *(Cell(family, "cp", "full", 2) for family in ("jamba", "jet_nemotron", "kimi_linear")),
    Cell("granitemoehybrid", "cp", "full", 4, "isolated"),
    Cell("granitemoehybrid", "cp-tp-sp", "lora", 4),
    Cell("qwen3_5_text", "pp-cp", "full", 4, schedule="1f1b"),
    Cell("granitemoehybrid", "fsdp2-cp", "full", 4),
)
"""What `make test` runs: each kind of state, documents, chunks in pairs, each way of attention, the
router loss, dropout, and beside each other axis."""
