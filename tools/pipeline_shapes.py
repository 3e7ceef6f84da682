"""What a split by cost gains on published models, predicted from FLOPs: results/pipeline-split/shapes.{json,md}.

    python tools/pipeline_shapes.py [--out results/pipeline-split]

No weights are needed: the models are built on `meta` from the numbers in SHAPES. Those of Llama and GPT-2 give the
published numbers of parameters, Jet-Nemotron's are those of its published config.json, Qwen3.5-9B's are transformers'
defaults, and Qwen3.5-2B's are the shapes of its tensors as github.com/invergent-ai/surogate converts them
(serve/tools/convert/qwen3_5_2b/inventory.py; that its head is tied: github.com/williammtan/miles,
scripts/models/qwen3.5-2B.sh). Costs are the FLOPs that a rank runs
(`training.split.costs_of`): the chunked loss, no recomputation, frozen weights without gradients of their own. So a
prediction: what memory traffic and small kernels take is not in it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from shardwise.assembly.costs import costs_of
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.metrics.hardware import environment
from shardwise.models import load, lora
from shardwise.models.families import spec_of
from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import Split, bound_seconds, split

ROOT = Path(__file__).parents[1]
PRESETS = ROOT / "configs" / "models"
RANKS = (2, 4, 8)
MICROBATCHES_PER_RANK = 8
RANK_OF_LORA = 16


@dataclass(frozen=True)
class Shape:
    """A published model, by the numbers that its config.json has, and the length of its rows."""

    repository: str
    tokens: int
    config: dict[str, Any]


def _qwen(layers: int, **numbers: Any) -> dict[str, Any]:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    alike = {
        "vocab_size": 248_320,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    return {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": kinds,
        **alike,
        **numbers,
    }


SHAPES = (
    Shape(
        "Qwen/Qwen3.5-2B",
        4096,
        _qwen(
            24,
            hidden_size=2048,
            intermediate_size=6144,
            num_attention_heads=8,
            num_key_value_heads=2,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            tie_word_embeddings=True,
        ),
    ),
    Shape(
        "Qwen/Qwen3.5-9B",
        4096,
        _qwen(
            32,
            hidden_size=4096,
            intermediate_size=12_288,
            num_attention_heads=16,
            num_key_value_heads=4,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            tie_word_embeddings=False,
        ),
    ),
    Shape(
        "meta-llama/Llama-3.1-8B",
        4096,
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    Shape(
        "openai-community/gpt2-large",
        1024,
        {
            "model_type": "gpt2",
            "vocab_size": 50_257,
            "n_embd": 1280,
            "n_layer": 36,
            "n_head": 20,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
    ),
    Shape(
        "jet-ai/Jet-Nemotron-2B",
        4096,
        json.loads((PRESETS / "jet-nemotron-2b" / "config.json").read_text()),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "pipeline-split")
    options = parser.parse_args()
    rows = [row for shape in SHAPES for mode in ("lora", "full") for row in rows_of(shape, mode)]
    result = {
        "environment": environment(),
        "schedule": "1f1b",
        "micro_batches_per_rank": MICROBATCHES_PER_RANK,
        "lora_rank": RANK_OF_LORA,
        "models": [
            {"repository": s.repository, "tokens": s.tokens, "config": s.config} for s in SHAPES
        ],
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "shapes.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.out / "shapes.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


def rows_of(shape: Shape, mode: str) -> list[dict[str, Any]]:
    """One row for each number of ranks."""
    units = units_of(shape, mode)
    layers = [unit.seconds for unit in units[1:-1]]
    rows = []
    for ranks in RANKS:
        pipeline = Pipeline("1f1b", ranks, MICROBATCHES_PER_RANK * ranks)
        uniform, balanced = (split(name, units, pipeline) for name in ("uniform", "balanced"))
        bound = bound_seconds(units, pipeline)
        rows.append(
            {
                "model": shape.repository.partition("/")[2],
                "mode": mode,
                "ranks": ranks,
                "head_in_layers": round(units[-1].seconds * len(layers) / sum(layers), 2),
                "gain": round(uniform.timeline.seconds / balanced.timeline.seconds, 3),
                "slowest_chunk": round(slowest(uniform) / slowest(balanced), 3),
                "bound": round(uniform.timeline.seconds / bound, 3),
                "uniform_bubble": round(uniform.timeline.bubble(), 3),
                "balanced_bubble": round(balanced.timeline.bubble(), 3),
                "layers": list(balanced.layers),
            }
        )
    return rows


def slowest(cut: Split) -> float:
    """Of the chunk that decides, if there are many micro-batches."""
    return max(chunk.seconds for chunk in cut.chunks)


def units_of(shape: Shape, mode: str) -> tuple[Cost, ...]:
    """The units of a model in a run with micro-batches of one row; a second is a FLOP."""
    cfg = RunConfig(
        model=Model(shape.repository, dtype="bfloat16"),
        data=Data("unused", sequence_length=shape.tokens),
        training=Training("unused", precision="bfloat16"),
        lora=Lora(r=RANK_OF_LORA) if mode == "lora" else None,
        parallel=Parallel(pp=2),
    )
    hf = load.build_meta(cfg.model, AutoConfig.for_model(**shape.config))
    spec = spec_of(hf.config, hf)
    if cfg.lora:
        lora.inject(hf, cfg.lora, spec)
    return costs_of(cfg, hf, spec, None, cfg.parallel.pp)[0]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "# Published models: what a split by cost gains over equal numbers of layers, predicted",
        "",
        f"1F1B, {MICROBATCHES_PER_RANK} micro-batches for each rank; costs are FLOPs. Gain: step of the uniform split "
        "over that of the balanced one. Slowest: the same of their slowest chunks, as with endless micro-batches. "
        "Bound: over all work spread evenly, or the head alone on a rank, no bubble.",
        "",
        "| model | trained | ranks | head in layers | gain | slowest | bound | bubble, uniform | balanced | layers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["model"], row["mode"], row["ranks"], f"{row['head_in_layers']:.1f}"]
        cells += [f"{row[name]:.2f}" for name in ("gain", "slowest_chunk", "bound")]
        cells += [f"{100 * row[name]:.0f} %" for name in ("uniform_bubble", "balanced_bubble")]
        cells += [", ".join(map(str, row["layers"]))]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
