"""A few steps under any layout, and what must be equal to one process: the harness that every
layout extends.

The rules are those of docs/concepts/parity.md: float32, SGD, LoRA's B drawn at random, no compared
gradient zero, row lengths that give each rank another number of target tokens, two micro-batches
per step, and clipping that acts.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from shardwise.assembly.build import build
from shardwise.assembly.state import MemoryState
from shardwise.checkpoint.export import save_result
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.interfaces import IGNORED, Batch, Mesh
from shardwise.layouts import HALVING
from shardwise.models import families, load, lora
from shardwise.models.families import spec_of
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.training.evaluate import evaluate
from shardwise.training.step import forward_backward, training_step

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
DEEP = Path(__file__).parent / "models"
"""More layers, for pipelines of more stages than the tiny models have."""
FAMILIES = {
    "llama": "tiny-llama",
    "qwen3_5_text": "tiny-qwen3_5",
    "qwen3_next": "tiny-qwen3_next",
    "olmo_hybrid": "tiny-olmo_hybrid",
    "nemotron_h": "tiny-nemotron_h",
    "qwen3": "tiny-qwen3",
    "olmo2": "tiny-olmo2",
    "qwen3_moe": "tiny-qwen3_moe",
    "lfm2": "tiny-lfm2",
    "gpt2": "tiny-gpt2",
    "granitemoehybrid": "tiny-granitemoehybrid",
    "falcon_h1": "tiny-falcon_h1",
    "kimi_linear": "tiny-kimi_linear",
    "jamba": "tiny-jamba",
    "jet_nemotron": "tiny-jet_nemotron",
}
TIED = {"qwen3_5_text": "tiny-qwen3_5-tied", "jet_nemotron": "jet-nemotron-tiny"}
"""Of `FAMILIES`, with one weight for embedding and head."""
SOME_LAYERS = {
    "upper": {  # layers 2 and 3 of 4
        "llama": [
            f"layers.{i}.{name}"
            for i in (2, 3)
            for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        ],
        "qwen3_next": [f"layers.2.linear_attn.{name}" for name in ("in_proj_qkvz", "out_proj")]
        + [f"layers.3.self_attn.{name}" for name in ("v_proj", "o_proj")],
    },
    "lower": {  # layers 0 and 1
        "llama": [
            f"layers.{i}.{name}"
            for i in (0, 1)
            for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        ],
        "qwen3_next": [
            f"layers.{i}.linear_attn.{name}"
            for i in (0, 1)
            for name in ("in_proj_qkvz", "out_proj")
        ],
    },
}
"""Targets of LoRA in the variants of these names."""
GLOBAL_BATCH, SEQUENCE, MAX_NORM = 8, 24, 0.1
STILL = "still"
"""Variant of a control: float32, at the learning rate of the bfloat16 cells."""
OVERFLOWING_SCALE = 2.0**22
"""Of the llama's loss: the first step's float16 gradients overflow, the last one's do not."""
TOLERANCE = {"loss": 1e-6, "grad": 1e-5, "norm": 1e-5, "param": 1e-5, "saved": 1e-5}


@dataclass(frozen=True)
class Cell:
    """One point of the parity matrix."""

    family: str
    layout: str  # as rules.offered_layouts has it
    mode: str  # lora | full
    nproc: int = 1
    # One more thing that differs from the plain cell, or "": see `run_config` and `reference`.
    variant: str = ""
    schedule: str = ""  # of a pipeline
    split: tuple[int, ...] = ()  # layers of a pipeline's stages; (): uniform
    deep: bool = False  # the model of DEEP
    rows: int = GLOBAL_BATCH
    micro_rows: int = (
        0  # of a micro-batch; 0: 2, or 1 where more than 2 processes have different rows
    )

    @property
    def id(self) -> str:
        """Unique in the matrix."""
        split = "+".join(map(str, self.split))
        rows = f"{self.rows}-rows" if self.rows != GLOBAL_BATCH else ""
        parts = (
            self.family,
            self.layout,
            self.schedule,
            split,
            self.mode,
            f"{self.nproc}p",
            self.variant,
            rows,
        )
        return "-".join(filter(None, (*parts, "deep" * self.deep)))

    @property
    def data(self) -> str:
        """The data-parallel part of the layout; single where there is none."""
        return next(
            (part for part in self.layout.split("-") if part not in ("pp", "tp", "sp")), "single"
        )

    @property
    def pp(self) -> int:
        """Pipeline ranks: all, or 2 where there are other axes."""
        return 1 if not self.schedule else self.nproc if self.layout == "pp" else 2

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks: all, those that a pipeline leaves, or 2 where others split the
        data."""
        if "tp" not in self.layout.split("-"):
            return 1
        return self.nproc // self.pp if self.data == "single" else 2

    @property
    def many(self) -> bool:
        """More than 2 processes, of which some have different rows."""
        return self.nproc > 2 and self.data != "single"

    def reference(self) -> Cell:
        """The same work on one process, plain where the variant must not change any number."""
        same = (
            "checkpointing",
            "operators",
            "compile",
            "keep-gathered",
            "naive",
            "offload-optimizer",
            "offload-all",
        )
        variant = "" if self.variant in same else self.variant.removeprefix("checkpointing-")
        # A micro-batch of another size rounds otherwise: on one process too it moves the smallest
        # gradients of full training, those of A_log (3.5e-5), by 1e-5 of them. Adapters have none
        # so small, and show that size is free.
        own = self.many and (self.mode == "full" or bool(self.schedule))
        micro_rows = 1 if own else 0
        return replace(
            self,
            layout="single",
            nproc=1,
            variant=variant,
            schedule="",
            split=(),
            micro_rows=micro_rows,
        )


@dataclass(frozen=True)
class Outcome:
    """What a cell computed; tensors are whole, whatever the layout."""

    losses: list[float]
    norms: list[float]
    eval_loss: float
    grads: dict[str, torch.Tensor]  # of the first step, before clipping
    params: dict[str, torch.Tensor]  # trainable, after the last step
    saved: dict[str, torch.Tensor]  # what the run leaves on disk


def run_config(cell: Cell, optimizer: Literal["sgd", "adamw"] = "sgd") -> RunConfig:
    """The run file of a cell."""
    name = (TIED if cell.variant == "tied" else FAMILIES)[cell.family]
    return RunConfig(
        model=Model(
            str(DEEP / name.replace("tiny", "deep") if cell.deep else CONFIGS / name),
            init="random",
            router_aux_loss_coef=0.01
            if getattr(families.FAMILIES.get(cell.family), "router", None)
            else 0.0,
        ),
        lora=None if cell.mode == "full" else _lora(cell),
        data=Data(
            train="unused",
            sequence_length=SEQUENCE,
            packing="isolated" if "isolated" in cell.variant else "concat",
        ),
        parallel=_parallel(cell),
        optimizer=Optimizer(
            name=optimizer,
            # In bfloat16 a weight that is off by 1e-7 may be rounded the other way, which is 4e-3
            # of it.
            lr=0.0 if cell.variant in ("bfloat16", STILL) else 1.0,
            lr_schedule="linear",
            weight_decay=0.01,
            # Less than half of what the gradients come to, so that clipping always acts.
            max_grad_norm=MAX_NORM,
        ),
        training=Training(
            output_dir="unused",
            steps=3,
            global_batch_size=cell.rows,
            micro_batch_size=cell.micro_rows or (1 if cell.many else 2),
            checkpointing={"checkpointing": "full", "operators": "operators"}.get(
                cell.variant.partition("-")[0], "none"
            ),
            compile="aot_eager" if cell.variant == "compile" else "none",
            precision=cell.variant if cell.variant in ("float16", "bfloat16") else "float32",
            device="cpu",
        ),
    )


def _parallel(cell: Cell) -> Parallel:
    data = cell.data
    pipeline: dict[str, Any] = {
        "pp": cell.pp,
        "tp": cell.tp,
        "sequence_parallel": cell.layout.endswith("-sp"),
    }
    if cell.schedule:
        pipeline |= {"schedule": cell.schedule, "split": list(cell.split) or "uniform"}
    sharded = data in ("fsdp2", "hsdp")
    return Parallel(
        data="fsdp2" if sharded else data,
        dp_replicate=2 if data == "hsdp" else 1,
        reshard_after_forward=cell.variant != "keep-gathered"
        and not (sharded and cell.schedule in HALVING),
        fsdp1_wrap="naive" if cell.variant == "naive" else "separate",
        offload=cell.variant.removeprefix("offload-")
        if cell.variant.startswith("offload-")
        else "none",
        **pipeline,
    )


def _lora(cell: Cell) -> Lora:
    return Lora(
        r=4,
        alpha=64 if cell.variant in SOME_LAYERS else 8,  # so few adapters have small gradients
        dropout=0.2 * ("dropout" in cell.variant),
        targets=_targets(cell),
        modules_to_save=["lm_head"] if cell.variant == "head" else [],
    )


def _targets(cell: Cell) -> Any:
    if cell.variant in SOME_LAYERS:
        return SOME_LAYERS[cell.variant][cell.family]
    return "all-linear" if cell.variant == "experts" else "auto"


Row = Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(slot, step) -> tokens, labels and documents of a row, each [T]."""


def microbatches(cfg: RunConfig, mesh: Mesh, step: int, row: Row | None = None) -> list[Batch]:
    """This rank's rows of step `step`; without `row` those of the matrix, which have 24, 5, 14, 23,
    ... targets."""
    size = cfg.training.micro_batch_size
    slots = list(mesh.slots(cfg.training.global_batch_size))
    batches = []
    for start in range(0, len(slots), size):
        rows = [(row or _row)(slot, step) for slot in slots[start : start + size]]
        ids, labels, owners = (torch.stack(part) for part in zip(*rows))
        batches.append(Batch(ids, labels, owners, tuple(slots[start : start + size]), step))
    return batches


def _row(slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + slot)
    tokens = torch.randint(0, 256, (SEQUENCE + 1,), generator=generator)
    labels = tokens[1:].clone()
    labels[SEQUENCE - (slot * 7 + step * 3) % 20 :] = IGNORED
    # Three documents, of 1 to 12 tokens in the front and 1 to 7 at the end; only packing `isolated`
    # looks at them.
    places = torch.arange(SEQUENCE)
    owners = (places >= 1 + (slot * 5 + step) % 12).long() + (
        places >= SEQUENCE - 1 - (slot * 3 + step) % 7
    ).long()
    return tokens[:-1], labels, owners


def start(cfg: RunConfig) -> MemoryState:
    """Values at which gradients show what they are to show.

    LoRA's B is drawn at random: at its usual zero every gradient of A is zero and proves nothing.
    Rates of decay are drawn small, so that a recurrent state lives for some tokens: at their usual
    values it is forgotten at once, and the rates' gradients are so small (1e-5) that they are
    rounding errors for a good part.
    """
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    if cfg.lora is not None:
        lora.inject(hf, cfg.lora, spec_of(hf_config, hf))
    return MemoryState({f"weights/{name}": value for name, value in _drawn(hf)})


def _drawn(hf: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in hf.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        if ".lora_B." in name:
            yield name, torch.randn(parameter.shape, generator=generator) * 0.05
        elif name.endswith(".A_log"):
            yield name, (0.02 + 0.3 * torch.rand(parameter.shape, generator=generator)).log()


def run_cell(cell: Cell) -> Outcome:
    """What this rank sees of a cell (equal on every rank); the process group must be up."""
    cfg = run_config(cell)
    return run(
        cfg,
        lambda mesh, step: microbatches(cfg, mesh, step),
        OVERFLOWING_SCALE * (cell.variant == "float16"),
    )


def run(
    cfg: RunConfig, batches_of: Callable[[Mesh, int], list[Batch]], loss_scale: float = 0.0
) -> Outcome:
    """What this rank sees of a run on these micro-batches of each step; `loss_scale`: the first, 0
    for its own."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, start(cfg))
    if loss_scale:
        job.loss_scale.scale = loss_scale
    losses: list[float] = []
    norms: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    # Whole parameters without their optimizer's shards, frozen ones too: what else has got a
    # gradient.
    named = [
        *job.pm.named_parameters(),
        *(pair for g in job.optimizer.param_groups for pair in _pairs(g)),
    ]

    def look() -> None:
        for name, parameter in named:
            if parameter.grad is not None:
                grads[name] = full_tensor(job.pm.to_portable(name, parameter.grad)).clone()

    # The first step's gradients are looked at within the step, when all is reduced.
    first = replace(job, pm=replace(job.pm, reduce_grads=(*job.pm.reduce_grads, look)))
    if cfg.training.precision == "float16":
        # Times the loss scale they overflow, so they are looked at without it.
        forward_backward(first.pm, batches_of(mesh, 1), mesh)
        for _, parameter in named:
            parameter.grad = None
        first = job
    for step in range(1, cfg.training.steps + 1):
        of_step = first if step == 1 else job
        result = training_step(of_step, batches_of(mesh, step), mesh, cfg.optimizer.max_grad_norm)
        losses.append(result.loss)
        norms.append(
            math.inf if result.skipped else result.grad_norm
        )  # inf on one rank may be NaN on another
    eval_loss = evaluate(job.pm, [batches_of(mesh, 7)], mesh, cfg.training.steps).loss
    with tempfile.TemporaryDirectory() as folder:
        written = save_result(job, cfg, mesh, Path(folder))
        saved = {} if written is None else _read_safetensors(written)
    params = {
        name: full_tensor(job.pm.to_portable(name, p)).clone()
        for name, p in job.pm.named_parameters()
        if p.requires_grad
    }
    return Outcome(losses, norms, eval_loss, grads, params, saved)


def _pairs(group: dict[str, Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return zip(group["param_names"], group["params"])


def _read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def compare(outcomes: Sequence[Outcome], reference: Outcome) -> dict[str, float]:
    """Largest relative errors of all ranks; a tensor's is its largest absolute difference over its
    largest value.

    The ranks need not hold the same parameters, but must hold all of the reference's between them,
    and no others.
    """
    for name, grad in reference.grads.items():
        assert grad.abs().max() > 0, f"the gradient of {name} is zero and proves nothing"
    assert min(reference.norms) > MAX_NORM, "clipping did not act"
    assert reference.norms[-1] < math.inf, "no step was done"
    return {
        kind: _largest(errors.values()) for kind, errors in differences(outcomes, reference).items()
    }


def differences(outcomes: Sequence[Outcome], reference: Outcome) -> dict[str, dict[str, float]]:
    """By kind of number (as in TOLERANCE) and by name: the largest relative error of all ranks.

    It is infinite for a tensor that no rank has, or that only the ranks have.
    """
    losses = [[*outcome.losses, outcome.eval_loss] for outcome in (*outcomes, reference)]
    return {
        "loss": _by_step(losses[:-1], losses[-1]),
        "norm": _by_step([rank.norms for rank in outcomes], reference.norms),
        "grad": _worst([rank.grads for rank in outcomes], reference.grads),
        "param": _worst([rank.params for rank in outcomes], reference.params),
        "saved": _worst([rank.saved for rank in outcomes], reference.saved),
    }


def control(cell: Cell) -> Cell | None:
    """One process in float32, where a cell need not round as one process in 16 bits does: its
    products are sums of rounded ones. What it may differ by is then three times what 16 bits change
    on one process: as much as that again on its own way from float32, and as much to spare.
    """
    return (
        replace(cell.reference(), variant=STILL)
        if cell.tp > 1 and cell.variant == "bfloat16"
        else None
    )


def tolerance(in_16_bits: Outcome, in_float32: Outcome) -> dict[str, float]:
    """Of a cell that has a `control`, by the latter's outcome and the reference's."""
    changed = compare([in_16_bits], in_float32)
    return {key: max(TOLERANCE[key], 3 * changed[key]) for key in TOLERANCE}


def verdict(errors: dict[str, float], most: Mapping[str, float] = TOLERANCE) -> list[str]:
    """What is out of tolerance; empty where the cell is right (NaN is not)."""
    return [
        f"{key} {errors[key]:.1e} > {most[key]:.0e}" for key in most if not errors[key] <= most[key]
    ]


def _relative(value: float, reference: float) -> float:
    return (
        0.0 if value == reference else abs(value - reference) / abs(reference)
    )  # equal infinities differ by NaN


def _by_step(by_rank: Sequence[list[float]], reference: list[float]) -> dict[str, float]:
    """The evaluation's loss is that of the step after the last."""
    return {
        f"step {i + 1}": _largest(_relative(rank[i], value) for rank in by_rank)
        for i, value in enumerate(reference)
    }


def _worst(
    by_rank: Sequence[dict[str, torch.Tensor]], reference: dict[str, torch.Tensor]
) -> dict[str, float]:
    errors = dict.fromkeys(reference.keys() ^ set().union(*by_rank), math.inf)
    for name, whole in reference.items():
        pieces = [tensors[name] for tensors in by_rank if name in tensors]
        if pieces:
            least = whole.abs().max().clamp(min=1e-30)
            errors[name] = _largest(
                ((piece - whole).abs().max() / least).item() for piece in pieces
            )
    return errors


def _largest(values: Iterable[float]) -> float:
    return (
        torch.tensor(list(values)).max().item()
    )  # NaN if one of them is, which Python's max need not be
