"""What layers launch on a GPU, here and in transformers with PEFT: `python -m tools.launches`.

A layer of each kind runs at the widths of a published model, on fake tensors of 8,192 tokens under
bfloat16's autocast, forward and backward. Each operator of torch counts as one launch, with the
bytes that it reads and writes; views and allocations count as none. The kernels of `fla` and
`mamba_ssm`, attention, and each of our Triton kernels are one launch each, on both sides
(tests/models/gpu_kernels.py). `lora`: rank 16 on all linears and experts, weights in bfloat16 and
adapters in float32; PEFT's layers run eagerly as Trainer runs them. `full`: weights in float32, but
bfloat16 where a layer has experts, whose grouped product takes nothing else.

`host_seconds`: the CPU time of a forward and a backward of four layers of qwen3_5 that are so small
that the device has nothing to compute; five rounds by turns. What Triton's launcher and the
libraries' Python take is in neither side.

    python -m tools.launches --where qwen3_5-0.8b   # the code that launches most
    python -m tools.launches --draw                 # the figure alone, from the committed numbers
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tools.paired import command_line, ratios, spread, take_turns, timed
from torch import nn
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

OUT = Path(__file__).parents[1] / "results" / "launches.json"
TOKENS, RANK, ROUNDS, STEPS = 8192, 16, 5, 20
MODELS = (
    *("qwen3_5-0.8b", "qwen3_5_moe_text", "qwen3-next-80b-a3b", "olmo-hybrid-7b"),
    *("kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny", "falcon-h1-1.5b"),
    *("lfm2-1.2b", "llama-3.1-8b", "deepseek-v3"),
)
"""Presets; `qwen3_5_moe_text` is transformers' default of that type, Qwen3.5-35B-A3B."""
SIDES = ("shardwise", "transformers")
SHOWN = {
    "Gated DeltaNet": ("qwen3_5-0.8b", "gated_delta_net dense"),
    "KDA": ("kimi-linear-48b-a3b", "kda dense"),
    "Mamba2": ("nemotron-3-nano-30b-a3b", "mamba2 none"),
    "short convolution": ("lfm2-1.2b", "short_convolution dense"),
    "attention": ("llama-3.1-8b", "full_attention dense"),
    "experts": ("nemotron-3-nano-30b-a3b", "moe none"),
    "Gated DeltaNet, experts": ("qwen3_5_moe_text", "gated_delta_net moe"),
}
"""Layers of the figure."""
CUDA = torch.device("cuda")
Layers = dict[str, Ready]
"""The highest layer of each kind."""


def main() -> None:
    """Count all layers, time the host, write both and the figure."""
    parser = command_line(__doc__, OUT)
    parser.add_argument("--where", metavar="MODEL", choices=MODELS)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.where:
        return print_where(options.where)
    if not options.draw:
        libraries = {
            library.__name__: library.__version__ for library in (torch, transformers, peft)
        }
        content = {
            "versions": libraries,
            "tokens": TOKENS,
            "rank": RANK,
            "host_seconds": host_seconds(),
            "layers": {name: layers_of(name) for name in MODELS},
        }
        in_lines = re.compile(
            r"[{\[]\s+[^{}\[\]]+?\s+[}\]]"
        )  # what holds numbers alone, in one line
        text = in_lines.sub(lambda row: " ".join(row[0].split()), dumps(content, indent=1))
        write_atomically(options.out, text + "\n")
    layers = json.loads(options.out.read_text(encoding="utf-8"))["layers"]
    options.out.with_suffix(".svg").write_text(figure_of(layers), encoding="utf-8")


def layers_of(name: str) -> dict[str, Any]:
    """Return the counts of a model by kind of layer, way to train and side."""
    rows: dict[str, Any] = {}
    for tuning in ("lora", "full"):
        for side in SIDES:
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
def ready(name: str, tuning: str, side: str) -> Iterator[tuple[RunConfig, Any, Any, Layers]]:
    """Make the layers of a model ready to run, after its run, the model and its fields."""
    with TemporaryDirectory() as folder:
        path = folder
        if name == "qwen3_5_moe_text":
            AutoConfig.for_model(name).save_pretrained(folder)
        else:
            path = str(CONFIGS / name)
        has_experts = bool(getattr(read_config(Model(path)), "num_experts_per_tok", 0))
        cfg = run_of(path, "bfloat16" if tuning == "lora" or has_experts else "float32", tuning)
        config = read_config(cfg.model)
        with (
            kernels_of_a_gpu(config),
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
                forward, backward = launches_of(layer)
                number, moved = Counter[str](), Counter[str]()
                for each, launches in (("forward", forward), ("backward", backward)):
                    for launch in launches:
                        key = f"{each:8} {launch.name:28} {launch.where}"
                        number[key] += 1
                        moved[key] += launch.moved_bytes
                print(f"\n{side}, {kind}: {len(forward)} + {len(backward)} launches")
                for key, times in number.most_common(25):
                    print(f"{times:4} {moved[key] / 1e6:9.1f} MB  {key}")


def host_seconds() -> dict[str, Any]:
    """Return CPU seconds of a forward and backward of both sides, and the ratio of each round."""
    cfg = run_of(str(CONFIGS / "tiny-qwen3_5"), "bfloat16", "lora", tokens=4)
    torch.set_num_threads(1)
    with kernels_of_a_gpu(read_config(cfg.model)), torch.backends.mkldnn.flags(enabled=False):
        steps = {side: small_step(cfg, side) for side in SIDES}

        def run(side: str) -> dict[str, float]:
            _, seconds = timed(lambda: [steps[side]() for _ in range(STEPS)])
            return {"cpu": seconds["cpu"] / STEPS}

        taken = take_turns({x: lambda _, x=x: run(x) for x in SIDES}, ROUNDS, warm_up=1)["cpu"]
    ours, theirs = (taken[side] for side in SIDES)
    return {**{side: spread(taken[side]) for side in SIDES}, "ratio": ratios(ours, theirs)}


def small_step(cfg: RunConfig, side: str) -> Callable[[], None]:
    """Return a forward and a backward of a small model."""
    hf = build_meta(cfg.model, read_config(cfg.model))
    spec = spec_of(hf.config, hf)
    assert cfg.lora is not None
    inject(hf, cfg.lora, spec)
    for module in hf.modules():
        for name, p in module._parameters.items():
            if p is not None:
                zeros = torch.zeros_like(p, device="cpu")
                module._parameters[name] = nn.Parameter(zeros, p.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.ones_like(buffer, device="cpu")
    part = CausalLM(hf, spec, family_of(hf), cfg).train()
    if side == "shardwise":
        patch(part, cfg, CUDA)
    tokens = torch.zeros(1, cfg.data.sequence_length, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.zeros_like(tokens), (0,), step=1)

    def step() -> None:
        part.hidden_of(batch, {"input_ids": tokens}).sum().backward()
        part.zero_grad(set_to_none=True)

    return step


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
            launches = [row["forward"] + row["backward"] for row in rows]
            bars = left.barh(heights, launches, 0.38, color=colour(name), label=label)
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
