"""Offload to disk: the bytes that are read and written, the window of memory, what is refused."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.assembly.build import Job, build
from shardwise.base.process.ending import RunError
from shardwise.checkpoint.output_dir import writing
from shardwise.config import RunConfig, UserError
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.search import search
from shardwise.models.part import ModelPart
from shardwise.parallel import copies, disk_window
from shardwise.parallel.disk_window import Window
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import NonFiniteLossError, training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import Cell, Outcome, microbatches, run, run_config

DISK = "offload-disk"


def config(cell: Cell, optimizer: Any = "adamw", **training: Any) -> RunConfig:
    cfg = run_config(cell, optimizer=optimizer)
    return replace(cfg, training=replace(cfg.training, **training))


def job_of(cfg: RunConfig) -> tuple[Job, Any]:
    mesh = build_mesh(cfg, torch.device("cpu"))
    return build(cfg, mesh), mesh


def aligned(num_bytes: int) -> int:
    return (num_bytes + 63) // 64 * 64


def unit_bytes(job: Job) -> list[tuple[int, int, int]]:
    """Return the bytes of all and of trained weights of the embedding, each layer, and the rest.

    Last come those of trained weights without what aligns the next ones.
    """
    (part,) = job.pm.parts
    assert isinstance(part, ModelPart)
    layers = [f"{layer.name}." for layer in part.spec.layers]
    sizes = [[0, 0, 0] for _ in range(len(layers) + 2)]
    for name, p in part.hf.named_parameters():
        of_layer = [i for i, layer in enumerate(layers, 1) if name.startswith(layer)]
        is_last = name.startswith((part.spec.norm, part.spec.head))
        unit = sizes[of_layer[0] if of_layer else -1 if is_last else 0]
        unit[0] += aligned(p.numel() * p.itemsize)
        if p.requires_grad:
            unit[1] += aligned(p.numel() * p.itemsize)
            unit[2] += p.numel() * p.itemsize
    return [(whole, trained, exact) for whole, trained, exact in sizes]


def read_and_written(
    units: list[tuple[int, int, int]], num_micro: int, num_states: int, waits: bool
) -> tuple[int, int]:
    """Return the bytes of a step, by the formula of docs/concepts/disk-offload.md."""
    whole, trained, exact = (sum(sizes) for sizes in zip(*units))
    first, second, *_, before, last = (size for size, *_ in units)
    read = 2 * num_micro * whole - num_micro * (before + last) - (num_micro - 1) * (first + second)
    read += (1 + num_states) * trained
    written = (1 + num_states) * trained
    if waits:
        # Added up, then for the norm and for clipping; the update reads what aligns them too.
        read += (num_micro - 1 + 2) * exact + trained
        written += (num_micro + 1) * exact
    return read, written


def moved(cfg: RunConfig) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    job, mesh = job_of(cfg)
    steps = []
    for step in range(1, 4):
        before = job.pm.storage.moved_bytes()
        training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
        after = job.pm.storage.moved_bytes()
        steps.append((after[0] - before[0], after[1] - before[1]))
    return unit_bytes(job), steps


MOVES = (("lora", 2, "adamw"), ("full", 1, "adamw"), ("full", 2, "adamw"), ("full", 8, "sgd"))
"""What `make test` counts: every size, optimizer and mode."""


@pytest.mark.parametrize(
    ("mode", "size", "optimizer"),
    some_now(product(("lora", "full"), (1, 2, 8), ("adamw", "sgd")), MOVES),
)
def test_a_step_reads_and_writes_what_the_formula_says(mode, size, optimizer):
    cell = Cell("qwen3_5_text", "single", mode, 1, DISK)
    cfg = config(cell, optimizer, micro_batch_size=size)
    units, steps = run_ranks(1, moved, cfg)[0]
    num_states = 2 if optimizer == "adamw" else 0
    expected = read_and_written(units, 8 // size, num_states, waits=mode == "full")
    assert steps == [expected] * 3


def test_checkpointing_reads_no_more():
    cell = Cell("qwen3_5_text", "single", "full", 1, DISK)
    plain, again = (
        run_ranks(1, moved, config(cell, checkpointing=what))[0] for what in ("none", "full")
    )
    assert plain == again


def _real_bytes(parts: tuple[nn.Module, ...]) -> Iterator[int]:
    """Yield the bytes of each weight that is in memory as more than a number."""
    for p in nn.ModuleList(parts).parameters():
        if p.untyped_storage().nbytes() > p.itemsize:
            yield p.numel() * p.itemsize


def window_of(cfg: RunConfig) -> tuple[int, int, int, int]:
    """The most bytes of weights in memory at a time, those of the buffers, of the largest two
    neighbours, and of all weights."""
    most = 0
    job, mesh = job_of(cfg)
    window: Any = job.pm.storage
    hold = Window.hold

    def watched(self: Any, *args: Any) -> Any:
        nonlocal most
        held = hold(self, *args)
        most = max(most, sum(_real_bytes(job.pm.parts)))
        assert len(window._held) <= 2
        return held

    Window.hold = watched  # type: ignore[method-assign]
    for step in (1, 2):
        training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
        assert all(p.grad is None for p in nn.ModuleList(job.pm.parts).parameters())
    states = [t for s in job.optimizer.state.values() for t in s.values() if t.dim()]
    window.clear()
    assert not list(_real_bytes(job.pm.parts))
    assert all(state.untyped_storage().nbytes() == state.itemsize for state in states)
    units = [whole for whole, *_ in unit_bytes(job)]
    neighbours = max(map(sum, pairwise(units)))
    return most, sum(len(b.memory) for b in window._free), neighbours, sum(units)


@pytest.mark.parametrize("mode", [pytest.param("lora", marks=pytest.mark.slow), "full"])
def test_the_window_has_two_units_of_weights_at_most(mode):
    cfg = config(Cell("qwen3_5_text", "single", mode, 1, DISK))
    most, buffers, neighbours, all_weights = run_ranks(1, window_of, cfg)[0]
    assert 0 < most <= neighbours < all_weights
    assert buffers % disk_window.NUM_BUFFERS == 0


def _kept(cfg: RunConfig) -> str:
    job, mesh = job_of(cfg)
    (part,) = job.pm.parts
    weights = []
    layer = part.hf.get_submodule(part.spec.layers[0].name)  # type: ignore[attr-defined]
    inner = layer.mlp.forward

    def forward(*args: Any) -> Any:
        weights.append(layer.mlp.down_proj.weight.detach())
        return inner(*args)

    layer.mlp.forward = forward
    try:
        training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    except AssertionError as error:
        return str(error)
    return ""


def test_whoever_keeps_a_weight_is_told():
    cfg = config(Cell("llama", "single", "lora", 1, DISK))
    assert "beyond its window" in run_ranks(1, _kept, cfg)[0]


def _outside(cfg: RunConfig) -> bool:
    job, _ = job_of(cfg)
    return all(p.isnan().all() for p in nn.ModuleList(job.pm.parts).parameters())


def test_a_weight_outside_of_its_forward_is_not_a_number():
    assert run_ranks(1, _outside, config(Cell("llama", "single", "full", 1, DISK)))[0]


def _not_finite(cfg: RunConfig) -> list[tuple[str, ...]]:
    job, mesh = job_of(cfg)
    name, weight = next(iter(job.pm.named_parameters()))
    job.pm.from_portable(name, weight, torch.full(weight.shape, torch.inf))
    try:
        training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    except NonFiniteLossError as error:
        return [error.found.weights, error.found.gradients[-1:]]
    return []


def test_weights_that_are_not_finite_are_named():
    found = run_ranks(1, _not_finite, config(Cell("llama", "single", "full", 1, DISK)))[0]
    assert found[0] == ("model.embed_tokens.weight",)
    assert found[1]


def _run(cell: Cell, changes: Any) -> Outcome:
    cfg = run_config(cell, optimizer="adamw")
    cfg = replace(cfg, **{name: replace(getattr(cfg, name), **c) for name, c in changes.items()})
    return run(cfg, lambda mesh, step: microbatches(cfg, mesh, step))


@pytest.mark.parametrize(
    ("cell", "changes"),
    [
        pytest.param(Cell("qwen3_5_text", "single", "lora", 1, "nf4"), {}, id="quantised"),
        pytest.param(
            Cell("qwen3_5_text", "single", "full", 1, "tied"), {}, marks=pytest.mark.slow, id="tied"
        ),
        pytest.param(
            Cell("qwen3_5_text", "pp", "full", 2, "tied", "zbv"), {}, id="both ends on a rank"
        ),
        pytest.param(
            Cell("qwen3_5_text", "single", "full", 1),
            {"model": {"dtype": "bfloat16"}, "training": {"accumulation": "float32"}},
            id="16 bits, added up in 32",
        ),
        pytest.param(Cell("gpt2", "single", "full", 1), {}, id="learned positions"),
        pytest.param(
            Cell("llama", "pp", "lora", 2, "upper", "1f1b"), {}, id="a stage trains nothing"
        ),
    ],
)
def test_every_number_is_that_of_a_run_in_memory(cell, changes):
    disk = {"offload": "disk", "offload_folder": tempfile.gettempdir()}
    on_disk = changes | {"parallel": disk}
    expected = run_ranks(cell.nproc, _run, cell, changes)
    outcomes = run_ranks(cell.nproc, _run, cell, on_disk)
    for outcome, plain in zip(outcomes, expected):
        assert outcome.losses == plain.losses
        assert outcome.norms == plain.norms
        assert outcome.eval_loss == plain.eval_loss
        for kind in ("grads", "params", "saved"):
            tensors, others = getattr(outcome, kind), getattr(plain, kind)
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def _full(cfg: RunConfig) -> str:
    def no_room(*_: Any) -> None:
        if torch.distributed.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = no_room
    try:
        job_of(cfg)
    except UserError as error:
        return str(error)
    return ""


def test_a_disk_without_room_is_told_on_every_rank_before_the_first_step():
    messages = run_ranks(2, _full, config(Cell("llama", "ddp", "full", 2, DISK)))
    assert len(set(messages)) == 1
    assert "No space left" in messages[0]
    assert "offload_folder" in messages[0]


def _compared(cfg: RunConfig) -> tuple[int, list[str]]:
    job, mesh = job_of(cfg)
    equal = copies.differences(job.pm, mesh, job.optimizer)
    name, weight = next(iter(job.pm.named_parameters()))
    if torch.distributed.get_rank() == 1:
        job.pm.from_portable(name, weight, torch.zeros(weight.shape))
    return len(equal), [found.name for found in copies.differences(job.pm, mesh, job.optimizer)]


def test_copies_on_disk_are_compared():
    compared = run_ranks(2, _compared, config(Cell("llama", "ddp", "full", 2, DISK)))
    assert compared == [(0, ["model.embed_tokens.weight"])] * 2


def test_a_plan_says_where_the_formulas_are():
    cfg = config(Cell("llama", "single", "full", 1, DISK))
    with pytest.raises(UserError, match=r"disk-offload\.md"):
        search(Question(cfg, cluster_of("H100-80GB")))


def _leftovers(cfg: RunConfig) -> list[str]:
    job, mesh = job_of(cfg)
    training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    return os.listdir(str(cfg.parallel.offload_folder))


def test_the_file_has_no_name(tmp_path):
    cfg = config(Cell("llama", "single", "full", 1, DISK))
    folder = tmp_path / "new"
    cfg = replace(cfg, parallel=replace(cfg.parallel, offload_folder=str(folder)))
    assert run_ranks(1, _leftovers, cfg)[0] == []
    assert folder.is_dir()


def _reserved_in(cfg: RunConfig, folder: str, made: str) -> tuple[str, list[str]]:
    cfg = replace(cfg, parallel=replace(cfg.parallel, offload_folder=folder))
    try:
        job, _ = job_of(cfg)
    except UserError as error:
        return str(error), os.listdir(made)
    names = os.listdir(made)
    torch.distributed.barrier()
    job.pm.storage.close()
    return "", names


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_folder_is_made_for_the_run_alone(num_ranks, tmp_path):
    cfg = config(Cell("llama", "ddp", "full", num_ranks, DISK))
    ranks = run_ranks(num_ranks, _reserved_in, cfg, str(tmp_path / "new"), str(tmp_path))
    assert ranks == [("", ["new"])] * num_ranks
    assert os.listdir(tmp_path) == []
    (tmp_path / "mine").mkdir()
    run_ranks(num_ranks, _reserved_in, cfg, str(tmp_path / "mine"), str(tmp_path))
    assert os.listdir(tmp_path) == ["mine"]
    typo = str(tmp_path / "no" / "such" / "folder")
    for message, names in run_ranks(num_ranks, _reserved_in, cfg, typo, str(tmp_path)):
        assert "No such file or directory" in message
        assert names == ["mine"]


def _truncated(cfg: RunConfig, folder: str) -> str:
    Path(folder).mkdir()
    job, mesh = job_of(cfg)
    window = job.pm.storage
    assert isinstance(window, Window)
    os.ftruncate(window._file.fileno(), 4096)
    try:
        with writing(cfg):
            training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    except RunError as error:
        return str(error)
    return ""


def test_a_file_that_somebody_makes_shorter_ends_the_run_in_a_line(tmp_path):
    cfg = config(Cell("llama", "single", "full", 1, DISK))
    (message,) = run_ranks(1, _truncated, cfg, str(tmp_path / "run"))
    assert "the file of parallel.offload disk has been made shorter" in message
    assert "\n" not in message
