"""What a training step of hybrid models costs here and in Hugging Face Trainer with PEFT.

    python -m tools.speed_of_cores [--rounds 15] [--models NAME ...] [--out results/cores/amd.json]

Each model has 8 layers, of which 2 are attention, and random weights. One process of one thread
trains it with LoRA (r = 8 on all linears of the layers) on 2 rows of 512 tokens: by Trainer, by
shardwise (`eager`), and by shardwise with `training.compile: inductor` (`compiled`). A run of
shardwise takes numbers below 1e-38 as zeros, which a CPU computes faster; `trainer_flushing` is
Trainer with that setting of torch too. The sides have the same weights and rows, and take turns.
A step is forward, backward, clipping, AdamW and zeroing gradients; what Trainer does around it is
not timed. `speed` is the seconds of a step of Trainer over those of another side, in one round.
`products` runs nothing but the matrix products of a step of `eager`, with its shapes and strides:
no step can be faster that computes the same, and `over_products` is what a side takes beside it.

`peak_bytes` are the weights, the optimizer's states and what a step adds at its most: exact, taken
in a step of its own, that is not timed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tools.paired import Results, command_line, ratios, spread, take_turns, timed
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from shardwise.assembly.build import build
from shardwise.base.batches import IGNORED, Batch
from shardwise.config import Data, Lora, Model, Optimizer, RunConfig, Training
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory, state_bytes
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.families import spec_of
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step

ROWS, TOKENS, WARM_UP = 2, 512, 3
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
NAMES = ["mm", "addmm", "addmm_", "bmm", "baddbmm", "linalg_solve_triangular"]
NAMES += [ATTENTION, f"{ATTENTION}_backward"]
PRODUCTS = {torch.ops.aten.mm.out} | {getattr(torch.ops.aten, name).default for name in NAMES}
CPU = torch.device("cpu")
Step = Callable[[Batch], float]
StateBytes = Callable[[], int]
LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 2
COMMON = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
COMMON |= {"num_attention_heads": 8, "vocab_size": 16_384, "tie_word_embeddings": False}
COMMON |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_key_value_heads": 2, "head_dim": 64, "linear_conv_kernel_dim": 4}
    | {f"linear_num_{x}_heads": 4 for x in ("key", "value")}
    | {f"linear_{x}_head_dim": 128 for x in ("key", "value")},
    "granitemoehybrid": {"num_key_value_heads": 2, "shared_intermediate_size": 1536}
    | {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}
    | {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
    "kimi_linear": {"num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64}
    | {"qk_rope_head_dim": 32, "v_head_dim": 64, "linear_num_heads": 4, "linear_head_dim": 128}
    | {"mlp_layer_types": ["dense"] * 8, "linear_conv_kernel_dim": 4},
}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parents[1] / "results" / "cores" / "amd.json")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"rows": ROWS, "tokens": TOKENS, "rounds": options.rounds}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=1)
        for name in options.models:
            results.add(name, partial(compare, name, options.rounds))
        dist.destroy_process_group()
    results.write()


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Return what steps of one model take on all sides."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"model_type": name, "layer_types": LAYERS, **COMMON, **MODELS[name]}
        (Path(folder) / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        sides = {"trainer": trainer_step(config(folder, "none"))}
        sides |= {"eager": our_step(config(folder, "none"))}
        sides |= {"compiled": our_step(config(folder, "inductor"))}

        sides |= {"trainer_flushing": trainer_step(config(folder, "none"))}
        sides |= {"products": (products_of(our_step(config(folder, "none"))[0]), lambda: 0)}

        def run(side: str, number: int) -> dict[str, float]:
            torch.set_flush_denormal(side != "trainer")  # as launch/rank.py does for a run
            loss, seconds = timed(lambda: sides[side][0](batch_of(number)))
            return {"loss": loss, **seconds}

        taken = take_turns({side: partial(run, side) for side in sides}, rounds, WARM_UP)
        peaks = {side: peak_bytes(*sides[side]) for side in sides if side != "products"}
    torch.set_flush_denormal(False)
    theirs, losses = taken["wall"]["trainer"], taken["loss"]
    products = taken["wall"]["products"]
    return {
        "load_average": load_average,
        "model": sizes,
        "speed": {side: ratios(theirs, seconds) for side, seconds in taken["wall"].items()},
        "over_products": {s: ratios(taken["wall"][s], products) for s in taken["wall"]},
        "seconds": {side: spread(seconds) for side, seconds in taken["wall"].items()},
        "peak_bytes": peaks,
        "peak_ratio": {side: peak / peaks["trainer"] for side, peak in peaks.items()},
        "loss": {side: spread(values) for side, values in losses.items()},
    }


class Products(TorchDispatchMode):
    """Notes the matrix products that run inside it: functions, shapes and strides of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            self.calls.append((func, [_layout(value) for value in args], kwargs or {}))
        return func(*args, **kwargs or {})


def _layout(value: Any) -> Any:
    """Return what an argument looks like: a tensor on meta in the place of a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def products_of(step: Step) -> Step:
    """Return a step that runs the matrix products of another one alone, on numbers of their own.

    Arguments of equal shape and strides share their numbers, as far as they are in one product.
    """
    with Products() as noted:
        step(batch_of(0))
    numbers: dict[Any, torch.Tensor] = {}

    def argument(place: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (place, value.shape, value.stride(), value.dtype)
        if key not in numbers:
            size = 1 + sum((n - 1) * stride for n, stride in zip(*key[1:3], strict=True))
            flat = torch.zeros(size, dtype=value.dtype)
            filled = flat.normal_(std=0.02) if flat.is_floating_point() else flat
            numbers[key] = filled.as_strided(*key[1:3])
        return numbers[key]

    calls = [(f, [argument(i, v) for i, v in enumerate(a)], k) for f, a, k in noted.calls]

    def products(_: Batch) -> float:
        with torch.no_grad():
            for function, arguments, options in calls:
                function(*arguments, **options)
        return math.nan

    return products


def peak_bytes(step: Step, kept: StateBytes) -> int:
    """Return the bytes of a side's state, and of what a step adds to it at its most."""
    with PeakMemory(CPU) as peak:
        step(batch_of(0))
    return kept() + peak.added_bytes()


def config(folder: str, compiler: Literal["none", "inductor"]) -> RunConfig:
    """Return our run; Trainer's settings follow from it."""
    size = {"global_batch_size": ROWS, "micro_batch_size": ROWS}
    return RunConfig(
        model=Model(folder, init="random"),
        data=Data("unused", sequence_length=TOKENS),
        training=Training("unused", device="cpu", compile=compiler, **size),
        lora=Lora(r=8, alpha=16, targets="all-linear"),
        optimizer=Optimizer(lr=1e-3),
    )


def batch_of(number: int) -> Batch:
    """Return random rows, the same for all sides."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(0, COMMON["vocab_size"], (ROWS, TOKENS), generator=generator)
    labels = F.pad(rows[:, 1:], (0, 1), value=IGNORED)
    return Batch(rows, labels, torch.zeros_like(rows), tuple(range(ROWS)), number + 1)


def our_step(cfg: RunConfig) -> tuple[Step, StateBytes]:
    """Return a step of a run of ours, and what it keeps between steps."""
    mesh = build_mesh(cfg, CPU)
    job = build(cfg, mesh)

    def step(batch: Batch) -> float:
        loss = training_step(job, [batch], mesh, cfg.optimizer.max_grad_norm).loss
        job.optimizer.zero_grad(set_to_none=True)
        return loss

    return step, lambda: sum(state_bytes(job.pm.stored(), job.optimizer).values())


def trainer_of(cfg: RunConfig) -> tuple[Trainer, Any, torch.optim.Optimizer]:
    """Return Trainer, a model with PEFT's adapters and the weights of a run, and its optimizer."""
    adapted = plain_model(cfg)
    arguments = TrainingArguments(cfg.model.path, use_cpu=True, learning_rate=1e-3)
    trainer = Trainer(adapted, arguments)
    return trainer, adapted, trainer.create_optimizer()


def plain_model(cfg: RunConfig) -> Any:
    """Return transformers' model with the weights of a run; with LoRA, adapted by PEFT."""
    hf = load.load_whole(cfg.model, load.read_config(cfg.model), cfg.training.seed)
    if cfg.lora is None:
        return hf
    names = load.build_meta(cfg.model, hf.config)
    lora.inject(names, cfg.lora, spec_of(hf.config, names))
    targets = list(lora.adapter_layers(names))
    options = {"r": cfg.lora.r, "lora_alpha": cfg.lora.alpha, "target_modules": targets}
    adapted = get_peft_model(hf, LoraConfig(**options))
    with torch.no_grad():
        for name, value in lora.adapter_weights(hf, cfg.training.seed):
            hf.get_parameter(name).copy_(value)
    return adapted


def trainer_step(cfg: RunConfig) -> tuple[Step, StateBytes]:
    """Return a step of Trainer with PEFT, and what it keeps between steps."""
    trainer, adapted, optimizer = trainer_of(cfg)
    trainer.current_gradient_accumulation_steps = 1  # its loop sets it

    def step(batch: Batch) -> float:
        rows = {"input_ids": batch.input_ids, "labels": batch.input_ids}  # transformers shifts
        loss = trainer.training_step(adapted, rows)
        trainer.accelerator.clip_grad_norm_(adapted.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        adapted.zero_grad()
        return loss.item()

    return step, lambda: sum(state_bytes(adapted.parameters(), optimizer).values())


if __name__ == "__main__":
    main()
