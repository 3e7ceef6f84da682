"""Runs over `training.epochs`: the same steps under every layout, and after a resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.base.batches import IGNORED
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.folder import read_manifest
from shardwise.checkpoint.resume import Start, find_start
from shardwise.config import RunConfig, Training
from shardwise.data.packing import PADDING
from shardwise.data.state import Rest
from shardwise.lab.proof.harness import RandomRows
from shardwise.parallel.mesh import build_mesh
from shardwise.training.epochs import count_steps
from shardwise.training.step import training_step
from tests.command import run_command
from tests.distributed import run_ranks
from tests.integration.conftest import make_corpus
from tests.integration.test_train import config, run_on
from tests.left_out import some_now
from tests.parity import harness
from tests.parity.harness import Cell

NUM = 12
EPOCHS = 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("epochs")
    make_corpus(path)
    lines = (json.dumps({"text": "the state decays " * (1 + i % 4)}) for i in range(NUM))
    (path / "corpus.jsonl").write_text("\n".join(lines))
    return path


def over_epochs(folder: Path, name: str, layout: str = "single", **training: Any) -> RunConfig:
    cfg = config(
        folder,
        name,
        layout,
        **{"steps": None, "epochs": EPOCHS, "keep_last": 9, "eval_every": 0, **training},
    )
    data = replace(cfg.data, validation=0.0, sequence_length=24, packing="documents")
    return replace(cfg, data=data, training=replace(cfg.training, global_batch_size=4))


@pytest.fixture(scope="module")
def single(folder) -> RunRecord:
    return run_on(1, over_epochs(folder, "single", save_every=2))


def test_every_document_is_read_as_often_as_asked_for(folder, single, capfd):
    read = single.data["train"]
    assert (read["epochs"], read["documents_finished"]) == (EPOCHS, EPOCHS * NUM)
    assert read["rows"] == 4 * len(single.losses)
    assert single.config["training"]["epochs"] == EPOCHS
    assert single.config["training"]["steps"] is None
    rates = [
        json.loads(line)["lr"]
        for line in (folder / "single" / "metrics.jsonl").read_text().splitlines()
    ]
    # cosine: the last rate is that of the last of so many steps
    assert 0 < rates[-1] < rates[0] * 3 / len(rates)


def test_two_ranks_take_the_same_steps(folder, single, capfd):
    both = run_on(2, over_epochs(folder, "ddp", "ddp", micro_batch_size=1))
    assert both.losses == pytest.approx(single.losses, rel=1e-5)
    assert both.data == single.data
    assert f"epoch {EPOCHS:.2f}/{EPOCHS}" in capfd.readouterr().out


def test_a_resume_takes_the_steps_that_are_left(folder, single):
    cfg = over_epochs(folder, "single", save_every=2, resume=str(step_2(folder)))
    resumed = run_on(1, cfg)
    assert (resumed.losses, resumed.data) == (single.losses, single.data)


@pytest.mark.parametrize(
    ("num_steps", "epochs", "due"),
    [
        (9, 3.0, [3, 6, 9]),
        (10, 3.0, [3, 7, 10]),  # 3.33, 6.67
        (20, 2.5, [8, 16]),
        (2, 5.0, [1, 2]),  # 0.4, 0.8, 1.2, 1.6, 2
        (1, 2.7, [1]),  # 0.37, 0.74
        (7, 0.5, []),
    ],
)
def test_an_epoch_ends_after_the_step_nearest_to_its_share_of_all(num_steps, epochs, due):
    training = Training("out", epochs=epochs)
    steps = range(1, num_steps + 1)
    assert [step for step in steps if training.is_due("epoch", step, num_steps)] == due
    assert [step for step in steps if training.is_due(4, step, num_steps)] == [*steps[3::4]]
    assert not any(training.is_due(0, step, num_steps) for step in steps)


def test_a_run_evaluates_and_saves_by_epoch_under_every_layout_and_after_a_resume(folder):
    def by_epoch(name: str, layout: str = "single", **training: Any) -> RunConfig:
        words = {"epochs": 2.5, "eval_every": "epoch", "save_every": "epoch"}
        cfg = over_epochs(folder, name, layout, **words, micro_batch_size=1, **training)
        return replace(cfg, data=replace(cfg.data, validation=0.25))

    alone = run_on(1, by_epoch("alone"))
    num_steps = len(alone.losses)
    ends = [round(num_steps / 2.5), round(num_steps * 2 / 2.5), num_steps]
    assert ends == sorted({*ends})
    assert [e["step"] for e in alone.eval] == [0, *ends]
    saved = {path.name: path for path in (folder / "alone" / "checkpoints").iterdir()}
    assert saved.keys() == {f"step-{step}" for step in ends}
    both = run_on(2, by_epoch("both", "ddp"))
    assert [e["step"] for e in both.eval] == [0, *ends]
    resumed = run_on(1, by_epoch("alone", resume=str(saved[f"step-{ends[0]}"])))
    assert (resumed.eval, resumed.losses) == (alone.eval, alone.losses)


def step_2(folder: Path) -> Path:
    return folder / "single" / "checkpoints" / "step-2"


def _counted(cfg: RunConfig, num_rows: int, start: Start) -> int:
    class Counts:
        def num_steps(self, slots: range, gather: Callable[[int], list[int]]) -> int:
            return max(gather(num_rows if 1 in slots else 0))

    return count_steps(cfg, Counts(), start)


def test_a_run_without_a_step(folder):
    cfg = over_epochs(folder, "unused")
    assert run_ranks(2, _counted, cfg, 7, Start()) == [7, 7]
    with pytest.raises(RuntimeError, match=r"UserError: data\.train: no document of .*; give"):
        run_ranks(2, _counted, cfg, 0, Start())


def test_a_checkpoint_knows_its_end_and_is_not_past_it(folder, single):
    start = Start(step_2(folder), read_manifest(step_2(folder)))
    assert Rest.read(start.loader["rest"]).num_steps == len(single.losses)
    fewer = over_epochs(folder, "unused", epochs=0.1)
    with pytest.raises(RuntimeError, match=r"epochs is 0\.1, which .*step-2 has read already"):
        run_ranks(1, _counted, fewer, 2, start)
    assert run_ranks(1, _counted, fewer, 3, start) == [3]


def test_the_learning_rate_depends_on_the_epochs(folder, single):
    cfg = over_epochs(folder, "single", resume=str(step_2(folder)), epochs=3.0)
    with pytest.raises(RuntimeError, match=r"training\.epochs is 3\.0, .* depend on it"):
        run_ranks(1, find_start, cfg)
    constant = replace(cfg, optimizer=replace(cfg.optimizer, lr_schedule="constant"))
    with pytest.raises(RuntimeError, match=r"optimizer\.lr_schedule is constant"):
        run_ranks(1, find_start, constant)


def test_fewer_epochs_than_were_read_ahead_are_refused(folder):
    # The first row of each slot is chosen among documents of later epochs, since there are few.
    cfg = over_epochs(folder, "ahead", epochs=3.0, save_every=1, keep_last=99)
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, lr_schedule="constant"))
    run_on(1, cfg)
    first = Path(cfg.training.output_dir) / "checkpoints" / "step-1"
    fewer = replace(cfg.training, epochs=0.75, resume=str(first))
    content = json.dumps(replace(cfg, training=fewer).to_dict())  # JSON is YAML too
    (folder / "fewer.yaml").write_text(content)
    done = run_command(["train", str(folder / "fewer.yaml")])
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert re.search(
        r"training\.epochs: the checkpoint has read more documents .*; give more", line
    )
    assert first.is_dir()  # nothing is lost


def _row(slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, labels, documents = RandomRows()(slot, step)
    if slot < 4:
        return ids, labels, documents
    padding = torch.full_like(ids, IGNORED), torch.full_like(ids, PADDING)
    return torch.zeros_like(ids), *padding


def _step(cell: Cell, with_padding: bool) -> tuple[float, float]:
    cfg = harness.run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, harness.DrawnStart())
    batches = harness.microbatches(cfg, mesh, 1, _row)
    if not with_padding:
        batches = batches[:2]
    result = training_step(job, batches, mesh, cfg.optimizer.max_grad_norm)
    return result.loss, result.grad_norm


@pytest.mark.parametrize(
    ("layout", "nproc", "schedule"),
    some_now([("single", 1, ""), ("ddp", 2, ""), ("pp", 2, "1f1b")], [("ddp", 2, "")]),
)
def test_rows_of_padding_change_no_gradient(layout, nproc, schedule):
    """Slots 4 to 7 have ended: two micro-batches of four, under ddp all of a rank."""
    plain = Cell("qwen3_next", "single", "full", variant="isolated")  # with a router loss
    (expected,) = run_ranks(1, _step, plain, False)
    cell = replace(plain, layout=layout, nproc=nproc, schedule=schedule)
    for result in run_ranks(nproc, _step, cell, True):
        assert result == pytest.approx(expected, rel=1e-5)
