"""A checkpoint is complete or absent, and damage is detected; which ones are kept; disk errors."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly.build import Job, build
from shardwise.assembly.state import portable_tensors
from shardwise.base.interfaces import Evaluation
from shardwise.base.process.ending import RunError, explain
from shardwise.checkpoint import folder as checkpoint_folder
from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.folder import (
    MANIFEST,
    Best,
    complete,
    damage,
    folder_of,
    mark_best,
    prune,
    read_manifest,
    take_over,
)
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.resume import Start, find_start
from shardwise.config import RunConfig, UserError
from shardwise.data.state import SlotState
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.parity.harness import GLOBAL_BATCH, Cell, microbatches, run_config


class NoLoader:
    """In the place of a run's loaders: these tests make their batches themselves."""

    def __init__(self, validation_text: str = "", rows: int = GLOBAL_BATCH) -> None:
        self.rows = rows
        self.validation = SimpleNamespace(
            corpus=SimpleNamespace(fingerprint=lambda: validation_text)
        )

    def state(self) -> dict[str, Any]:
        return {
            "step": 0,
            "read_from": {},
            "slots": {str(i): asdict(SlotState()) for i in range(self.rows)},
            "filled": {},
            "rest": None,
        }


def config(folder: Path, **training: Any) -> RunConfig:
    cfg = run_config(Cell("llama", "single", "lora"), "adamw")
    return replace(
        cfg,
        data=replace(cfg.data, validation=0.1),
        training=replace(cfg.training, output_dir=str(folder), **training),
    )


def start_run(cfg: RunConfig) -> tuple[Job, Callable[[int], None], Checkpointer]:
    """A job, what makes its step, and what saves it."""
    Path(cfg.training.output_dir, "metrics.jsonl").touch()
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    return (
        job,
        lambda step: training_step(job, microbatches(cfg, mesh, step), mesh, None) and None,
        Checkpointer(cfg, job, NoLoader(), Start()),
    )


def values(job: Job, cfg: RunConfig) -> dict[str, torch.Tensor]:
    portable = portable_tensors(job.pm, job.optimizer, trained_only=cfg.lora is not None)
    return {key: full_tensor(tensor).clone() for key, tensor in portable}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def steps_on_disk(folder: Path) -> list[int]:
    return [checkpoint_folder.step_of(path) for path in complete(folder)]


def save_steps(cfg: RunConfig, num_steps: int) -> dict[str, torch.Tensor]:
    job, make_step, checkpointer = start_run(cfg)
    with checkpointer:
        for step in range(1, num_steps + 1):
            make_step(step)
            checkpointer.save(step)
        checkpointer.wait()
    return values(job, cfg)


def test_what_is_kept(tmp_path):
    losses = {2: 5.0, 3: 3.0, 5: 4.0, 7: 2.0}  # of the evaluations after these steps

    def body() -> list[list[int]]:
        cfg = config(tmp_path, steps=8, save_every=3, keep_last=2, keep_best=True)
        _, make_step, checkpointer = start_run(cfg)
        seen = []
        with checkpointer:
            make_step(1)
            for step in range(1, 9):
                # Of any other step it would be the best one.
                evaluation = Evaluation(step - 1, 1.0, 1.0, 1)
                if step in losses:
                    evaluation = Evaluation(step, losses[step], 1.0, 1)
                checkpointer.after_step(step, evaluation)
                seen.append(steps_on_disk(tmp_path))
            checkpointer.finish()
            seen.append(steps_on_disk(tmp_path))
        return seen

    # Saved are 3 and 6, 8 (the last), and 2, 3, 7 (each the best so far). The two newest stay, and
    # the best.
    (seen,) = run_ranks(1, body)
    assert seen == [[], [2], [3, 2], [3, 2], [3, 2], [6, 3], [7, 6], [7, 6], [8, 7]]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-7"
    best = Best(step=7, loss=2.0, tokens=1, documents="")
    assert read_manifest(tmp_path / "checkpoints" / "step-8").best == best


def make_checkpoints(folder: Path, *names: str) -> None:
    for name in names:
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / MANIFEST).touch()


def names_on_disk(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_later_checkpoints_are_abandoned_and_stay_until_the_run_is_there_again(tmp_path):
    make_checkpoints(tmp_path, "step-2", "step-4", "step-30", "step-40")
    mark_best(tmp_path / "checkpoints" / "step-30")
    take_over(tmp_path, 4, best_step=2)
    assert names_on_disk(tmp_path) == {
        "best",
        "step-2",
        "step-4",
        "step-30.abandoned",
        "step-40.abandoned",
    }
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-2"
    make_checkpoints(tmp_path, "step-6")
    prune(tmp_path, step=6, keep_last=1)
    assert names_on_disk(tmp_path) == {
        "best",
        "step-2",
        "step-6",
        "step-30.abandoned",
        "step-40.abandoned",
    }
    make_checkpoints(tmp_path, "step-30")
    prune(tmp_path, step=30, keep_last=1)
    assert names_on_disk(tmp_path) == {"best", "step-2", "step-30", "step-40.abandoned"}


def test_what_a_killed_run_left_half_done_is_mended(tmp_path):
    # One run was killed while it wrote step 8, one before it had removed steps 2 and 4 completely,
    # one after it had reached step 6 again and found it the best, but before it marked it.
    removed = ("step-2.removed.tmp", "step-4.abandoned.removed.tmp")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "a-file.tmp").touch()  # of somebody else, if this is a link
    make_checkpoints(tmp_path, "step-6", "step-6.abandoned", "step-5", "step-8.tmp", *removed)
    mark_best(tmp_path / "checkpoints" / "step-5")
    (tmp_path / "checkpoints" / "best.tmp").symlink_to("step-6")
    take_over(tmp_path, 6, best_step=6)
    others = {"a-file.tmp"}
    assert names_on_disk(tmp_path) == {"step-5", "step-6", "step-6.abandoned", "best"} | others
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-6"
    (tmp_path / "checkpoints" / "step-6" / "newer").touch()
    take_over(tmp_path, 5, best_step=None)
    assert names_on_disk(tmp_path) == {"step-5", "step-6.abandoned"} | others
    assert (tmp_path / "checkpoints" / "step-6.abandoned" / "newer").exists()


def test_a_best_that_is_gone_is_not_waited_for(tmp_path):
    best = tmp_path / "checkpoints" / "best"

    def body() -> tuple[str, ...]:
        cfg = config(tmp_path, steps=3, save_every=1, keep_last=2, keep_best=True)
        job, make_step, checkpointer = start_run(cfg)
        with checkpointer:
            make_step(1)
            for step, loss in ((1, 1.0), (2, 2.0), (3, 0.5)):
                checkpointer.after_step(step, Evaluation(step, loss, 1.0, 1))

        def start_from(folder: Path) -> Start:
            return find_start(replace(cfg, training=replace(cfg.training, resume=str(folder))))

        back = start_from(folder_of(tmp_path, 2))
        with Checkpointer(cfg, job, NoLoader(), back) as checkpointer:
            assert names_on_disk(tmp_path) == {
                "step-2",
                "step-3.abandoned",
            }  # step 1 was the best, until step 3
            assert start_from(folder_of(tmp_path, 3).with_suffix(".abandoned")).step == 3
            checkpointer.after_step(3, Evaluation(3, 4.0, 1.0, 1))
        return back.passed_over

    assert run_ranks(1, body) == [("step-3 is later; it is set aside as step-3.abandoned",)]
    assert names_on_disk(tmp_path) == {"step-2", "step-3", "best"}
    assert best.resolve().name == "step-3"


@pytest.mark.parametrize(
    ("text", "tokens", "best"), [("old", 8, "step-1"), ("old", 16, "step-2"), ("new", 8, "step-2")]
)
def test_a_best_is_no_rival_to_a_loss_on_other_text(text, tokens, best, tmp_path):
    def body() -> None:
        cfg = config(tmp_path, steps=3, save_every=1, keep_best=True)
        job, make_step, _ = start_run(cfg)
        make_step(1)
        with Checkpointer(cfg, job, NoLoader("old"), Start()) as checkpointer:
            checkpointer.after_step(1, Evaluation(1, 1.0, 1.0, 8))
        start = find_start(
            replace(cfg, training=replace(cfg.training, resume="latest", eval_batches=2))
        )
        with Checkpointer(cfg, job, NoLoader(text), start) as checkpointer:
            for step, loss in ((2, 2.0), (3, 2.5)):
                checkpointer.after_step(step, Evaluation(step, loss, 1.0, tokens))

    run_ranks(1, body)
    assert (tmp_path / "checkpoints" / "best").resolve().name == best


def test_async_saves_what_the_run_was_when_it_was_asked(tmp_path):
    def body() -> bool:
        cfg = config(tmp_path, async_save=True)
        job, make_step, checkpointer = start_run(cfg)
        may_write, write = threading.Event(), checkpoint_tensors.write
        checkpoint_tensors.write = lambda *args: may_write.wait() and write(*args)
        with checkpointer:
            make_step(1)
            job.loss_scale.scale = 4.0
            asked = values(job, cfg)
            checkpointer.save(1)
            job.loss_scale.scale = 1.0
            make_step(2)
            assert complete(tmp_path) == []
            may_write.set()
            checkpointer.wait()
        assert not equal(values(job, cfg), asked)
        start = find_start(replace(cfg, training=replace(cfg.training, resume="latest")))
        job = build(cfg, build_mesh(cfg, torch.device("cpu")), start.state())
        return equal(values(job, cfg), asked) and job.loss_scale.scale == 4.0

    assert run_ranks(1, body) == [True]


def fill_the_disk(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_error_is_one_line_and_leaves_the_older_checkpoints(asynchronous, tmp_path):
    def body() -> str:
        cfg = replace(
            config(tmp_path, async_save=asynchronous),
            parallel=replace(config(tmp_path).parallel, data="ddp"),
        )
        _, make_step, checkpointer = start_run(cfg)
        with checkpointer:
            make_step(1)
            checkpointer.save(1)
            checkpointer.wait()
            if dist.get_rank() == 1:
                fill_the_disk(20_000)  # less than a rank's share of the tensors
            try:
                checkpointer.save(2)
                checkpointer.wait()
            except RunError as error:
                return explain(error)
        raise AssertionError("written to a full disk")

    one, other = run_ranks(2, body)
    assert one == other
    assert one.reason.startswith("checkpoint step-2 could not be written: File too large; ")
    assert (one.exit_code, one.text) == (1, f"error: {one.reason}")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    assert damage(tmp_path / "checkpoints" / "step-1") is None


def test_an_error_of_one_rank_before_it_writes_is_every_ranks(monkeypatch, tmp_path):
    held = checkpoint_tensors.held

    def fail(tensors: checkpoint_tensors.Tensors, rank: int):
        if rank == 1:
            raise OSError(errno.EIO, "cannot read")
        return held(tensors, rank)

    def body() -> str:
        cfg = config(tmp_path)
        _, make_step, checkpointer = start_run(
            replace(cfg, parallel=replace(cfg.parallel, data="ddp"))
        )
        make_step(1)
        with checkpointer, pytest.raises(RunError) as caught:
            checkpointer.save(1)
        return str(caught.value)

    monkeypatch.setattr(checkpoint_tensors, "held", fail)
    one, other = run_ranks(2, body)
    assert one == other
    assert "step-1 could not be written: cannot read" in one


def test_every_file_is_known_whatever_a_rank_sees_of_the_folder(monkeypatch, tmp_path):
    """Over NFS a rank may see a folder as it was a minute ago."""
    iterdir, end = Path.iterdir, checkpoint_folder.UNFINISHED

    def as_before(folder: Path) -> Iterator[Path]:
        is_written = folder.name.endswith(end)
        return (path for path in iterdir(folder) if not is_written or path.suffix == ".jsonl")

    monkeypatch.setattr(Path, "iterdir", as_before)

    def body() -> None:
        cfg = config(tmp_path)
        _, step, checkpointer = start_run(
            replace(cfg, parallel=replace(cfg.parallel, data="fsdp2"))
        )
        with checkpointer:
            step(1)
            checkpointer.save(1)
            checkpointer.wait()

    run_ranks(2, body)
    files = read_manifest(tmp_path / "checkpoints" / "step-1").files
    assert {"tensors-0.safetensors", "tensors-1.safetensors", "index.json"} <= files.keys()


def test_killed_while_saving(tmp_path):
    def body() -> None:
        checkpoint_folder.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        save_steps(config(tmp_path), 1)

    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(1, body)
    assert names_on_disk(tmp_path) == {"step-1.tmp"}
    run_ranks(1, save_steps, config(tmp_path), 2)
    assert names_on_disk(tmp_path) == {"step-1", "step-2"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run of two ranks with checkpoints after steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    cfg = config(folder)
    run_ranks(2, save_steps, replace(cfg, parallel=replace(cfg.parallel, data="fsdp2")), 2)
    return folder


FILES = (
    "checkpoint.json",
    "index.json",
    "metrics.jsonl",
    "tensors-0.safetensors",
    "tensors-1.safetensors",
)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes() or b"\n")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] if path.stat().st_size else b"longer")


DAMAGES = (Path.unlink, truncate, flip)


def test_every_file_of_a_checkpoint_is_known(saved):
    assert {path.name for path in (saved / "checkpoints" / "step-2").iterdir()} == set(FILES)
    assert damage(saved / "checkpoints" / "step-2") is None


def test_damage_is_found_before_anything_is_loaded(saved):
    def body() -> list[str]:
        cfg = config(saved)
        cfg = replace(
            cfg,
            parallel=replace(cfg.parallel, data="ddp"),
            training=replace(cfg.training, resume="latest"),
        )
        told = []
        for file in FILES:
            path = saved / "checkpoints" / "step-2" / file
            for harm in DAMAGES:
                if dist.get_rank() == 0:
                    shutil.copyfile(path, saved / "whole")
                    harm(path)
                dist.barrier()
                with pytest.raises(UserError) as error:
                    find_start(cfg)
                told.append(str(error.value))
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.move(saved / "whole", path)
        dist.barrier()
        assert find_start(cfg).step == 2
        return told

    told, other = run_ranks(2, body)
    assert told == other
    assert len(told) == len(FILES) * len(DAMAGES)
    for i, line in enumerate(told):
        file, harm = FILES[i // len(DAMAGES)], DAMAGES[i % len(DAMAGES)]
        assert line.startswith(
            f"checkpoint step-2 is damaged: {saved}/checkpoints/step-2/{file} "
        ), line
        assert line.endswith("; --resume latest-good goes back to the last whole one"), line
        assert "\n" not in line
        assert ("missing" in line) == (harm is Path.unlink)


def test_latest_good_goes_back_and_says_so(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    flip(tmp_path / "checkpoints" / "step-2" / "tensors-0.safetensors")
    good = config(tmp_path, resume="latest-good")
    (start,) = run_ranks(1, find_start, good)
    assert start.step == 1
    (line,) = start.passed_over
    assert line.startswith("step-2 is passed over")
    assert "tensors-0.safetensors is altered" in line
    flip(tmp_path / "checkpoints" / "step-1" / "checkpoint.json")
    with pytest.raises(
        RuntimeError,
        match=r"UserError: .*holds no whole checkpoint \(step-2 .*step-1 .*leave resume out",
    ):
        run_ranks(1, find_start, good)


def test_lora_saves_adapters_only(saved):
    tensors = read_index(saved / "checkpoints" / "step-2").tensors
    weights = {key.partition("/")[2] for key in tensors if key.startswith("weights/")}
    assert weights
    assert all("lora_" in name for name in weights)
    assert tensors.keys() - {f"weights/{name}" for name in weights} == {
        f"optimizer/{name}/{state}"
        for name in weights
        for state in ("step", "exp_avg", "exp_avg_sq")
    }
