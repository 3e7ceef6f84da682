"""Cells of context parallelism."""

from __future__ import annotations

from itertools import product

from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import FAMILIES, Cell

# Their recurrent layers, if they have any, are of the gated delta rule or short convolutions.
WITH_CONTEXT = (
    "llama",
    "qwen3_5_text",
    "qwen3_next",
    "olmo_hybrid",
    "qwen3",
    "olmo2",
    "qwen3_moe",
    "lfm2",
    "gpt2",
)
"""Families whose every kind of layer may have its tokens on several ranks."""
COMPOSED = tuple(
    layout
    for layout in ("ddp-cp", "zero1-cp", "zero2-cp", "fsdp1-cp", "fsdp2-cp", "cp-tp", "cp-tp-sp")
)
MODES = ("lora", "full")

CONTEXTS = (
    *(Cell(family, "cp", mode, n) for family, mode, n in product(WITH_CONTEXT, MODES, (2, 4))),
    *(
        Cell(family, "cp", mode, 4, "isolated")
        for family, mode in product(WITH_CONTEXT, MODES)
        if FAMILY_FACTS[family].keeps_documents_apart
    ),
    *(
        Cell(family, layout, mode, 4)
        for family, layout, mode in product(FAMILIES, COMPOSED, MODES)
        if family in WITH_CONTEXT
    ),
)
