"""A run that ended and goes on is the run that never ended: bit for bit, or up to rounding under another layout."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Data, Lora, Measure, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.metrics.record import RunRecord
from shardwise.parallel.mesh import build_mesh
from shardwise.training import build, checkpoint, loop
from shardwise.training.checkpoint import Checkpointer
from shardwise.training.resume import Start, find_start
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import CONFIGS, Cell, microbatches, run_config
from tests.training.test_checkpoint import NoLoader, equal, values

STEPS, HALF = 5, 3
Values = dict[str, torch.Tensor]


def config(folder: Path, name: str, layout: str = "single", *, lora: bool = True, **training: Any) -> RunConfig:
    """All that a resume could forget: Adam's moments, a falling learning rate, dropout, a shuffled corpus."""
    return RunConfig(
        model=Model(str(CONFIGS / "tiny-llama"), init="random", tokenizer=str(folder / "tokenizer")),
        lora=Lora(r=4, dropout=0.1) if lora else None,
        data=Data(str(folder / "corpus.jsonl"), validation=0.2, sequence_length=32),
        parallel=Parallel("fsdp2", offload="optimizer") if layout == "offload" else Parallel(layout),
        optimizer=Optimizer(lr=1e-2, warmup_steps=1, weight_decay=0.1),
        training=Training(
            **{
                "output_dir": str(folder / name),
                "steps": STEPS,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "device": "cpu",
                "eval_batches": 1,
                "save_every": HALF,
                **training,
            }
        ),
        measure=Measure(warmup_steps=0, memory=False),
    )


def run(cfg: RunConfig) -> None:
    Path(cfg.training.output_dir).mkdir(parents=True, exist_ok=True)
    loop.train(cfg, build_mesh(cfg, torch.device("cpu")))


def run_until(step: int, cfg: RunConfig) -> None:
    """As `run`, but the run is ended after `step`."""
    after_step = Checkpointer.after_step

    def then_end(self, done, evaluation):
        after_step(self, done, evaluation)
        if done == step:
            raise EndedError

    Checkpointer.after_step = then_end
    with pytest.raises(EndedError):
        run(cfg)


class EndedError(Exception):
    """A run was ended from outside."""


def run_with(bug: Callable[[], None], cfg: RunConfig) -> None:
    """As `run`, with a bug in the project's own code."""
    bug()
    run(cfg)


def record(cfg: RunConfig) -> RunRecord:
    return RunRecord.read(Path(cfg.training.output_dir) / "record.json")


def curves(cfg: RunConfig) -> tuple[Any, ...]:
    return record(cfg).losses, record(cfg).grad_norms, record(cfg).eval


def result(cfg: RunConfig) -> bytes:
    """The weights that a run leaves."""
    (file,) = Path(cfg.training.output_dir).glob("*/*.safetensors")
    return file.read_bytes()


def metrics(cfg: RunConfig) -> list[dict[str, Any]]:
    """What is in metrics.jsonl but times."""
    lines = (Path(cfg.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if "second" not in key} for line in lines]


def checkpoint_of(cfg: RunConfig, step: int) -> str:
    return str(Path(cfg.training.output_dir) / "checkpoints" / f"step-{step}")


@pytest.fixture(scope="module")
def whole(folder) -> Callable[[str, int, bool], RunConfig]:
    """What has run under a layout without an end between; each once."""

    @functools.cache
    def get(layout: str, nproc: int, lora: bool) -> RunConfig:
        name = f"whole-{layout}-{'lora' if lora else 'full'}"
        cfg = config(folder, name, layout, lora=lora, async_save=lora)
        run_ranks(nproc, run, cfg)
        return cfg

    return get


@pytest.mark.parametrize(
    ("layout", "nproc", "lora"),
    [
        ("single", 1, True),
        ("ddp", 2, True),
        ("ddp", 2, False),
        ("fsdp2", 2, True),
        ("fsdp2", 2, False),
        ("offload", 2, True),  # the optimizer has copies of the weights
        ("fsdp1", 2, True),
        ("zero1", 2, False),
        ("zero2", 2, True),
    ],
)
def test_to_go_on_is_never_to_have_ended(folder, whole, layout, nproc, lora):
    one = whole(layout, nproc, lora)
    start = checkpoint_of(one, HALF)
    parts = config(folder, f"parts-{layout}-{lora}", layout, lora=lora, resume=start)
    run_ranks(nproc, run, parts)
    assert len(record(parts).losses) == STEPS
    assert [e["step"] for e in record(parts).eval] == [0, STEPS]
    assert curves(parts) == curves(one)
    assert result(parts) == result(one)
    assert metrics(parts) == metrics(one)
    assert record(parts).resumed_from == {"folder": start, "step": HALF}
    assert record(one).resumed_from is None


def test_each_part_under_another_layout_and_number_of_processes(folder, whole):
    one, noise = whole("single", 1, True), config(folder, "noise")
    noise = replace(noise, measure=replace(noise.measure, reverse_microbatches=True))
    run_ranks(1, run, noise)
    parts = [("fsdp2", 2), ("ddp", 4), ("zero1", 2), ("fsdp1", 2), ("single", 1)]
    for step, (layout, nproc) in enumerate(parts, 1):
        cfg = config(folder, "chain", layout, save_every=1, resume=None if step == 1 else "latest")
        if step < len(parts):
            run_ranks(nproc, run_until, step, cfg)
        else:
            run_ranks(nproc, run, cfg)
    assert [line["step"] for line in metrics(cfg)] == [line["step"] for line in metrics(one)]
    assert record(cfg).mesh["dp_replicate"] == 1
    # As in test_train: ten times what another order of micro-batches does to one process.
    losses = record(one).losses
    bound = max(1e-6, *(10 * abs(a - b) for a, b in zip(record(noise).losses, losses)))
    assert max(abs(a - b) for a, b in zip(record(cfg).losses, losses, strict=True)) <= bound


def cross(folder: Path, read: Path | None, cell: Cell) -> Values:
    """Read a checkpoint, or make a step, and write one: the whole tensors that this rank then has, by key."""
    cfg = run_config(cell, "adamw")
    resume = None if read is None else str(read)
    training = replace(cfg.training, output_dir=str(folder), resume=resume, global_batch_size=12, micro_batch_size=1)
    cfg = replace(cfg, training=training)
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    mesh = build_mesh(cfg, torch.device("cpu"))
    start = find_start(cfg)
    job = build.build(cfg, mesh, build.State(step=start.step))
    if start.folder is None:
        training_step(job, microbatches(cfg, mesh, 1), mesh, None)
    checkpoint.restore(start, job, cfg)
    with Checkpointer(cfg, job, NoLoader(), start) as checkpointer:
        checkpointer.save(1)
    return values(job, cfg)


def test_every_tensor_crosses_every_layout_unchanged(tmp_path):
    # Each layout reads what the one before it wrote. Three ranks cut unevenly.
    written, read = None, None
    layouts = {"single": 1, "zero1": 3, "fsdp2": 3, "ddp": 2, "fsdp1": 3, "hsdp": 4, "zero2": 2}
    for layout, nproc in layouts.items():
        folder = tmp_path / layout
        for found in run_ranks(nproc, cross, folder, read, Cell("nemotron_h", layout, "full", nproc)):
            assert written is None or equal(found, written), layout
            written = found
        read = folder / "checkpoints" / "step-1"
    assert {key.rpartition("/")[2] for key in written} >= {"exp_avg", "exp_avg_sq", "step"}
    assert any(key.startswith("buffers/") for key in written)
    assert all(value.any() for key, value in written.items() if key.startswith("optimizer/"))


def schedule_that_restarts():
    loop.State = lambda step: build.State()


def loader_that_restarts():
    Start.loader = property(lambda self: None)


def moments_forgotten():
    restore = loop.restore

    def forgetful(start, job, cfg):
        restore(start, job, cfg)
        job.optimizer.state.clear()

    loop.restore = forgetful


def moments_of_another_parameter():
    optimized = checkpoint._optimized

    def swapped(optimizer):
        named = list(optimized(optimizer))
        places = [i for i, (_, p) in enumerate(named) if p.shape == named[0][1].shape][:2]
        names = {named[places[0]][0]: named[places[1]][0], named[places[1]][0]: named[places[0]][0]}
        return iter([(names.get(name, name), p) for name, p in named])

    checkpoint._optimized = swapped


def weights_not_restored():
    held = checkpoint._held
    checkpoint._held = lambda job, cfg: (item for item in held(job, cfg) if item[0].startswith("optimizer/"))


@pytest.mark.parametrize(
    ("bug", "layout", "nproc"),
    [
        (schedule_that_restarts, "single", 1),
        (loader_that_restarts, "single", 1),
        (moments_forgotten, "single", 1),
        (weights_not_restored, "single", 1),
        (moments_of_another_parameter, "fsdp2", 2),
    ],
)
def test_planted_bug_is_caught(folder, whole, bug, layout, nproc):
    one = whole(layout, nproc, True)
    parts = config(folder, bug.__name__, layout, resume=checkpoint_of(one, HALF))
    run_ranks(nproc, run_with, bug, parts)
    assert len(record(parts).losses) == STEPS
    assert curves(parts) != curves(one)
