"""Bytes that each rank holds, against a closed formula: 0 bytes off, for each strategy, LoRA and full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.metrics.memory import PeakMemory, state_bytes
from shardwise.parallel import zero
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import shard_dim
from shardwise.training.gradients import clip_by_global_norm
from shardwise.training.measure import measure_memory
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config


@dataclass(frozen=True)
class Measured:
    """One rank after a step, its gradients still there, and the sizes that the formula needs."""

    state: dict[str, int]
    after_backward: (
        int  # bytes of gradients before they are reduced, where a strategy waits with that
    )
    shapes: dict[
        str, tuple[tuple[int, ...], int, bool]
    ]  # by name: global shape, bytes per element, trainable
    reduce_scattered: int  # elements given to reduce-scatter in the backward


def measure(cell: Cell) -> Measured:
    cfg = run_config(cell, optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    named = list(job.pm.named_parameters())
    shapes = {
        n: (tuple(job.pm.to_portable(n, p).shape), p.element_size(), p.requires_grad)
        for n, p in named
    }
    elements = []
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )  # torch 2.13
    reduce_scatter = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        elements.append((kwargs["input"] if "input" in kwargs else args[1]).numel())
        return reduce_scatter(*args, **kwargs)

    setattr(dist, name, counting)  # this process ends with the measurement
    zero.reduce_scatter = counting
    # A pipeline runs as many as its schedule needs.
    job.pm.run(job.pm, microbatches(cfg, mesh, 1)[: 1 if cell.pp == 1 else None], 1.0, True)
    after_backward = state_bytes(job.pm.stored(), job.optimizer)["gradients"]
    for reduce in job.pm.reduce_grads:
        reduce()
    clip_by_global_norm(job.trainable(), mesh, job.pm.parameter_facts, 1.0)
    job.optimizer.step()
    return Measured(
        state_bytes(job.pm.stored(), job.optimizer), after_backward, shapes, sum(elements)
    )


def share(shape: tuple[int, ...], num_shards: int, rank: int) -> tuple[int, int]:
    """Elements of a rank's share of a tensor, rounded up to whole rows, and those that it really holds."""
    dim = shard_dim(shape, num_shards)
    row = prod(shape) // shape[dim]
    rows = -(-shape[dim] // num_shards)
    return rows * row, max(0, min(rows, shape[dim] - rank * rows)) * row


def by_dim(measured: Measured, num_shards: int, rank: int) -> dict[str, int]:
    """Weights: every parameter's share, rounded up to whole rows; gradients: the same of what is trained; AdamW: two
    moments of what this rank really holds of that, and a 4-byte step counter per parameter."""
    result = {"weights": 0, "gradients": 0, "optimizer": 0}
    for shape, size, trainable in measured.shapes.values():
        padded, held = share(shape, num_shards, rank)
        result["weights"] += padded * size
        if trainable:
            result["gradients"] += padded * size
            result["optimizer"] += 2 * held * size + 4
    return result


def by_zero(measured: Measured, num_shards: int, rank: int) -> dict[str, int]:
    """All weights; of what is trained, gradients and two moments of this rank's share, and a counter per parameter."""
    result = {"weights": 0, "gradients": 0, "optimizer": 0}
    for shape, size, trainable in measured.shapes.values():
        result["weights"] += prod(shape) * size
        if trainable:
            _, held = share(shape, num_shards, rank)
            result["gradients"] += held * size
            result["optimizer"] += 2 * held * size + 4
    return result


def with_copies(measured: Measured, num_shards: int, rank: int) -> dict[str, int]:
    """fsdp2 with the optimizer offloaded: beside its states, a copy of each trained shard (see `Measured.state`)."""
    result = by_dim(measured, num_shards, rank)
    trained = [(shape, size) for shape, size, trainable in measured.shapes.values() if trainable]
    held = sum(share(shape, num_shards, rank)[1] * size for shape, size in trained)
    return {**result, "gradients": held, "optimizer": result["optimizer"] + held}


def flat_units(names: Iterable[str], wrap: str) -> dict[str, list[str]]:
    """Which parameters lie in one flat one, in their order: those of a layer, of the embedding, and the rest.

    `separate`: a layer's LoRA factors lie in another one than the rest of it."""
    units: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r"model\.layers\.\d+|model\.embed_tokens", name)
        unit = (layer.group() if layer else "rest") + " trained" * (
            wrap == "separate" and ".lora_" in name
        )
        units.setdefault(unit, []).append(name)
    return units


def by_flat(measured: Measured, num_shards: int, rank: int, wrap: str) -> dict[str, int]:
    """Each flat parameter: its parameters end to end, every one from a multiple of 16 bytes, rounded up to n equal
    pieces. Gradients: all of every flat parameter with something trained in it. AdamW: two moments of what lies in this
    rank's piece of what is trained, and a counter per parameter, also where that is nothing."""
    result = {"weights": 0, "gradients": 0, "optimizer": 0}
    for unit in flat_units(measured.shapes, wrap).values():
        end, spans = 0, []
        for shape, size, trainable in map(measured.shapes.get, unit):
            assert size == 4
            start = -(-end // 4) * 4
            end = start + prod(shape)
            spans.append((start, end, trainable))
        piece = -(-end // num_shards)
        result["weights"] += 4 * piece
        result["gradients"] += 4 * piece * any(trainable for *_, trainable in spans)
        for start, stop, trainable in spans:
            held = max(0, min(stop, (rank + 1) * piece) - max(start, rank * piece))
            result["optimizer"] += (2 * 4 * held + 4) * trainable
    return result


FORMULAS: dict[tuple[str, str], Callable[[Measured, int, int], dict[str, int]]] = {
    ("zero1", ""): by_zero,
    ("zero2", ""): by_zero,
    ("fsdp1", ""): partial(by_flat, wrap="separate"),
    ("fsdp1", "naive"): partial(by_flat, wrap="naive"),
    ("fsdp2", "offload-optimizer"): with_copies,
}

CELLS = [
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
    *(Cell("qwen3_5_text", "fsdp2", mode, 2, "offload-optimizer") for mode in ("lora", "full")),
    Cell("qwen3_5_text", "fsdp2", "full", 2, "offload-all"),
]
PIPELINES = [
    Cell("qwen3_5_text", "pp", "lora", 2, schedule="1f1b"),
    *(Cell("qwen3_5_text", "pp", "full", 2, "tied", schedule) for schedule in ("gpipe", "zbv")),
    *(
        Cell("qwen3_5_text", "pp-ddp", mode, 4, schedule="interleaved-1f1b")
        for mode in ("lora", "full")
    ),
    *(Cell("qwen3_5_text", "pp-fsdp2", mode, 4, schedule="1f1b") for mode in ("lora", "full")),
    Cell("qwen3_5_text", "pp-hsdp", "full", 4, schedule="1f1b"),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_state_bytes_equal_the_formula(cell, capsys):
    num_shards = {"single": 1, "ddp": 1, "hsdp": cell.nproc // 2}.get(cell.layout, cell.nproc)
    formula = FORMULAS.get((cell.layout, cell.variant), by_dim)
    measured = run_ranks(cell.nproc, measure, cell)
    for rank, one in enumerate(measured):
        assert one.state == formula(one, num_shards, rank % num_shards), f"rank {rank}"
    with capsys.disabled():
        tell(cell.id, measured[0].state)


def tell(name: str, state: dict[str, int]) -> None:
    print(
        f"\n{name:50} " + " ".join(f"{key} {value:>9,} B" for key, value in state.items()), end=""
    )


@pytest.fixture(scope="module")
def whole() -> dict[Cell, Measured]:
    """One process, by cell."""
    cells = list(dict.fromkeys(cell.reference() for cell in PIPELINES))
    return {cell: run_ranks(1, measure, cell)[0] for cell in cells}


@pytest.mark.parametrize("cell", PIPELINES, ids=lambda cell: cell.id)
def test_a_rank_of_a_pipeline_holds_its_stages_and_all_together_one_model(cell, whole, capsys):
    num_shards = 2 if cell.layout == "pp-fsdp2" else 1
    measured = run_ranks(cell.nproc, measure, cell)
    for rank, one in enumerate(measured):
        assert one.state == by_dim(one, num_shards, rank % num_shards), f"rank {rank}"
    one = whole[cell.reference()]
    replicas = cell.nproc // cell.pp
    below, above = (one_rank.shapes for one_rank in measured[::replicas])  # of one pipeline
    assert below | above == one.shapes
    # Under zbv the first rank holds both ends of the model.
    tied = (
        {"model.embed_tokens.weight"}
        if cell.variant == "tied" and cell.schedule != "zbv"
        else set()
    )
    assert below.keys() & above.keys() == tied
    if num_shards == 1:
        shapes = {name: one.shapes[name] for name in tied}
        copied = by_dim(replace(one, shapes=shapes), 1, 0)
        for key, size in one.state.items():
            assert sum(rank.state[key] for rank in measured[::replicas]) == size + copied[key], key
    with capsys.disabled():
        for rank, found in enumerate(measured[::replicas]):
            tell(f"{cell.id} stage {rank}", found.state)


def predict_and_measure(cell: Cell) -> tuple[dict[str, int], dict[str, int], int, int]:
    """One rank's states and peak in a step of 4 micro-batches of 8 rows: predicted states, found ones, peaks."""
    with PeakMemory(
        torch.device("cpu")
    ) as inherited:  # what other tests' tensors take in a forked rank
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
        Cell("llama", "pp", "full", 2, schedule="interleaved-1f1b"),
        Cell("llama", "pp-fsdp2", "lora", 4, schedule="1f1b"),
    ],
    ids=lambda cell: cell.id,
)
def test_memory_that_a_split_predicts(cell, capsys):
    for rank, (states, held, predicted, peak) in enumerate(
        run_ranks(cell.nproc, predict_and_measure, cell)
    ):
        with capsys.disabled():
            print(
                f"\n{cell.id:42} rank {rank}: predicted {predicted:>9,} B, peak {peak:>9,} B",
                end="",
            )
        assert states["optimizer"] == held["optimizer"]
        if cell.layout == "pp":
            assert list(states.values()) == list(held.values())
        else:  # while a step runs, the stage's weights are gathered beside this rank's half, and gradients are whole
            assert states["weight"] == 3 * held["weights"]
            assert states["gradient"] == 2 * held["gradients"]
        # Formulas leave out norms' inputs, and what a layer's backward needs while it runs.
        assert 0.75 * peak < predicted < 1.25 * peak


def trained_bytes(measured: Measured) -> int:
    return sum(
        prod(shape) * size for shape, size, trainable in measured.shapes.values() if trainable
    )


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_frozen_weights_are_not_reduce_scattered(mode):
    for one in run_ranks(2, measure, Cell("qwen3_5_text", "fsdp2", mode, 2)):
        trained = sum(
            2 * share(shape, 2, 0)[0] for shape, _, trainable in one.shapes.values() if trainable
        )
        assert one.reduce_scattered == trained > 0


def test_zero1_keeps_whole_gradients_until_the_last_backward_and_zero2_does_not():
    for rank, one in enumerate(run_ranks(2, measure, Cell("qwen3_5_text", "zero1", "full", 2))):
        assert one.after_backward == trained_bytes(one)
        assert one.state["gradients"] == by_zero(one, 2, rank)["gradients"]
    for rank, one in enumerate(
        run_ranks(2, measure_small_buckets, Cell("qwen3_5_text", "zero2", "full", 2))
    ):
        # What has been added up already, without the last bucket, whose sum is still on its way; nothing whole.
        assert 0 < one.after_backward < by_zero(one, 2, rank)["gradients"]


def measure_small_buckets(cell: Cell) -> Measured:
    zero.BUCKET_BYTES = 4096
    return measure(cell)


def test_what_the_naive_wrap_of_fsdp1_wastes(capsys):
    """Gradients that no optimizer reads: the naive wrap keeps and sends them for frozen weights."""
    wraps = {}
    for wrap, variant in (("separate", ""), ("naive", "naive")):
        ranks = run_ranks(4, measure, Cell("qwen3_5_text", "fsdp1", "lora", 4, variant))
        kept, sent = sum(one.state["gradients"] for one in ranks), 4 * ranks[0].reduce_scattered
        wraps[wrap] = kept, sent
        trained = trained_bytes(ranks[0])
    with capsys.disabled():
        print(f"\n  trained: {trained:,} B of parameters")
        for wrap, (kept, sent) in wraps.items():
            print(
                f"  {wrap:9} gradients {kept:>9,} B over 4 ranks, reduce-scattered {sent:>9,} B a micro-batch",
                end="\n",
            )
    (kept, sent), (naive_kept, naive_sent) = wraps["separate"], wraps["naive"]
    assert trained == kept == sent  # the size of every factor here is a multiple of 4
    assert naive_kept == naive_sent > 4 * trained
