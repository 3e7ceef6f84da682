"""The cells of the grid of memory peaks, and what one of them measures on its ranks.

Models are those of configs/models/tiny-*, made wider: 1 to 10 million parameters, as with fewer
the constants of a process would decide. `tools/plan_grid.py` runs all cells.
"""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.assembly.describe import Description, describe
from shardwise.base.batches import Batch
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import axis_sizes
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.lab.planner.memory import PeakBytes, state_bytes
from shardwise.lab.planner.peak import boundaries_of, memory_of_run
from shardwise.lab.planner.share import share_of
from shardwise.metrics.live_tensors import cpu_tensors, live_tensors
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.pipeline_parallel import pipeline_of
from shardwise.training.measure import measure_memory
from shardwise.training.step import training_step

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
WIDER: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 688, "head_dim": 32},
    "gpt2": {"n_embd": 256, "n_inner": 1024, "n_head": 8},
    "qwen3_5": {
        "intermediate_size": 688,
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "jamba": {"intermediate_size": 384, "mamba_dt_rank": 16},
    "falcon_h1": {"intermediate_size": 688, "head_dim": 64, "mamba_d_ssm": 384, "mamba_d_head": 64},
    "lfm2": {"intermediate_size": 688},
    "kimi_linear": {"intermediate_size": 688, "linear_head_dim": 64, "moe_intermediate_size": 128},
    "qwen3_moe": {"intermediate_size": 688, "head_dim": 32, "moe_intermediate_size": 128},
}
"""What differs from the tiny model of each family, beside width and vocabulary."""
WIDTH, VOCABULARY = 256, 2048
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    **{data: {"data": data} for data in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2")},
    "tp": {"tp": 2},
    "tp-sp": {"tp": 2, "sequence_parallel": True},
    "cp": {"cp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2},
    "zbv": {"pp": 2, "schedule": "zbv"},
    "interleaved": {"pp": 2, "schedule": "interleaved-1f1b"},
    "hsdp": {"data": "fsdp2", "dp_replicate": 2},
    "fsdp2-tp": {"data": "fsdp2", "tp": 2},
    "1f1b-ddp": {"data": "ddp", "pp": 2},
    "1f1b-tp": {"pp": 2, "tp": 2},
    "fsdp2-ep": {"data": "fsdp2", "ep": 2},
}
COMPOSED: dict[str, dict[str, Any]] = {
    "1f1b-fsdp2": {"data": "fsdp2", "pp": 2},
    "interleaved-fsdp2": {"data": "fsdp2", "pp": 2, "schedule": "interleaved-1f1b"},
    "1f1b-cp": {"pp": 2, "cp": 2},
    "fsdp2-cp": {"data": "fsdp2", "cp": 2},
    "cp-tp": {"cp": 2, "tp": 2},
    "zero1-tp": {"data": "zero1", "tp": 2},
    "fsdp2-tp-sp": {"data": "fsdp2", "tp": 2, "sequence_parallel": True},
    "ddp-ep": {"data": "ddp", "ep": 2},
    "zero1-ep": {"data": "zero1", "ep": 2},
    "1f1b-zero1": {"data": "zero1", "pp": 2},
    "interleaved-zero1": {"data": "zero1", "pp": 2, "schedule": "interleaved-1f1b"},
}
"""Further compositions, each of four ranks."""
HALVED: dict[str, dict[str, Any]] = {
    "zbv": LAYOUTS["zbv"],
    "zero-bubble": {"pp": 2, "schedule": "interleaved-zero-bubble"},
    "dualpipe-v": {"pp": 2, "schedule": "dualpipe-v"},
}
"""Pipelines that run a backward in two halves, with chunks of several layers."""
VARIANTS: dict[str, dict[str, Any]] = {
    "float32 sums": {"training.accumulation": "float32"},
    **{name: {"optimizer.name": name} for name in ("sgd", "muon", "adamw8bit")},
    "dora": {"lora.dora": True},
    "plain loss": {"training.loss": "plain"},
    "copies": {"training.cast": "weights"},
    "kept": {"parallel.reshard_after_forward": False},
    "offload": {"parallel.offload": "optimizer"},
    "naive": {"parallel.fsdp1_wrap": "naive"},
}
"""Keys of the run file that are not the default."""
DEEP = "twelve layers"
OF_MODEL = ("dora", DEEP)
"""Those that change the model."""

STORED_SHORT = "bfloat16 weights"
"""A precision: weights and products in bfloat16."""


@dataclass(frozen=True)
class Cell:
    """A run of a few steps whose peak is measured."""

    family: str
    layout: str
    mode: str  # lora | full
    num_ranks: int
    length: int
    rows: int
    """Rows of a micro-batch."""
    microbatches: int
    checkpointing: str
    precision: str
    base: Literal["none", "nf4", "int8", "fp8"] = "none"
    variant: str = ""

    @property
    def id(self) -> str:
        """Unique in the grid."""
        plain = {"base": "none", "variant": ""}
        return "-".join(str(v) for k, v in asdict(self).items() if k not in plain or v != plain[k])


def cells() -> list[Cell]:
    """Return the grid: families, layouts and modes in full, and the rest in turn."""
    hybrids = ("llama", "qwen3_5", "falcon_h1", "kimi_linear")
    of_layouts = {
        1: [("single", family) for family in WIDER] * 4,
        2: [*product(list(LAYOUTS)[1:13], hybrids[:3]), *product(("ddp", "fsdp2"), hybrids[3:])],
        4: [
            *product(("fsdp2", *list(LAYOUTS)[13:-1]), hybrids[:2]),
            *product(("fsdp2-ep",), ("qwen3_moe", "kimi_linear")),
        ],
    }
    rest = zip(
        cycle((512, 128, 256)),
        cycle((2, 1, 4, 2, 1)),
        cycle((1, 2, 3, 2, 1, 1, 4)),
        cycle(("none", "full", "none", "operators", "none")),
        cycle(("float32", "float32", "bfloat16", "float32")),
    )
    grid = []
    for num_ranks, places in of_layouts.items():
        for (layout, family), mode in product(places, ("lora", "full")):
            length, rows, microbatches, checkpointing, precision = next(rest)
            if LAYOUTS[layout].get("pp"):
                microbatches = 4
            if layout in ("zbv", "interleaved") and family == "falcon_h1":
                family = "lfm2"  # four stages need more than two layers
            if layout == "zbv":  # a rule refuses to recompute layers
                checkpointing = "none"
            cell = Cell(
                family,
                layout,
                mode,
                num_ranks,
                length,
                rows,
                microbatches,
                checkpointing,
                precision,
            )
            grid.append(cell)
    # What a plan takes for LoRA by itself: weights in bfloat16 too.
    places = [(1, "single"), *((2, layout) for layout in ("ddp", "fsdp2", "tp", "1f1b"))]
    for (num_ranks, layout), family in product(places, hybrids[:3]):
        grid.append(Cell(family, layout, "lora", num_ranks, 256, 2, 4, "none", STORED_SHORT))
    return list(dict.fromkeys([*grid, *_composed(), *_varied(), *_halved(), *_short()]))


def _composed() -> Iterator[Cell]:
    """Yield the cells of further compositions."""
    for number, layout in enumerate(COMPOSED):
        families = ("qwen3_moe", "kimi_linear") if "ep" in layout else ("llama", "qwen3_5")
        for family, mode in product(families, ("lora", "full")):
            checkpointing = ("none", "full")[number % 2]
            yield Cell(family, layout, mode, 4, 256, 1, 4, checkpointing, "float32")


def _halved() -> Iterator[Cell]:
    """Yield the cells of HALVED."""
    for layout, family, mode in product(HALVED, ("llama", "qwen3_5"), ("lora", "full")):
        precision = "bfloat16" if layout == "zbv" else "float32"
        yield Cell(family, layout, mode, 2, 256, 1, 4, "none", precision, variant=DEEP)


def _short() -> Iterator[Cell]:
    """Yield cells whose rows end in a chunk of a recurrence that is not full, or are no longer."""
    modes, precisions = cycle(("lora", "full")), cycle(("float32", "bfloat16", "bfloat16"))
    families = ("qwen3_5", "kimi_linear", "jamba", "falcon_h1")
    for (layout, length), family in product((("single", 48), ("single", 96), ("cp", 96)), families):
        num_ranks = 2 if layout == "cp" else 1
        mode, precision = next(modes), next(precisions)
        checkpointing = "operators" if family in families[::3] else "none"
        yield Cell(family, layout, mode, num_ranks, length, 2, 2, checkpointing, precision)


def _varied() -> Iterator[Cell]:
    """Yield cells of weights in 16 bits that are trained, of stored bases, and of VARIANTS."""

    def cell(layout: str, mode: str, precision: str = "float32", **more: Any) -> Cell:
        num_ranks = 1 if layout == "single" else 2
        return Cell("llama", layout, mode, num_ranks, 256, 1, 4, "none", precision, **more)

    data = ("single", "ddp", "zero1", "zero2", "fsdp1", "fsdp2")
    for layout in (*data, "tp", "1f1b"):
        yield cell(layout, "full", STORED_SHORT)
        if layout != "fsdp1":
            yield cell(layout, "full", "bfloat16", variant="copies")
    for layout in data:
        if layout != "fsdp1":
            yield cell(layout, "full", STORED_SHORT, variant="float32 sums")
    for layout, name in product(("single", "zero1", "fsdp2"), ("sgd", "adamw8bit", "muon")):
        if (layout, name) != ("zero1", "muon"):
            yield cell(layout, "full", variant=name)
    for layout, base in product(("single", "fsdp2"), ("int8", "fp8")):
        yield cell(layout, "lora", base=base)
    for layout in ("single", "fsdp2", "tp"):
        yield cell(layout, "lora", variant="dora")
    for layout in ("single", "fsdp2"):
        yield cell(layout, "full", variant="plain loss")
    for mode in ("lora", "full"):
        yield cell("fsdp2", mode, variant="kept")
    yield cell("fsdp2", "full", variant="offload")
    yield cell("fsdp1", "lora", variant="naive")


def config_of(cell: Cell, folder: Path) -> RunConfig:
    """Return the run file of a cell; `folder` gets the model's config."""
    is_deep = cell.variant == DEEP
    model = folder / f"{cell.family}{'-deep' * is_deep}"
    if not (model / "config.json").exists():
        tiny = json.loads((CONFIGS / f"tiny-{cell.family}" / "config.json").read_text())
        width = {} if cell.family == "gpt2" else {"hidden_size": WIDTH}
        model.mkdir(parents=True, exist_ok=True)
        config = tiny | width | {"vocab_size": VOCABULARY} | WIDER[cell.family]
        if is_deep:
            config["num_hidden_layers"] *= 3
            config |= {"layer_types": 3 * tiny["layer_types"]} if "layer_types" in tiny else {}
        # Each rank writes a file of its own, which then takes the place of another's.
        written = model / f"{os.getpid()}.json"
        written.write_text(json.dumps(config))
        written.replace(model / "config.json")
    parallel = Parallel(**(LAYOUTS | COMPOSED | HALVED)[cell.layout])
    ways = cell.num_ranks // parallel.ranks_of_a_model
    is_short = cell.precision == STORED_SHORT
    dtype, precision = ("bfloat16", "bfloat16") if is_short else ("float32", cell.precision)
    cfg = RunConfig(
        model=Model(str(model), init="random", base=cell.base, dtype=dtype),
        lora=Lora(r=8) if cell.mode == "lora" else None,
        data=Data(train="unused", sequence_length=cell.length),
        parallel=parallel,
        optimizer=Optimizer(),
        training=Training(
            output_dir="unused",
            steps=3,
            global_batch_size=ways * cell.rows * cell.microbatches,
            micro_batch_size=cell.rows,
            checkpointing=cell.checkpointing,  # ty: ignore[invalid-argument-type]
            precision=precision,  # ty: ignore[invalid-argument-type]
            device="cpu",
        ),
    )
    for key, value in VARIANTS.get(cell.variant, {}).items():
        section, _, name = key.partition(".")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{name: value})})
    return cfg


def microbatches(cfg: RunConfig, mesh: Mesh) -> list[Batch]:
    """Return the micro-batches of a rank: random tokens, every one with a target."""
    shape = cfg.training.micro_batch_size, cfg.data.sequence_length
    num = len(mesh.slots(cfg.training.global_batch_size)) // shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(num)]
    slots = tuple(range(shape[0]))
    return [Batch(ids, ids.clone(), torch.zeros_like(ids), slots, step=1) for ids in tokens]


@dataclass(frozen=True)
class Measured:
    """The bytes of a rank of a cell."""

    peak: int
    parts: dict[str, int]
    """What the peak consists of, without what other cells have left behind."""
    states: dict[str, int]


def measure(cfg: RunConfig) -> Measured:
    """Run two steps on this rank and measure the second one.

    What other cells have left behind is subtracted, so none of it may be freed meanwhile: what
    nothing refers to any more, also of tests before these processes, is freed now.
    """
    gc.collect()
    with PeakMemory(torch.device("cpu")) as before:
        pass
    assert before.entry_bytes is not None
    left_behind = [weakref.ref(tensor) for tensor in cpu_tensors(live_tensors())]
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    batches = microbatches(cfg, mesh)
    training_step(job, batches, mesh, cfg.optimizer.max_grad_norm)
    rank = dist.get_rank()
    memory = measure_memory(job, batches, mesh, cfg)
    assert all(reference() is not None for reference in left_behind)
    parts = dict(memory.parts[rank])
    parts["temporary"] -= before.entry_bytes
    return Measured(sum(parts.values()), parts, memory.state_bytes[rank])


def measure_each(cells: Sequence[Cell], folder: Path) -> list[Measured]:
    """Measure cells of as many ranks in the same processes."""
    return [measure(config_of(cell, folder)) for cell in cells]


def measure_runs(cfgs: Sequence[RunConfig]) -> list[Measured]:
    """Measure runs of as many ranks in the same processes."""
    return [measure(cfg) for cfg in cfgs]


def predict(cell: Cell, folder: Path) -> tuple[list[dict[str, int]], PeakBytes]:
    """Return the states of each rank, and the memory of the rank with the most."""
    cfg = config_of(cell, folder)
    variant = cell.variant if cell.variant in OF_MODEL else ""
    alone = _described(cell.family, cell.mode, cell.precision, variant, folder)
    pipeline = pipeline_of(cfg, cell.num_ranks)
    run = replace(alone, sizes=axis_sizes(cfg, cell.num_ranks), pipeline=pipeline)
    boundaries = boundaries_of(cfg, run)
    states = []
    for place in product(*map(range, run.sizes.values())):
        coordinates = dict(zip(run.sizes, place, strict=True))
        share = share_of(cfg, run, coordinates, boundaries)
        of_rank = state_bytes(cfg, share, run.sizes, coordinates)
        if cfg.training.accumulation == "float32":  # a step frees gradients of another dtype
            of_rank["gradients"] = 0
        states.append(of_rank)
    return states, memory_of_run(cfg, run)


@cache
def _described(family: str, mode: str, precision: str, variant: str, folder: Path) -> Description:
    """Return the description of a model, which is the same in all layouts except for its mesh."""
    cell = Cell(family, "single", mode, 1, 128, 1, 1, "none", precision, variant=variant)
    return describe(config_of(cell, folder), 1)
