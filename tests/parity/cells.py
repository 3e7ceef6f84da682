"""Which cells there are: the whole product (`make parity`), and the subset that `make test` runs."""

from __future__ import annotations

from itertools import product

from shardwise.models.families import FAMILIES as FAMILY_FACTS
from tests.parity.harness import FAMILIES, Cell

LAYOUTS = ("ddp", "fsdp2", "hsdp")
MODES = ("lora", "full")

VARIANTS = (
    *(Cell(family, layout, "lora", 2, "checkpointing") for family in FAMILIES for layout in ("ddp", "fsdp2")),
    *(Cell(family, layout, "lora", 4, "dropout") for family in ("llama", "qwen3_5_text") for layout in LAYOUTS),
    *(Cell("qwen3_5_text", layout, mode, 2, "tied") for layout in ("ddp", "fsdp2") for mode in MODES),
    *(Cell("llama", layout, "lora", 2, "head") for layout in ("ddp", "fsdp2")),
    Cell("olmo_hybrid", "fsdp2", "full", 2, "keep-gathered"),
    *(
        Cell(family, layout, mode, 2, "isolated")
        for family in FAMILIES
        if FAMILY_FACTS[family].token_mixers
        for layout, mode in (("ddp", "lora"), ("fsdp2", "full"))
    ),
    Cell("qwen3_5_text", "fsdp2", "full", 2, "operators"),
    Cell("llama", "ddp", "full", 2, "float16"),
    Cell("llama", "fsdp2", "full", 2, "float16"),
)

# At 2 processes hsdp has 1 shard and 2 replicas: still its own code path.
ALL = (*(Cell(*point) for point in product(FAMILIES, LAYOUTS, MODES, (2, 4))), *VARIANTS)

# Every pair (family, layout), (family, mode), (layout, mode) and every variant, mostly on two processes.
FAST = (
    Cell("llama", "ddp", "lora", 2),
    Cell("llama", "fsdp2", "full", 2),
    Cell("llama", "hsdp", "lora", 4),
    Cell("qwen3_5_text", "ddp", "full", 2),
    Cell("qwen3_5_text", "fsdp2", "lora", 4),
    Cell("qwen3_5_text", "hsdp", "full", 4),
    Cell("qwen3_next", "ddp", "lora", 2),
    Cell("qwen3_next", "fsdp2", "full", 4),
    Cell("qwen3_next", "hsdp", "lora", 4),
    Cell("olmo_hybrid", "ddp", "full", 2),
    Cell("olmo_hybrid", "fsdp2", "lora", 2),
    Cell("olmo_hybrid", "hsdp", "full", 4),
    Cell("nemotron_h", "ddp", "lora", 2),
    Cell("nemotron_h", "fsdp2", "full", 2),
    Cell("nemotron_h", "hsdp", "lora", 4),
    Cell("qwen3", "ddp", "full", 2),
    Cell("qwen3", "fsdp2", "lora", 2),
    Cell("qwen3", "hsdp", "full", 2),
    Cell("qwen3_moe", "ddp", "full", 2),
    Cell("qwen3_moe", "fsdp2", "lora", 2),
    Cell("qwen3_moe", "hsdp", "full", 4),
    Cell("lfm2", "ddp", "lora", 2),
    Cell("lfm2", "fsdp2", "full", 4),
    Cell("lfm2", "hsdp", "lora", 2),
    Cell("gpt2", "ddp", "full", 2),
    Cell("gpt2", "fsdp2", "lora", 2),
    Cell("gpt2", "hsdp", "full", 2),
    Cell("granitemoehybrid", "ddp", "full", 2),
    Cell("granitemoehybrid", "fsdp2", "lora", 2),
    Cell("granitemoehybrid", "hsdp", "full", 2),
    Cell("falcon_h1", "ddp", "lora", 2),
    Cell("falcon_h1", "fsdp2", "full", 2),
    Cell("falcon_h1", "hsdp", "lora", 2),
    Cell("kimi_linear", "ddp", "lora", 2),
    Cell("kimi_linear", "fsdp2", "full", 4),
    Cell("kimi_linear", "hsdp", "lora", 2),
    Cell("jamba", "ddp", "full", 2),
    Cell("jamba", "fsdp2", "lora", 2),
    Cell("jamba", "hsdp", "full", 2),
    Cell("qwen3_next", "fsdp2", "lora", 2, "checkpointing"),
    Cell("qwen3_5_text", "ddp", "lora", 4, "dropout"),
    Cell("qwen3_5_text", "fsdp2", "full", 2, "tied"),
    Cell("llama", "fsdp2", "lora", 2, "head"),
    Cell("olmo_hybrid", "fsdp2", "full", 2, "keep-gathered"),
    Cell("olmo_hybrid", "fsdp2", "full", 2, "isolated"),
    Cell("qwen3_5_text", "fsdp2", "full", 2, "operators"),
    Cell("llama", "ddp", "full", 2, "float16"),
    Cell("llama", "fsdp2", "full", 2, "float16"),
)
