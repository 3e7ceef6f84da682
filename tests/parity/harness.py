"""The cells of the parity matrix, and what each of them runs.

The rules are those of docs/concepts/parity.md: float32, SGD, LoRA's B drawn at random, no compared
gradient zero, row lengths that give each rank another number of target tokens, two micro-batches
per step, and clipping that acts. What is compared, and how, is `shardwise.lab.proof.harness`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from shardwise.base.batches import Batch
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import ALONE, data_parts
from shardwise.base.schedules import HALVING
from shardwise.config import (
    Data,
    Lora,
    Model,
    Optimizer,
    Parallel,
    Preference,
    Recomputation,
    RunConfig,
    Training,
)
from shardwise.kernels import eight_bit, float8
from shardwise.lab.proof.harness import (
    TOLERANCE,
    DrawnStart,
    Outcome,
    RandomRows,
    differences,
    drawn,
    largest,
    microbatches,
    tolerance,
    verdict,
    weaknesses,
)
from shardwise.lab.proof.harness import run as run_on
from shardwise.models import families
from shardwise.parallel.mesh import build_mesh
from tests.models.tiny import CONFIGS, TINY_OF

__all__ = [
    "CONFIGS",
    "DEEP",
    "FAMILIES",
    "GLOBAL_BATCH",
    "MAX_NORM",
    "TIED",
    "TOLERANCE",
    "Cell",
    "DrawnStart",
    "Outcome",
    "compare",
    "control",
    "differences",
    "drawn",
    "microbatches",
    "run",
    "run_cell",
    "run_config",
    "tolerance",
    "verdict",
]

DEEP = Path(__file__).parent / "models"
"""More layers, for pipelines of more stages than the tiny models have."""
FAMILIES = dict(TINY_OF)
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
        # Layer 1 is dense; those below and above have experts.
        "qwen3_moe": [
            f"layers.{i}.self_attn.{name}" for i in (1, 2) for name in ("q_proj", "v_proj")
        ],
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
GLOBAL_BATCH, SEQUENCE, MAX_NORM = 8, RandomRows.length, 0.1
CONTEXT_WAYS = ("ring", "gather")
"""Variants, which may follow another one: `parallel.cp_attention`."""
ACTIVATIONS = ("activations", "checkpointing-activations", "activations-compile")
"""Variants: `training.offload_activations`, also of the inputs of layers that are recomputed."""
RECOMPUTED: dict[str, Any] = {
    "checkpointing": "full",
    "operators": "operators",
    "mixed": Recomputation(full=(0, 2), operators=(1,)),
}
"""Variants: `training.checkpointing`; `mixed` is as a budget of memory chooses."""
DISK = ("offload-disk", "checkpointing-offload-disk", "operators-offload-disk")
"""Variants: `parallel.offload` is disk, also where layers are recomputed."""
BASES = ("nf4", "int8", "fp8", "mxfp4", "nvfp4")
"""Variants: `model.base`, for models with whole blocks of 64 in a half of each matrix."""
RECIPES = ("tensorwise", "rowwise")
"""Variants: `training.matmul` in 8 bits, on the models that BASES have."""
PAIRS = {
    "dpo": Preference(beta=0.3),
    "dpo-start": Preference(beta=0.3, reference="start"),
    "dpo-ipo": Preference(beta=0.2, loss="ipo", sft_weight=0.5),
    "kto": Preference(beta=0.5, undesirable_weight=0.6),
    "kto-start": Preference(beta=0.3, reference="start"),
    "orpo": Preference(beta=1.0),
    "simpo": Preference(margin=0.5, label_smoothing=0.1),
}
"""Variants: objectives of preferences, with what makes gradients large enough to be clipped."""
CURVE = "-curve"
"""Suffix of a recipe: scaled numbers are bent by `curved` where they would be rounded."""
WIDE = "wide"
"""Variant of a control: the model that BASES and RECIPES have, in float32."""
EIGHT_BIT = "adamw8bit"
"""Variant: `optimizer.name`, in blocks that the tiny models have: see `numerics_of`."""
ADAMW = "adamw"
"""Variant of a control: plain AdamW, where others are 8-bit."""
BESIDE_ADAMW = ("muon", EIGHT_BIT, ADAMW)
"""Variants, which may follow an objective of pairs: cells whose updates are not SGD's."""
COPY = "-copy"
"""Suffix of a reference: plain weights, which were stored in the base's format and read back."""
COPIES = "bfloat16-copies"
"""Variant: `training.cast` is weights, also where layers are recomputed."""
STILL = "still"
"""Variant of a control, float32 at the learning rate of the bfloat16 cells; or suffix of one."""
FASTER = 4.0
"""`optimizer.lora_b_lr_ratio` of cells with `faster_b`."""
CAPACITY = 0.75
"""`model.expert_capacity` of cells with a capacity: experts drop a good part of the tokens."""
BALANCED = "balanced"
"""Variant: `model.router_bias_rate`, in a family whose routers have biases. They are saved."""
BIAS_RATE = 0.02
"""Of such cells: several times what separates the scores of some experts."""
OVERFLOWING_SCALE = 2.0**22
"""Of the llama's loss: the first step's float16 gradients overflow, the last one's do not."""


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
    spread: int = 0  # ranks that share experts; 0: 2 where the layout has `ep`
    faster_b: bool = False  # LoRA's B learns at FASTER times the rate of A
    dora: bool = False  # `lora.dora`

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
            f"ep{self.spread}" * bool(self.spread),
            "faster-b" * self.faster_b,
            "dora" * self.dora,
        )
        return "-".join(filter(None, (*parts, "deep" * self.deep)))

    @property
    def data(self) -> str:
        """The data-parallel part of the layout; single where there is none."""
        return next((part for part in self.layout.split("-") if part in data_parts()), ALONE)

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
        return self.nproc // self.pp // self.cp if self.data == "single" else 2

    @property
    def cp(self) -> int:
        """Context-parallel ranks: all where there is no other axis, else 2."""
        parts = self.layout.split("-")
        if "cp" not in parts:
            return 1
        return self.nproc if self.data == "single" and {*parts} <= {"cp", "ep"} else 2

    @property
    def ep(self) -> int:
        """Ranks over which experts are spread."""
        return self.spread or (2 if "ep" in self.layout.split("-") else 1)

    @property
    def many(self) -> bool:
        """More than 2 processes, of which some have different rows."""
        return self.nproc > 2 and self.data != "single"

    def reference(self) -> Cell:
        """The same work on one process, plain where the variant must not change any number."""
        same = (
            "checkpointing",
            "operators",
            "mixed",
            "compile",
            "keep-gathered",
            "naive",
            "offload-optimizer",
            "offload-all",
            *DISK,
            *ACTIVATIONS,
            *CONTEXT_WAYS,
        )
        variant = "" if self.variant in same else self.variant.removeprefix("checkpointing-")
        variant = variant.removesuffix("-ring").removesuffix("-compile")
        if variant in BASES:
            variant += COPY
        # A micro-batch of another size rounds otherwise: on one process too it moves the smallest
        # gradients of full training, those of A_log (3.5e-5), by 1e-5 of them. Adapters have none
        # so small, and show that size is free.
        # In 8 bits a scale is that of a micro-batch, whose size is then not free.
        is_scaled = self.variant.startswith(RECIPES)
        own = self.many and (self.mode == "full" or bool(self.schedule) or is_scaled)
        micro_rows = 1 if own else 0
        return replace(
            self,
            layout="single",
            nproc=1,
            variant=variant,
            schedule="",
            split=(),
            micro_rows=micro_rows,
            spread=0,
        )


def run_config(cell: Cell, optimizer: Literal["sgd", "adamw"] = "sgd") -> RunConfig:
    """The run file of a cell."""
    name = (TIED if cell.variant == "tied" else FAMILIES)[cell.family]
    path = DEEP / name.replace("tiny", "deep") if cell.deep else CONFIGS / name
    by = next((name for name in BESIDE_ADAMW if name in cell.variant.split("-")), "")
    is_sgd = not by
    preference = PAIRS.get(cell.variant.removesuffix(f"-{ADAMW}"))
    objective: Any = cell.variant.partition("-")[0] if preference else "sft"
    if cell.variant.startswith((*BASES, *RECIPES, WIDE)):
        path = DEEP / name.replace("tiny", "wide")
    return RunConfig(
        model=Model(
            str(path),
            init="random",
            base=cell.variant if cell.variant in BASES else "none",
            router_aux_loss_coef=0.01
            if getattr(families.FAMILIES.get(cell.family), "router", None)
            else 0.0,
            router_bias_rate=BIAS_RATE if cell.variant == BALANCED else 0.0,
            expert_capacity=CAPACITY if "capacity" in cell.variant else None,
        ),
        lora=None if cell.mode == "full" else _lora(cell),
        data=Data(
            train="unused",
            sequence_length=SEQUENCE,
            packing="isolated" if "isolated" in cell.variant else "concat",
        )
        if objective == "sft"
        else Data(train="unused", sequence_length=SEQUENCE, format="preference"),
        preference=preference or Preference(),
        parallel=_parallel(cell),
        optimizer=Optimizer(
            name=by or optimizer,
            # In bfloat16 a weight that is off by 1e-7 may be rounded the other way, which is 4e-3
            # of it.
            lr=0.0
            if "bfloat16" in cell.variant or cell.variant.endswith(STILL)
            else 1.0
            if is_sgd
            else 0.01,
            # Above most gradients: AdamW makes steps of rounding errors in tiny ones.
            eps=1e-8 if is_sgd else 0.01,
            lora_b_lr_ratio=FASTER if cell.faster_b else 1.0,
            lr_schedule="linear",
            weight_decay=0.01,
            # Less than half of what the gradients come to, so that clipping always acts.
            max_grad_norm=MAX_NORM,
        ),
        training=Training(
            output_dir="unused",
            objective=objective,
            steps=3,
            global_batch_size=cell.rows,
            micro_batch_size=cell.micro_rows or (1 if cell.many else 2),
            checkpointing=RECOMPUTED.get(cell.variant.partition("-")[0], "none"),
            offload_activations=cell.variant in ACTIVATIONS,
            compile="aot_eager" if cell.variant.endswith("compile") else "none",
            precision=_precision(cell),
            cast="weights" if cell.variant.endswith(COPIES) else "products",
            matmul=_matmul(cell),
            device="cpu",
        ),
    )


def _parallel(cell: Cell) -> Parallel:
    data = cell.data
    pipeline: dict[str, Any] = {
        "pp": cell.pp,
        "cp": cell.cp,
        "cp_attention": way if (way := cell.variant.rpartition("-")[2]) in CONTEXT_WAYS else "auto",
        "ep": cell.ep,
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
        offload=cell.variant.rpartition("offload-")[2] if "offload-" in cell.variant else "none",
        offload_folder=tempfile.gettempdir() if cell.variant in DISK else None,
        **pipeline,
    )


def _matmul(cell: Cell) -> Any:
    recipe = cell.variant.removesuffix(CURVE)
    return f"fp8_{recipe}" if recipe in RECIPES else "default"


def _overflows(cell: Cell) -> bool:
    return (cell.family, cell.mode, _precision(cell)) == ("llama", "full", "float16")


def _precision(cell: Cell) -> str:
    names = cell.variant.split("-")
    return next((name for name in names if name in ("float16", "bfloat16")), "float32")


def _lora(cell: Cell) -> Lora:
    return Lora(
        r=4,
        alpha=64 if cell.variant in SOME_LAYERS else 8,  # so few adapters have small gradients
        dropout=0.2 * ("dropout" in cell.variant),
        targets=_targets(cell),
        experts="shared" if cell.variant == "shared" else "each",
        dora=cell.dora,
        modules_to_save=["lm_head"] if cell.variant == "head" else [],
    )


def _targets(cell: Cell) -> Any:
    if cell.variant in SOME_LAYERS:
        return SOME_LAYERS[cell.variant][cell.family]
    return "all-linear" if cell.variant in ("experts", "shared") else "auto"


def run_cell(cell: Cell) -> Outcome:
    """What this rank sees of a cell (equal on every rank); the process group must be up."""
    cfg = run_config(cell)
    with numerics_of(cell):
        return run(
            cfg,
            lambda mesh, step: microbatches(cfg, mesh, step),
            OVERFLOWING_SCALE * _overflows(cell),
            cell.variant.removesuffix(COPY) if cell.variant.endswith(COPY) else None,
        )


@contextmanager
def numerics_of(cell: Cell) -> Generator[None]:
    """Compute as a cell does. Its variant may bend scaled numbers where 8 bits would round them,
    by `curved` and `bent_moment`. Those with 8-bit AdamW have blocks of 8, which tiny models have
    whole ones of on 4 ranks, and no tensor with rows of blocks is too small."""
    with pytest.MonkeyPatch.context() as patch:
        if cell.variant.endswith(CURVE):
            patch.setattr(float8, "rounded", curved)
            patch.setattr(eight_bit, "nearest", bent_moment)
            patch.setattr(eight_bit, "values_of", lambda codes, is_signed: codes.clone())
            patch.setattr(eight_bit, "CODES", torch.float32)
        if cell.variant.startswith(EIGHT_BIT):
            patch.setattr(eight_bit, "BLOCK", 8)
            patch.setattr(eight_bit, "LEAST", 256)
        yield


def bent_moment(scaled: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Scaled moments bent by a smooth curve, which keeps 0 and the order; see `curved`."""
    return scaled + (1 - (4 * scaled).cos()) / 8


def curved(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scaled numbers bent by a smooth curve, so that results depend on their scale.

    Rounding to 8 bits would turn a difference of 1e-7, which any other order of a sum makes, into
    one of 6e-2 where it crosses the middle between two numbers, and products of rounded operands
    hardly change with the scale. So rounding hides wrong scales; a curve shows them, and keeps
    small differences small.
    """
    bend = torch.finfo(dtype).max / (16 if dtype == torch.float8_e4m3fn else 8)
    return scaled + bend / 2 * (1 - (scaled / bend).cos())


def run(
    cfg: RunConfig,
    batches_of: Callable[[Mesh, int], list[Batch]],
    loss_scale: float = 0.0,
    read_back: Any = None,
) -> Outcome:
    """What this rank sees of a run on these micro-batches of each step; `loss_scale`: the first, 0
    for its own; `read_back`: see `DrawnStart`."""
    return run_on(cfg, build_mesh(cfg, torch.device("cpu")), batches_of, loss_scale, read_back)


def compare(outcomes: Sequence[Outcome], reference: Outcome) -> dict[str, float]:
    """Largest relative errors of all ranks, by kind; no compared gradient may be zero, and clipping
    must act."""
    problems = weaknesses(reference, MAX_NORM)
    assert not problems, "; ".join(problems)
    return largest(differences(outcomes, reference))


def control(cell: Cell) -> Cell | None:
    """One process in float32, where a cell need not round as one process in 16 bits does: its
    products are sums of rounded ones; or where products have 8 bits, as what differs by 1e-7 may be
    rounded to other numbers. What it may differ by is then three times what 16 bits change
    on one process: as much as that again on its own way from float32, and as much to spare.
    """
    if cell.variant in RECIPES:
        return replace(cell.reference(), variant=WIDE)
    if cell.variant == EIGHT_BIT:
        return replace(cell.reference(), variant=ADAMW)
    rounds_otherwise = max(cell.tp, cell.cp, cell.ep) > 1
    if rounds_otherwise and _precision(cell) != "float32":
        return replace(cell.reference(), variant=STILL)
    return None
