"""What a split by cost gains on published models, predicted from FLOPs.

    python tools/pipeline_shapes.py [--out results/pipeline-split]

It writes shapes.json and shapes.md. No weights are needed: the models are built on `meta` from
configs/models. The numbers there of Llama and GPT-2 give the published numbers of parameters,
Jet-Nemotron's are those of its published config.json, Qwen3.5-9B's are transformers' defaults, and
Qwen3.5-2B's are the shapes of its tensors as github.com/invergent-ai/surogate converts them
(serve/tools/convert/qwen3_5_2b/inventory.py; that its head is tied: github.com/williammtan/miles,
scripts/models/qwen3.5-2B.sh). Costs are the FLOPs that a rank runs (`assembly.costs.costs_of`): the
chunked loss, no recomputation, frozen weights without gradients. So this is a prediction: what
memory traffic and small kernels take is not in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from shardwise.assembly.costs import costs_of
from shardwise.benchmark.paired import command_line, write_json
from shardwise.benchmark.paired import table as markdown
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.metrics.hardware import environment
from shardwise.models import load, lora
from shardwise.models.families import spec_of
from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import Split, bound_seconds, split

ROOT = Path(__file__).parents[1]
RANKS = (2, 4, 8)
MICROBATCHES_PER_RANK = 8
RANK_OF_LORA = 16


class Shape(NamedTuple):
    """A published model, the folder of configs/models with its numbers, and tokens per row."""

    repository: str
    preset: str
    tokens: int

    def config(self) -> dict[str, Any]:
        """Return the numbers of its config.json."""
        path = ROOT / "configs" / "models" / self.preset / "config.json"
        return json.loads(path.read_text(encoding="utf-8"))


SHAPES = (
    Shape("Qwen/Qwen3.5-2B", "qwen3_5-2b", 4096),
    Shape("Qwen/Qwen3.5-9B", "qwen3_5-9b", 4096),
    Shape("meta-llama/Llama-3.1-8B", "llama-3.1-8b", 4096),
    Shape("openai-community/gpt2-large", "gpt2-large", 1024),
    Shape("jet-ai/Jet-Nemotron-2B", "jet-nemotron-2b", 4096),
)
COLUMNS = (
    *("model", "trained", "ranks", "head in layers", "gain", "slowest", "bound"),
    *("bubble, uniform", "balanced", "layers"),
)
HEAD = f"""\
# Published models: what a split by cost gains over equal numbers of layers, predicted

1F1B, {MICROBATCHES_PER_RANK} micro-batches for each rank; costs are FLOPs. Gain: step of the
uniform split over that of the balanced one. Slowest: the same of their slowest chunks, as with
endless micro-batches. Bound: over all work spread evenly, or the head alone on a rank, no bubble.

"""


def main() -> None:
    options = command_line(__doc__, ROOT / "results" / "pipeline-split").parse_args()
    rows = [row for shape in SHAPES for mode in ("lora", "full") for row in rows_of(shape, mode)]
    result = {
        "environment": environment(),
        "schedule": "1f1b",
        "micro_batches_per_rank": MICROBATCHES_PER_RANK,
        "lora_rank": RANK_OF_LORA,
        "models": [{**shape._asdict(), "config": shape.config()} for shape in SHAPES],
        "rows": rows,
    }
    write_json(options.out / "shapes.json", result)
    page = HEAD + markdown(COLUMNS, map(cells_of, rows)) + "\n"
    (options.out / "shapes.md").write_text(page, encoding="utf-8")
    print(page)


def rows_of(shape: Shape, mode: str) -> list[dict[str, Any]]:
    """Return a row for each number of ranks."""
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
    """Return the seconds of the chunk that decides if there are many micro-batches."""
    return max(chunk.seconds for chunk in cut.chunks)


def units_of(shape: Shape, mode: str) -> tuple[Cost, ...]:
    """Return the units of a model in a run with micro-batches of one row; a second is a FLOP."""
    cfg = RunConfig(
        model=Model(shape.repository, dtype="bfloat16"),
        data=Data("unused", sequence_length=shape.tokens),
        training=Training("unused", precision="bfloat16"),
        lora=Lora(r=RANK_OF_LORA) if mode == "lora" else None,
        parallel=Parallel(pp=2),
    )
    hf = load.build_meta(cfg.model, AutoConfig.for_model(**shape.config()))
    spec = spec_of(hf.config, hf)
    if cfg.lora:
        lora.inject(hf, cfg.lora, spec)
    return costs_of(cfg, hf, spec, None, cfg.parallel.pp)[0]


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the page."""
    cells = [row["model"], row["mode"], str(row["ranks"]), f"{row['head_in_layers']:.1f}"]
    cells += [f"{row[name]:.2f}" for name in ("gain", "slowest_chunk", "bound")]
    cells += [f"{100 * row[name]:.0f} %" for name in ("uniform_bubble", "balanced_bubble")]
    return [*cells, ", ".join(map(str, row["layers"]))]


if __name__ == "__main__":
    main()
