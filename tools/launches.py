"""What layers launch on a GPU, here and in transformers with PEFT, counted on a CPU.

    python -m tools.launches                        # all, the figure and the table of the page
    python -m tools.launches --where qwen3_5-0.8b   # the code that launches most
    python -m tools.launches --draw                 # figure and table of the committed numbers

A layer of each kind runs at published widths, on fake tensors of 8,192 tokens under bfloat16's
autocast, forward and backward. Each operator of torch is one launch, with the bytes that it reads
and writes; views and allocations are none. A kernel of `fla` or `mamba_ssm`, attention, and each of
our Triton kernels is one launch, on both sides (tests/models/gpu_kernels.py). `lora`: rank 16 on
all linears and experts, weights in bfloat16 and adapters in float32; PEFT's layers run eagerly as
Trainer runs them. `full`: weights in float32, or bfloat16 where a layer has experts, whose grouped
product takes nothing else.

`host_seconds`: CPU time of a forward and a backward of four layers of qwen3_5 that are so small
that little is computed; fifteen rounds by turns. Triton's launcher is in neither side.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import transformers
from tests.models.counted_operators import Launch
from tests.models.fake_layers import Ready, passes, ready_layers
from tests.models.gpu_kernels import kernels_of_a_gpu
from tests.models.tiny import CONFIGS
from tools.paired import command_line, ratios, spread, table, take_turns, timed
from transformers import AutoConfig

from shardwise.base.batches import Batch
from shardwise.base.records.record import dumps
from shardwise.base.safety import write_atomically
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.lab.drawing.svg import colour, drawing, svg_file
from shardwise.models.adapters.lora import inject
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import family_of, spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.patches import patch

ROOT = Path(__file__).parents[1]
OUT, PAGE = ROOT / "results" / "launches.json", ROOT / "docs" / "concepts" / "lora-kernels.md"
BEGIN, END = "<!-- tools/launches.py -->\n", "<!-- end -->\n"
TOKENS, RANK, ROUNDS, STEPS, CUDA = 8192, 16, 15, 20, torch.device("cuda")
MODELS = (
    *("qwen3_5-0.8b", "qwen3_5_moe_text", "qwen3-next-80b-a3b", "olmo-hybrid-7b"),
    *("kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny", "falcon-h1-1.5b"),
    *("lfm2-1.2b", "llama-3.1-8b", "deepseek-v3"),
)
"""Presets; `qwen3_5_moe_text` is transformers' default of that type, Qwen3.5-35B-A3B."""
SIDES, TUNINGS = ("shardwise", "transformers"), ("lora", "full")
SHOWN = {
    "Gated DeltaNet": ("qwen3_5-0.8b", "gated_delta_net dense"),
    "KDA": ("kimi-linear-48b-a3b", "kda dense"),
    "Mamba2": ("nemotron-3-nano-30b-a3b", "mamba2 none"),
    "short convolution": ("lfm2-1.2b", "short_convolution dense"),
    "attention": ("llama-3.1-8b", "full_attention dense"),
    "experts": ("nemotron-3-nano-30b-a3b", "moe none"),
    "Gated DeltaNet, experts": ("qwen3_5_moe_text", "gated_delta_net moe"),
}


def main() -> None:
    """Count all layers, time the host, write both and the figure."""
    parser = command_line(__doc__, OUT)
    parser.add_argument("--where", metavar="MODEL", choices=MODELS)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.where:
        return print_where(options.where)
    if not options.draw:
        content = {
            "versions": {x.__name__: x.__version__ for x in (torch, transformers, peft)},
            "sizes": {"tokens": TOKENS, "rank": RANK},
            "host_seconds": host_seconds(),
            "layers": {name: layers_of(name) for name in MODELS},
        }
        of_numbers = re.compile(r"[{\[]\s+[^{}\[\]]+?\s+[}\]]")  # each in one line
        text = of_numbers.sub(lambda row: " ".join(row[0].split()), dumps(content, indent=1))
        write_atomically(options.out, text + "\n")
    content = json.loads(options.out.read_text(encoding="utf-8"))
    figure = figure_of(content["layers"])
    options.out.with_suffix(".svg").write_text(figure, encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    page = f"{before}{BEGIN}{table_of(content)}{END}{rest.partition(END)[2]}"
    PAGE.write_text(page, encoding="utf-8")


def layers_of(name: str) -> dict[str, Any]:
    """Return the counts of a model by kind of layer, way to train and side."""
    rows: dict[str, Any] = {}
    for tuning, side in product(TUNINGS, SIDES):
        for kind, row in counts(name, tuning, side).items():
            rows.setdefault(kind, {}).setdefault(tuning, {})[side] = row
    return rows


def counts(name: str, tuning: str, side: str) -> dict[str, dict[str, int]]:
    """Return launches and moved bytes of a model's layers by kind."""
    rows = {}
    with ready(name, tuning, side) as (*_, layers):
        for kind, layer in layers.items():
            forward, backward = launches_of(layer)
            both = [*forward, *backward]
            rows[kind] = {
                "forward": len(forward),
                "backward": len(backward),
                "elementwise_bytes": sum(x.moved_bytes for x in both if not x.is_product),
                "product_bytes": sum(x.moved_bytes for x in both if x.is_product),
            }
    return rows


@contextmanager
def ready(name: str, tuning: str, side: str) -> Iterator[tuple[Any, Any, Any, dict[str, Ready]]]:
    """Make the layers of a model ready to run, after its run, the model and its fields."""
    with TemporaryDirectory() as folder:
        path = str(CONFIGS / name) if (CONFIGS / name).exists() else folder
        if path == folder:
            AutoConfig.for_model(name).save_pretrained(folder)
        has_experts = bool(getattr(read_config(Model(path)), "num_experts_per_tok", 0))
        cfg = run_of(path, "bfloat16" if tuning == "lora" or has_experts else "float32", tuning)
        with (
            kernels_of_a_gpu(read_config(cfg.model)),
            ready_layers(cfg, CUDA, is_patched=side == "shardwise") as (hf, spec, layers),
        ):
            yield cfg, hf, spec, {f"{x.layer.kind} {x.layer.feed_forward}": x for x in layers}


def run_of(path: str, dtype: Any, tuning: str, tokens: int = TOKENS) -> RunConfig:
    """Return a run under autocast."""
    return RunConfig(
        Model(path, init="random", dtype=dtype),
        Data("unused", sequence_length=tokens),
        Training("unused", device="cpu", precision="bfloat16", micro_batch_size=1, loss="chunked"),
        Lora(r=RANK, targets="all-linear") if tuning == "lora" else None,
    )


def launches_of(layer: Ready) -> tuple[list[Launch], list[Launch]]:
    """Return what a forward and a backward of a layer launch, our own nodes one by one."""
    layer.forward()  # what the first call makes for all
    forward, backward = passes(layer.module, layer.leaf, layer.forward, as_one=())
    return forward.launches, backward.launches


def print_where(name: str) -> None:
    """Print the code that launches most in each layer, with LoRA."""
    for side in SIDES:
        with ready(name, "lora", side) as (*_, layers):
            for kind, layer in layers.items():
                number, moved = Counter[str](), Counter[str]()
                for each, launches in zip(("forward", "backward"), launches_of(layer)):
                    for launch in launches:
                        key = f"{each:8} {launch.name:28} {launch.where}"
                        number[key] += 1
                        moved[key] += launch.moved_bytes
                print(f"\n{side}, {kind}: {number.total()} launches")
                for key, times in number.most_common(25):
                    print(f"{times:4} {moved[key] / 1e6:9.1f} MB  {key}")


def host_seconds() -> dict[str, Any]:
    """Return CPU seconds of a forward and backward of both sides, and the ratio of each round."""
    cfg = run_of(str(CONFIGS / "tiny-qwen3_5"), "bfloat16", "lora", tokens=2)
    torch.set_num_threads(1)
    with kernels_of_a_gpu(read_config(cfg.model)), torch.backends.mkldnn.flags(enabled=False):
        steps = {side: small_step(cfg, side) for side in SIDES}
        sides = {
            side: lambda _, step=step: timed(lambda: [step() for _ in range(STEPS)])[1]
            for side, step in steps.items()
        }
        taken = take_turns(sides, ROUNDS, warm_up=1)["cpu"]
    seconds = {side: spread([x / STEPS for x in taken[side]]) for side in SIDES}
    return {**seconds, "ratio": ratios(*(taken[side] for side in SIDES))}


def small_step(cfg: RunConfig, side: str) -> Callable[[], None]:
    """Return a forward and a backward of a small model."""
    hf = build_meta(cfg.model, read_config(cfg.model))
    spec = spec_of(hf.config, hf)
    assert cfg.lora is not None
    inject(hf, cfg.lora, spec)
    hf.to_empty(device="cpu")
    for tensor in (*hf.parameters(), *hf.buffers()):
        tensor.data.zero_()
    part = CausalLM(hf, spec, family_of(hf), cfg).train()
    if side == "shardwise":
        patch(part, cfg, CUDA)
    trained = [p for p in part.parameters() if p.requires_grad]
    tokens = torch.zeros(1, cfg.data.sequence_length, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.zeros_like(tokens), (0,), step=1)

    def step() -> None:
        part.hidden_of(batch, {"input_ids": tokens}).sum().backward()
        for p in trained:
            p.grad = None

    return step


def table_of(content: dict[str, Any]) -> str:
    """Return a table of launches, and a sentence on the host."""
    counted = [content["layers"][model][kind] for model, kind in SHOWN.values()]
    columns = [[sum_of(row[t][side]) for row in counted] for t, side in product(TUNINGS, SIDES)]
    head = ["launches of a layer", "LoRA", "transformers + PEFT", "in full", "transformers"]
    ratio = content["host_seconds"]["ratio"]
    numbers = "{:.2f} times ({:.2f} to {:.2f})".format(ratio["median"], *ratio["interval"])
    return f"{table(head, zip(SHOWN, *columns))}\n\nThe host takes {numbers} what PEFT takes.\n"


def sum_of(row: dict[str, int]) -> int:
    return row["forward"] + row["backward"]


def figure_of(layers: dict[str, Any]) -> str:
    """Return the figure as SVG: launches and bytes of elementwise operators, with LoRA."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.2, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, (side, name) in enumerate(zip(SIDES, ("c1", "c2"), strict=True)):
            heights = [-i - 0.4 * place for i in range(len(SHOWN))]
            rows = [layers[model][kind]["lora"][side] for model, kind in SHOWN.values()]
            label = "transformers + PEFT" if place else side
            bars = left.barh(heights, [*map(sum_of, rows)], 0.38, color=colour(name), label=label)
            left.bar_label(bars, padding=2, fontsize=7)
            moved = [row["elementwise_bytes"] / 1e9 for row in rows]
            bars = right.barh(heights, moved, 0.38, color=colour(name))
            right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
        left.set_yticks([-i - 0.2 for i in range(len(SHOWN))], list(SHOWN))
        left.set(title="launches of a layer")
        right.set(title="GB moved by elementwise operators")
        figure.legend(loc="outside lower right", ncols=2)
        return svg_file(figure, "launches")


if __name__ == "__main__":
    main()
