"""Each rank holds the bytes that the library's formulas say: 0 bytes off, LoRA and full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.assembly.describe import Description, describe
from shardwise.config import RunConfig
from shardwise.lab.planner import memory
from shardwise.lab.planner.share import share_of
from shardwise.metrics.memory import PeakMemory, state_bytes
from shardwise.parallel import zero
from shardwise.parallel.clip import clip_by_global_norm
from shardwise.parallel.mesh import build_mesh
from shardwise.training.measure import measure_memory
from shardwise.training.step import training_step
from tests.communication import coordinates
from tests.distributed import run_ranks
from tests.parity.harness import EIGHT_BIT, Cell, microbatches, numerics_of, run_config


@dataclass(frozen=True)
class Measured:
    """One rank after a step, with its gradients from before, beside what the formulas say of it."""

    state: dict[str, int]
    predicted: dict[str, int]
    after_backward: int  # bytes of gradients before `reduce_grads`
    reduce_scattered: int  # elements given to reduce-scatter in the backward
    names: frozenset[str]  # of its parameters
    trained_bytes: int  # of the trained ones, whole, whatever part of each it holds


def measure(
    cell: Cell,
    dtype: Literal["float32", "bfloat16"] = "float32",
    accumulation: Literal["model", "float32"] = "model",
) -> Measured:
    with numerics_of(cell):
        return _measure(cell, dtype, accumulation)


def config(cell: Cell, dtype: Any, accumulation: Any) -> RunConfig:
    cfg = run_config(cell, optimizer="adamw")
    training = replace(cfg.training, accumulation=accumulation)
    return replace(cfg, model=replace(cfg.model, dtype=dtype), training=training)


@cache
def described(cell: Cell, dtype: Any, accumulation: Any) -> Description:
    """Return the whole run; ranks that are forked after the first call need not build it again."""
    with numerics_of(cell):
        return describe(config(cell, dtype, accumulation), cell.nproc)


def _measure(cell: Cell, dtype: Any, accumulation: Any) -> Measured:
    cfg = config(cell, dtype, accumulation)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    named = list(job.pm.named_parameters())
    trained = [job.pm.to_portable(name, p) for name, p in named if p.requires_grad]
    elements = []
    # torch 2.13 renamed it.
    is_renamed = hasattr(dist, "reduce_scatter_single")
    name = "reduce_scatter_single" if is_renamed else "reduce_scatter_tensor"
    reduce_scatter = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        elements.append((kwargs["input"] if "input" in kwargs else args[1]).numel())
        return reduce_scatter(*args, **kwargs)

    setattr(dist, name, counting)  # this process ends with the measurement
    zero.reduce_scatter = counting
    # A pipeline runs as many micro-batches as its schedule needs.
    job.pm.run(job.pm, microbatches(cfg, mesh, 1)[: 1 if cell.pp == 1 else None], 1.0, True)
    after_backward = state_bytes(job.pm.stored(), job.optimizer)["gradients"]
    for reduce in job.pm.reduce_grads:
        reduce()
    clip_by_global_norm(job.trainable(), mesh, job.pm.parameter_facts, 1.0)
    gradients = state_bytes(job.pm.stored(), job.optimizer)["gradients"]
    job.optimizer.step()
    run, place = described(cell, dtype, accumulation), coordinates(mesh)
    share = share_of(cfg, run, place, None if job.cut is None else job.cut.split.boundaries)
    return Measured(
        state=state_bytes(job.pm.stored(), job.optimizer) | {"gradients": gradients},
        predicted=memory.state_bytes(cfg, share, run.sizes, place),
        after_backward=after_backward,
        reduce_scattered=sum(elements),
        names=frozenset(name for name, _ in named),
        trained_bytes=sum(prod(weight.shape) * weight.itemsize for weight in trained),
    )


WITH_EXPERTS = (
    # Every rank has other experts, which no data rank shares.
    *(Cell("qwen3_moe", layout, "full", 2) for layout in ("ddp-ep", "zero2-ep", "fsdp2-ep")),
    Cell("qwen3_moe", "cp-ep", "lora", 2, "experts"),
    *(Cell("qwen3_moe", layout, "full", 4, spread=4) for layout in ("zero1-ep", "fsdp2-ep")),
    Cell("qwen3_moe", "ddp-ep", "lora", 4, "experts", spread=4),
    # Two ranks have the same ones.
    Cell("qwen3_moe", "zero1-ep", "full", 4),
    Cell("qwen3_moe", "zero2-ep", "lora", 4, "experts"),
    *(Cell("jamba", "fsdp2-ep", "lora", 4, variant) for variant in ("", "experts")),
    Cell("deepseek_v3", "fsdp2-ep", "full", 4),
    *(Cell("qwen3_moe", "hsdp-ep", "lora", nproc, "experts") for nproc in (4, 8)),
    Cell("qwen3_moe", "fsdp2-cp-ep", "full", 4),
    Cell("granitemoe", "zero1-cp-ep", "lora", 4, "experts"),
    # Beside other axes.
    Cell("nemotron_h", "ddp-ep-tp", "full", 4),
    Cell("qwen3_moe", "fsdp2-ep-tp", "lora", 4, "experts"),
    Cell("qwen3_moe", "pp-fsdp2-ep", "full", 4, schedule="1f1b"),
)
WITH_BASES = (
    Cell("qwen3_5_text", "single", "lora", 1, "nf4"),
    Cell("qwen3_5_text", "zero1", "lora", 2, "int8"),
    Cell("qwen3_5_text", "fsdp2-tp", "lora", 4, "nf4"),
    Cell("lfm2_moe", "fsdp2", "lora", 2, "fp8"),
    Cell("granitemoehybrid", "ddp-ep", "lora", 2, "nf4"),
    Cell("jamba", "tp", "lora", 2, "nf4"),
    Cell("kimi_linear", "hsdp", "lora", 4, "int8"),
)
WITH_MAGNITUDES = (
    *(Cell("qwen3_5_text", layout, "lora", 2, dora=True) for layout in ("zero1", "fsdp2", "tp")),
    *(Cell("llama", layout, "lora", 2, dora=True) for layout in ("fsdp1", "tp-sp", "zero2")),
    Cell("jamba", "fsdp2-tp", "lora", 4, dora=True),
    Cell("qwen3_5_text", "tp", "lora", 2, "nf4", dora=True),
)
WITH_8_BITS = (
    *(Cell("llama", "fsdp2", "full", nproc, EIGHT_BIT) for nproc in (2, 4)),
    *(Cell("qwen3_5_text", layout, "full", 2, EIGHT_BIT) for layout in ("ddp", "zero1", "zero2")),
    Cell("qwen3_5_text", "zero1", "lora", 2, EIGHT_BIT),
    Cell("granitemoehybrid", "tp", "full", 4, EIGHT_BIT),
    Cell("qwen3_5_text", "fsdp2-tp", "full", 4, EIGHT_BIT),
    Cell("qwen3_moe", "fsdp2-ep", "full", 4, EIGHT_BIT),
    Cell("llama", "hsdp", "lora", 4, EIGHT_BIT),
    Cell("llama", "fsdp2-cp", "full", 4, EIGHT_BIT),
    Cell("llama", "pp-tp", "full", 4, EIGHT_BIT, "1f1b"),
)
CELLS = [
    *WITH_MAGNITUDES,
    *(Cell("llama", layout, "lora", 4) for layout in ("fsdp2-cp", "zero1-cp", "cp")),
    *(
        Cell("qwen3_5_text", layout, mode, nproc)
        for layout, nproc in (
            ("single", 1),
            ("ddp", 2),
            ("zero1", 2),
            ("zero2", 4),
            ("fsdp2", 2),
            ("fsdp2", 4),
            ("hsdp", 4),
        )
        for mode in ("lora", "full")
    ),
    *(
        Cell("qwen3_5_text", "fsdp1", mode, nproc)
        for mode, nproc in (("lora", 2), ("lora", 4), ("full", 4))
    ),
    *(Cell("qwen3_5_text", "fsdp1", "lora", nproc, "naive") for nproc in (2, 4)),
    # The root then has two flat parameters, a trained and a frozen one.
    Cell("qwen3_5_text", "fsdp1", "lora", 2, "head"),
    *(Cell("qwen3_5_text", "fsdp2", mode, 2, "offload-optimizer") for mode in ("lora", "full")),
    Cell("qwen3_5_text", "fsdp2", "full", 2, "offload-all"),
    *(
        Cell("qwen3_5_text", layout, "full", 2, "offload-optimizer")
        for layout in ("ddp", "tp", "cp")
    ),
    Cell("granitemoehybrid", "tp", "full", 4, "offload-optimizer"),
    Cell("llama", "fsdp2-tp", "full", 4, "offload-all"),
    Cell("llama", "pp-fsdp2", "full", 4, "offload-optimizer", "1f1b"),
    # Along tp too; some weights then have no dim left to shard over data ranks.
    *(Cell("qwen3_5_text", layout, "full", 4) for layout in ("zero1-tp", "fsdp2-tp")),
    Cell("qwen3_5_text", "fsdp2-tp", "lora", 4),
    Cell("qwen3_5_text", "tp", "full", 2),
    Cell("qwen3_5_text", "tp-sp", "lora", 2),
    Cell("qwen3_5_text", "pp-tp", "full", 4, schedule="1f1b"),
    Cell("jamba", "tp", "lora", 4),
    *(Cell("qwen3_moe", "fsdp2", "full", nproc, "muon") for nproc in (2, 4)),
    Cell("qwen3_5_text", "ddp", "full", 2, "muon"),
    Cell("llama", "hsdp", "full", 4, "muon"),
    *WITH_EXPERTS,
    *WITH_BASES,
    *WITH_8_BITS,
]
PIPELINES = [
    Cell("qwen3_5_text", "pp", "lora", 2, schedule="1f1b"),
    *(Cell("qwen3_5_text", "pp", "full", 2, "tied", schedule) for schedule in ("gpipe", "zbv")),
    *(
        Cell("qwen3_5_text", "pp-ddp", mode, 4, schedule="interleaved-1f1b")
        for mode in ("lora", "full")
    ),
    Cell("qwen3_5_text", "pp-zero1", "full", 4, "tied", "1f1b"),
    Cell("qwen3_moe", "pp-zero1-ep", "lora", 4, "experts", "1f1b"),
    *(Cell("qwen3_5_text", "pp-fsdp2", mode, 4, schedule="1f1b") for mode in ("lora", "full")),
    Cell("qwen3_5_text", "pp-hsdp", "full", 4, schedule="1f1b"),
]


LATER = {
    *(Cell("qwen3_5_text", layout, "lora", 4) for layout in ("zero2", "fsdp2", "hsdp", "fsdp1")),
    *(Cell("qwen3_5_text", layout, "lora", 2) for layout in ("ddp", "zero1")),
    *(Cell("qwen3_5_text", layout, "full", 4) for layout in ("fsdp2", "fsdp1")),
    Cell("qwen3_5_text", "fsdp1", "lora", 4, "naive"),
    *(Cell("llama", layout, "lora", 4) for layout in ("fsdp2-cp", "zero1-cp", "cp")),
    Cell("qwen3_5_text", "ddp", "full", 2, "muon"),
    Cell("llama", "hsdp", "full", 4, "muon"),
    Cell("qwen3_moe", "fsdp2", "full", 4, "muon"),
    *(Cell("qwen3_5_text", "fsdp2", mode, 2, "offload-optimizer") for mode in ("lora", "full")),
    *(Cell("qwen3_5_text", layout, "full", 2, "offload-optimizer") for layout in ("ddp", "tp")),
    Cell("granitemoehybrid", "tp", "full", 4, "offload-optimizer"),
    Cell("llama", "fsdp2-tp", "full", 4, "offload-all"),
    Cell("llama", "pp-fsdp2", "full", 4, "offload-optimizer", "1f1b"),
    # Several ranks hold the same rows with 8 bits, too.
    Cell("jamba", "tp", "lora", 4),
    Cell("qwen3_5_text", "fsdp2-tp", "lora", 4),
    Cell("qwen3_5_text", "zero1-tp", "full", 4),
    Cell("qwen3_5_text", "pp-tp", "full", 4, schedule="1f1b"),
    Cell("qwen3_moe", "zero2-ep", "full", 2),
    *(Cell("qwen3_moe", "zero1-ep", "full", 4, spread=spread) for spread in (0, 4)),
    Cell("qwen3_moe", "fsdp2-ep", "full", 4, spread=4),
    Cell("nemotron_h", "ddp-ep-tp", "full", 4),
    Cell("qwen3_moe", "ddp-ep", "lora", 4, "experts", spread=4),
    Cell("qwen3_moe", "zero2-ep", "lora", 4, "experts"),
    Cell("jamba", "fsdp2-ep", "lora", 4),
    Cell("deepseek_v3", "fsdp2-ep", "full", 4),
    *(Cell("qwen3_moe", "hsdp-ep", "lora", nproc, "experts") for nproc in (4, 8)),
    Cell("qwen3_moe", "fsdp2-cp-ep", "full", 4),
    Cell("granitemoe", "zero1-cp-ep", "lora", 4, "experts"),
    Cell("qwen3_moe", "fsdp2-ep-tp", "lora", 4, "experts"),
    Cell("qwen3_moe", "pp-fsdp2-ep", "full", 4, schedule="1f1b"),
    Cell("qwen3_5_text", "zero1", "lora", 2, "int8"),
    Cell("kimi_linear", "hsdp", "lora", 4, "int8"),
    Cell("jamba", "tp", "lora", 2, "nf4"),
    Cell("qwen3_5_text", "fsdp2-tp", "lora", 4, "nf4"),
    Cell("granitemoehybrid", "ddp-ep", "lora", 2, "nf4"),
    Cell("qwen3_5_text", "zero1", "lora", 2, dora=True),
    *(Cell("llama", layout, "lora", 2, dora=True) for layout in ("tp-sp", "zero2")),
    Cell("jamba", "fsdp2-tp", "lora", 4, dora=True),
    *(Cell("qwen3_5_text", layout, "full", 2, EIGHT_BIT) for layout in ("ddp", "zero2")),
    Cell("qwen3_5_text", "zero1", "lora", 2, EIGHT_BIT),
    Cell("qwen3_5_text", "fsdp2-tp", "full", 4, EIGHT_BIT),
    Cell("qwen3_moe", "fsdp2-ep", "full", 4, EIGHT_BIT),
    Cell("llama", "hsdp", "lora", 4, EIGHT_BIT),
    *(Cell("llama", layout, "full", 4, EIGHT_BIT) for layout in ("fsdp2", "fsdp2-cp")),
    Cell("llama", "pp-tp", "full", 4, EIGHT_BIT, "1f1b"),
    Cell("qwen3_5_text", "pp", "full", 2, "tied", "gpipe"),
    *(
        Cell("qwen3_5_text", "pp-ddp", mode, 4, schedule="interleaved-1f1b")
        for mode in ("lora", "full")
    ),
    Cell("qwen3_moe", "pp-zero1-ep", "lora", 4, "experts", "1f1b"),
    Cell("qwen3_5_text", "pp-fsdp2", "lora", 4, schedule="1f1b"),
    Cell("qwen3_5_text", "pp-hsdp", "full", 4, schedule="1f1b"),
}
"""Cells that only `make parity` measures: each is like one of the others in what the formula adds
up."""


@cache
def measured_together(nproc: int, is_later: bool) -> dict[Cell, tuple[Measured, ...]]:
    """Return what each rank measured, for each cell of so many processes, as start-up takes
    longest."""
    references = (cell.reference() for cell in PIPELINES)
    every = dict.fromkeys((*CELLS, *PIPELINES, *references))
    cells = [c for c in every if (c.nproc, c in LATER) == (nproc, is_later)]
    described.cache_clear()
    for cell in cells:
        described(cell, "float32", "model")
    return dict(zip(cells, zip(*run_ranks(nproc, measure_each, cells)), strict=True))


def measure_each(cells: list[Cell]) -> list[Measured]:
    return [measure(cell) for cell in cells]


def measured(cell: Cell) -> tuple[Measured, ...]:
    return measured_together(cell.nproc, cell in LATER)[cell]


def params(cells: list[Cell]) -> list[Any]:
    return [pytest.param(c, id=c.id, marks=[pytest.mark.slow] * (c in LATER)) for c in cells]


@pytest.mark.parametrize("cell", params(CELLS))
def test_state_bytes_equal_the_formula(cell):
    for rank, one in enumerate(measured(cell)):
        assert one.state == one.predicted, f"rank {rank}"


@pytest.mark.parametrize(
    ("layout", "accumulation", "variant"),
    [
        ("ddp", "float32", ""),
        ("fsdp1", "model", ""),
        pytest.param("fsdp2", "float32", "", marks=pytest.mark.slow),
        pytest.param("ddp", "float32", EIGHT_BIT, marks=pytest.mark.slow),
        ("fsdp2", "model", EIGHT_BIT),
    ],
)
def test_state_bytes_of_bfloat16_weights_beside_float32_rates(layout, accumulation, variant):
    cell = Cell("qwen3_5_text", layout, "full", 2, variant)
    for rank, one in enumerate(run_ranks(2, measure, cell, "bfloat16", accumulation)):
        assert one.state == one.predicted, f"rank {rank}"


@pytest.mark.parametrize("cell", params(PIPELINES))
def test_a_rank_of_a_pipeline_holds_its_stages_and_all_together_one_model(cell):
    ranks = measured(cell)
    for rank, one in enumerate(ranks):
        assert one.state == one.predicted, f"rank {rank}"
    (model,) = measured(cell.reference())
    pipeline = ranks[:: cell.nproc // cell.pp]
    below, above = (one.names for one in pipeline)
    assert below | above == model.names
    # Under zbv the first rank holds both ends of the model.
    is_tied = cell.variant == "tied" and cell.schedule != "zbv"
    assert below & above == ({"model.embed_tokens.weight"} if is_tied else set())
    # Two data ranks of these share what a stage holds.
    if not {"fsdp2", "zero1"} & {*cell.layout.split("-")}:
        tied = 4 * 256 * 64 if is_tied else 0  # [V, D] in float32, which two ranks hold
        counter = 4 if is_tied else 0
        twice = {"weights": tied, "gradients": tied, "optimizer": 2 * tied + counter}
        for key, size in model.state.items():
            assert sum(one.state[key] for one in pipeline) == size + twice[key], key


def predict_and_measure(cell: Cell) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Return predicted and real states of a rank, and the predicted and the real peak of a step.

    The step has 4 micro-batches of 8 rows.
    """
    # What other tests' tensors take in a forked rank.
    with PeakMemory(torch.device("cpu")) as inherited:
        pass
    assert inherited.entry_bytes is not None
    cfg = run_config(cell, optimizer="adamw")
    rows = 32 * cell.nproc // cell.pp
    cfg = replace(cfg, training=replace(cfg.training, micro_batch_size=8, global_batch_size=rows))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    batches = microbatches(cfg, mesh, 1)
    training_step(job, batches, mesh, 1.0)
    rank = dist.get_rank()
    memory = measure_memory(job, batches, mesh, cfg)
    assert job.cut is not None
    stage = mesh.dense.get_local_rank("pp")
    chunks = [job.cut.split.chunks[chunk] for chunk in job.cut.pipeline.chunks_of(stage)]
    parts = ("weight", "gradient", "optimizer")
    states = {part: sum(getattr(chunk, f"{part}_bytes") for chunk in chunks) for part in parts}
    return (
        states,
        memory.state_bytes[rank],
        job.cut.split.memory_bytes[stage],
        memory.peak_bytes[rank] - inherited.entry_bytes,
    )


@pytest.mark.parametrize(
    "cell",
    [
        Cell("llama", "pp", "full", 2, schedule="1f1b"),
        *(
            pytest.param(cell, marks=pytest.mark.slow)
            for cell in (
                Cell("llama", "pp", "full", 2, schedule="interleaved-1f1b"),
                Cell("llama", "pp-fsdp2", "lora", 4, schedule="1f1b"),
            )
        ),
    ],
    ids=lambda cell: cell.id,
)
def test_memory_that_a_split_predicts(cell):
    for states, held, predicted, peak in run_ranks(cell.nproc, predict_and_measure, cell):
        assert states["optimizer"] == held["optimizer"]
        if cell.layout == "pp":
            assert list(states.values()) == list(held.values())
        else:
            # While a step runs, the stage's weights are gathered beside this rank's half, and
            # gradients are whole.
            assert states["weight"] == 3 * held["weights"]
            assert states["gradient"] == 2 * held["gradients"]
        # Formulas leave out norms' inputs, and what a layer's backward needs while it runs.
        assert 0.75 * peak < predicted < 1.25 * peak


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_frozen_weights_are_not_reduce_scattered(mode):
    for one in measured(Cell("qwen3_5_text", "fsdp2", mode, 2)):
        # The padded gradients of both ranks, which have trained weights alone.
        assert 4 * one.reduce_scattered == 2 * one.state["gradients"] >= one.trained_bytes > 0


def test_zero1_keeps_whole_gradients_until_the_last_backward_and_zero2_does_not():
    for one in measured(Cell("qwen3_5_text", "zero1", "full", 2)):
        assert one.after_backward == one.trained_bytes
        assert one.state["gradients"] == one.predicted["gradients"]
    for one in run_ranks(2, measure_small_buckets, Cell("qwen3_5_text", "zero2", "full", 2)):
        # What has been summed already, without the last bucket, whose sum is still on its way;
        # nothing whole.
        assert 0 < one.after_backward < one.predicted["gradients"]


def measure_small_buckets(cell: Cell) -> Measured:
    zero.BUCKET_BYTES = 4096
    return measure(cell)


def test_what_the_naive_wrap_of_fsdp1_wastes():
    """The naive wrap keeps and sends gradients of frozen weights, which no optimizer reads."""
    kept, sent, trained = {}, {}, 0
    for variant in ("", "naive"):
        ranks = measured(Cell("qwen3_5_text", "fsdp1", "lora", 2, variant))
        kept[variant] = sum(one.state["gradients"] for one in ranks)
        sent[variant] = 4 * ranks[0].reduce_scattered
        trained = ranks[0].trained_bytes
    assert trained == kept[""] == sent[""]  # the size of every factor here is even
    assert kept["naive"] == sent["naive"] > 4 * trained
