"""From one integer to a run: a model, a layout, data and options, all functions of that integer
alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from transformers import PretrainedConfig

from shardwise.base.batches import IGNORED
from shardwise.base.schedule.orders import ORDERS
from shardwise.base.schedules import HALVING
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.families import FAMILIES, spec_of
from tests.fuzz.shapes import Sizes, draw_model
from tests.parity.layouts import CONTEXT, EXPERTS, PROVEN

STEPS = 2
AXES = ("pp", "cp", "ep", "tp", "sp")
FIRST_NEWER = 10**6
"""Seeds from here on draw layouts with `cp` and `ep`; those below draw what they always did."""
MOST_AXES = 3
"""Of two ranks each, beside `ep`, whose ranks have other axes too."""


@dataclass(frozen=True)
class Rows:
    """The rows of a run: each a function of (slot, step), as the harness wants them."""

    seed: int
    length: int
    vocabulary: int
    targets: str  # all | ragged: another number in each row | sparse: few, in some rows none
    isolated: bool

    def __call__(self, slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        random = Random(f"{self.seed}-{slot}-{step}")
        generator = torch.Generator().manual_seed(random.getrandbits(40))
        tokens = torch.randint(0, self.vocabulary, (self.length + 1,), generator=generator)
        labels = tokens[1:].clone()
        if self.targets == "ragged":
            labels[random.randint(1, self.length) :] = IGNORED
        elif self.targets == "sparse" and slot > 0:  # the first row has some, so that a batch has
            kept = torch.rand(self.length, generator=generator) < random.choice((0.0, 0.1, 0.3))
            labels[~kept] = IGNORED
        documents = (torch.rand(self.length, generator=generator) < 0.2).cumsum(0) * self.isolated
        return tokens[:-1], labels, documents


@dataclass(frozen=True)
class Draw:
    """What is run under a layout and compared with one process."""

    seed: int
    family: str
    layout: str
    num_ranks: int
    cfg: RunConfig
    rows: Rows
    plain: bool
    """The one process does without the options that must not change a number: kernel, loss,
    checkpointing."""

    @property
    def id(self) -> str:
        schedule = f" {self.cfg.parallel.schedule}" if self.cfg.parallel.pp > 1 else ""
        mode = "lora" if self.cfg.lora else "full"
        return f"seed {self.seed}: {self.family} {self.layout}{schedule} {mode} {self.num_ranks}p"

    def one_process(self) -> RunConfig:
        """The same run without its layout."""
        cfg = replace(self.cfg, parallel=Parallel())
        if not self.plain:
            return cfg
        cfg = replace(cfg, training=replace(cfg.training, checkpointing="none", loss="plain"))
        return replace(cfg, lora=cfg.lora and replace(cfg.lora, kernel="peft"))

    def options(self) -> list[str]:
        """What is counted beside family and layout."""
        cfg, parallel, training = self.cfg, self.cfg.parallel, self.cfg.training
        recomputed = training.checkpointing
        if not isinstance(recomputed, str):
            recomputed = "some layers"
        named = [
            f"{self.num_ranks} ranks",
            "lora" if cfg.lora else "full",
            f"packing {cfg.data.packed}",
            f"targets {self.rows.targets}",
            f"precision {training.precision}",
            f"weights {cfg.model.dtype}",
            f"loss {training.loss}",
            f"optimizer {cfg.optimizer.name}",
            f"checkpointing {recomputed}",
        ]
        if parallel.pp > 1:
            named += [
                parallel.schedule,
                f"split {parallel.split if isinstance(parallel.split, str) else 'uneven'}",
            ]
        if cfg.lora:
            targets = cfg.lora.targets if isinstance(cfg.lora.targets, str) else "some"
            named += [f"lora.targets {targets}", f"lora.kernel {cfg.lora.kernel}"]
            named += [
                f"lora.{key}"
                for key in ("dropout", "rslora", "modules_to_save")
                if getattr(cfg.lora, key)
            ]
        flags = {
            "offload": parallel.offload != "none",
            "keep gathered": not parallel.reshard_after_forward,
            "naive wraps": parallel.fsdp1_wrap == "naive",
            "router loss": cfg.model.router_aux_loss_coef > 0,
            "float32 accumulation": training.accumulation == "float32",
            "weight decay": cfg.optimizer.weight_decay > 0,
            "no clipping": cfg.optimizer.max_grad_norm is None,
        }
        return named + [name for name, is_used in flags.items() if is_used]

    def __str__(self) -> str:
        model = (Path(self.cfg.model.path) / "config.json").read_text()
        run_file = yaml.safe_dump(self.cfg.to_dict(), sort_keys=False)
        header = f"# {self.id}; {self.rows}; plain={self.plain}"
        return f"{header}\n# run.yaml\n{run_file}# config.json\n{model}"


def draw(seed: int, folder: Path, family: str | None = None) -> Draw:
    """The draw of a seed, of this family or of the one whose turn it is; writes its config.json
    into `folder`."""
    parts = ("layout", "model", "data", "parallel", "optimizer", "training", "lora", "rows")
    random = {
        part: Random(f"{part} {seed}") for part in parts
    }  # a change to one part leaves the others as they were
    family = family or list(FAMILIES)[seed % len(FAMILIES)]
    is_newer = seed >= FIRST_NEWER
    layouts = _newer_layouts(family) if is_newer else PROVEN
    layout = random["layout"].choices(
        layouts, [4 / 2 ** max(1, len(_axes(layout))) for layout in layouts]
    )[0]
    sizes = _axis_sizes(layout, random["layout"])
    pipeline, num_layers = {}, random["model"].randint(1, 4)
    if "pp" in sizes:
        pipeline, num_layers = _pipeline(sizes["pp"], random["parallel"])
    model = draw_model(family, Sizes(random["model"], sizes.get("tp", 1), num_layers))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model, indent=1))
    cfg = RunConfig(
        model=_model(folder, family, random["model"], is_newer),
        data=_data(layout, sizes, random["data"]),
        parallel=_parallel(layout, sizes, pipeline, random["parallel"]),
        optimizer=_optimizer(random["optimizer"]),
        training=Training(output_dir="unused", steps=STEPS, device="cpu", seed=seed),
    )
    hf_config = load.read_config(cfg.model)
    kinds = [mixer.name for mixer in FAMILIES[family].mixers_of(hf_config)]
    cfg = replace(cfg, training=_training(cfg, sizes, kinds, random["training"]))
    if random["lora"].random() < 0.6:
        cfg = replace(cfg, lora=_lora(cfg, hf_config, random["lora"]))
    if (
        cfg.training.precision == "bfloat16"
    ):  # weights off by 1e-7 may be rounded the other way: they stay as they are
        cfg = replace(cfg, optimizer=replace(cfg.optimizer, lr=0.0))
    rows = Rows(
        seed=seed,
        length=cfg.data.sequence_length,
        vocabulary=model["vocab_size"],
        targets=random["rows"].choice(("all", "ragged", "ragged", "sparse")),
        isolated=cfg.data.packing == "isolated",
    )
    plain = cfg.training.precision == "float32" and random["rows"].random() < 0.7
    num_ranks = math.prod(size for axis, size in sizes.items() if axis != "ep")
    return Draw(seed, family, layout, num_ranks, cfg, rows, plain)


def _newer_layouts(family: str) -> list[str]:
    layouts = (*CONTEXT, *EXPERTS) if FAMILIES[family].named("experts") else CONTEXT
    return [layout for layout in layouts if len({*_axes(layout)} - {"ep"}) <= MOST_AXES]


def _axes(layout: str) -> list[str]:
    return [part for part in layout.split("-") if part != "sp"]


def _axis_sizes(layout: str, random: Random) -> dict[str, int]:
    """Ranks of every axis; an odd number at times. Those of hsdp are replicas times shards."""
    axes = [axis for axis in _axes(layout) if axis != "ep"]
    if layout == "single":
        return {}
    several = {1: (2, 2, 3, 4), 2: (2, 2, 2, 3), 3: (2,)}[len(axes)]
    sizes = {
        axis: random.choice((2, 4) if len(axes) < 3 else (2,)) for axis in axes if axis == "hsdp"
    }
    left = 8 // sizes.get("hsdp", 1)
    for axis in axes:
        if axis not in sizes:
            sizes[axis] = random.choice([size for size in several if size <= left])
            left //= sizes[axis]
    in_order = {axis: sizes[axis] for axis in axes}
    if "ep" in _axes(layout):
        several = math.prod(size for axis, size in sizes.items() if axis not in ("pp", "tp"))
        in_order["ep"] = random.choice([size for size in (2, 3, 4, 8) if several % size == 0])
    return in_order


def _model(folder: Path, family: str, random: Random, is_newer: bool) -> Model:
    has_router = FAMILIES[family].router is not None
    return Model(
        str(folder),
        init="random",
        dtype="bfloat16" if random.random() < 0.05 else "float32",
        router_aux_loss_coef=random.choice((0.0, 0.01, 0.1)) if has_router else 0.0,
        expert_capacity=random.choice((None, None, 0.6, 1.5)) if has_router and is_newer else None,
    )


def _data(layout: str, sizes: dict[str, int], random: Random) -> Data:
    length = random.randint(1, 37) if random.random() < 0.85 else random.randint(60, 140)
    if layout.endswith("-sp") and random.random() < 0.95:
        length = -(-length // sizes["tp"]) * sizes["tp"]
    if "cp" in sizes and random.random() < 0.95:
        chunks = 2 * sizes["cp"] * (sizes["tp"] if layout.endswith("-sp") else 1)
        length = -(-length // chunks) * chunks
    return Data(
        "unused",
        sequence_length=length,
        packing=random.choice(("concat", "concat", "isolated", "none")),
    )


def _pipeline(num_ranks: int, random: Random) -> tuple[dict[str, Any], int]:
    """Options of a pipeline, and a number of layers that it can cut."""
    schedule = random.choice(list(ORDERS))
    virtual = None
    if num_ranks == 2 and schedule.startswith(("interleaved", "looped")):
        virtual = random.choice((None, 3))
    num_stages = num_ranks * (virtual or (1 if schedule in ("gpipe", "1f1b") else 2))
    num_layers = max(1, num_stages + random.choice((-1, 0, 0, 1, 1, 2, 3)))
    split: Any = random.choice(("balanced", "uniform", "parameters", "uneven"))
    if split == "uneven":  # the first and the last stage may be without a layer
        least = [0, *[1] * (num_stages - 2), 0]
        num_layers = max(num_layers, sum(least))
        split = least
        for _ in range(num_layers - sum(least)):
            split[random.randrange(num_stages)] += 1
    return {
        "pp": num_ranks,
        "schedule": schedule,
        "virtual_stages": virtual,
        "split": split,
    }, num_layers


def _parallel(
    layout: str, sizes: dict[str, int], pipeline: dict[str, Any], random: Random
) -> Parallel:
    data = next((part for part in layout.split("-") if part not in AXES), "single")
    sharded = data in ("fsdp2", "hsdp")
    halved = pipeline.get("schedule") in HALVING
    return Parallel(
        data="fsdp2" if sharded else data,  # ty: ignore[invalid-argument-type]
        **pipeline,
        cp=sizes.get("cp", 1),
        cp_attention=random.choice(("auto", "ring", "gather", "ulysses"))
        if "cp" in sizes
        else "auto",
        ep=sizes.get("ep", 1),
        tp=sizes.get("tp", 1),
        sequence_parallel=layout.endswith("-sp"),
        dp_replicate=2 if data == "hsdp" else 1,
        reshard_after_forward=not sharded or (random.random() < 0.7 and not halved),
        fsdp1_wrap=random.choice(("separate", "naive")) if data == "fsdp1" else "separate",
        offload=random.choice(("none", "none", "optimizer", "all"))
        if layout in ("fsdp2", "hsdp")
        else "none",
    )


def _optimizer(random: Random) -> Optimizer:
    clipped = random.choice((0.1, 0.1, 1.0, None))
    shared: dict[str, Any] = {
        "warmup_steps": random.choice((0, 0, 1)),
        "weight_decay": random.choice((0.0, 0.01, 0.1)),
        "lr_schedule": random.choice(("linear", "cosine", "constant")),
        "max_grad_norm": clipped,
    }
    if (
        random.random() < 0.3
    ):  # an epsilon above most gradients: AdamW turns rounding errors of tiny ones into steps
        return Optimizer(name="adamw", lr=0.01, eps=0.01, **shared)
    return Optimizer(name="sgd", lr=0.5 if clipped == 0.1 else 0.02, **shared)


def _training(cfg: RunConfig, sizes: dict[str, int], kinds: list[str], random: Random) -> Training:
    parallel = cfg.parallel
    data_size = 1
    for axis, size in sizes.items():
        data_size *= size if axis not in AXES else 1
    least = (
        {"1f1b": parallel.pp, "dualpipe-v": 2 * parallel.pp}.get(parallel.schedule, 1)
        if parallel.pp > 1
        else 1
    )
    num_microbatches = random.randint(least, least + 2)
    if parallel.schedule.startswith("interleaved"):  # equal rounds
        num_microbatches = random.choice((1, 2, parallel.pp, 2 * parallel.pp))
    micro_batch_size = random.choice((1, 1, 2, 3))
    halves = parallel.pp > 1 and parallel.schedule in HALVING
    narrow = cfg.model.dtype == "bfloat16"
    return replace(
        cfg.training,
        global_batch_size=data_size * num_microbatches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision="bfloat16" if narrow or random.random() < 0.08 else "float32",
        accumulation="float32" if narrow and random.random() < 0.5 else "model",
        checkpointing="none"
        if halves
        else random.choice(("none", "none", "full", "operators", [kinds[-1]])),
        loss=random.choice(("auto", "chunked", "plain")),
    )


def _lora(cfg: RunConfig, hf_config: PretrainedConfig, random: Random) -> Lora:
    family = FAMILIES[hf_config.model_type]
    targets: Any = random.choice(("auto", "auto", "attention", "all-linear", "some"))
    if targets == "some":
        hf = load.build_meta(cfg.model, hf_config)
        paths = lora.reach(hf, spec_of(hf_config, hf), "all-linear")
        targets = random.sample(paths, random.randint(1, min(5, len(paths))))
    dropped = not family.named("experts") or targets in (
        "auto",
        "attention",
    )  # experts' adapters have no input
    saved = [family.norm]
    if not hf_config.tie_word_embeddings:
        saved += [family.head, family.embed]
    if targets in ("auto", "all-linear"):
        saved += [next(block.path for block in family.blocks if block.kind.is_attention)]
    return Lora(
        r=random.choice((1, 2, 3, 5, 8)),
        alpha=random.choice((1.0, 8.0, 16.0)),
        dropout=random.choice((0.0, 0.0, 0.1, 0.4)) if dropped else 0.0,
        targets=targets,
        rslora=random.random() < 0.3,
        modules_to_save=[random.choice(saved)] if random.random() < 0.4 else [],
        kernel=random.choice(("auto", "torch", "peft")),
    )
