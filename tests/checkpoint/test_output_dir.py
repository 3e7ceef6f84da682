"""An output folder holds one run, and nothing is removed that no run wrote."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardwise.base.process.ending import RunError
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.output_dir import claim, record_failure, rewind, writing
from shardwise.config import Data, Model, RunConfig, Training, UserError
from shardwise.config.run_file import parse_config


def config(folder: Path, model: str = "unused", **training: Any) -> RunConfig:
    return RunConfig(Model(model), Data("unused"), Training(str(folder), **training))


def leave_a_run(folder: Path) -> set[str]:
    """What a run leaves, and `notes.txt` and `data/`, which are the user's; returns the user's."""
    for name in ("record.json", "metrics.jsonl", "non-finite-step-3-rank-0.json", "notes.txt"):
        (folder / name).write_text("{}")
    for name in ("adapter", "model", "checkpoints/step-3", "tensorboard", "data"):
        (folder / name).mkdir(parents=True)
        (folder / name / ("checkpoint.json" if "step" in name else "file")).write_text("x")
    return {"notes.txt", "data"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_folder_is_made(tmp_path):
    claim(config(tmp_path / "a" / "b"), clear=True)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            UserError, match=r"cannot make the folder \((File exists|Not a directory)\)"
        ):
            claim(config(path), clear=True)


@pytest.mark.parametrize("name", ["record.json", "metrics.jsonl"])
def test_a_folder_with_another_run_is_refused_and_left_alone(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        UserError,
        match="holds another run, which has saved nothing; choose another folder, or delete it "
        r"with training\.overwrite=true",
    ):
        claim(config(tmp_path), clear=True)
    assert names(tmp_path) == {name}


def test_a_run_that_was_interrupted_is_to_be_continued_before_it_is_deleted(tmp_path):
    leave_a_run(tmp_path)
    with pytest.raises(UserError, match=r"holds a finished run \(adapter, model\); choose"):
        claim(config(tmp_path), clear=True)
    for name in ("adapter", "model"):
        (tmp_path / name / "file").unlink()
        (tmp_path / name).rmdir()
    with pytest.raises(
        UserError,
        match="holds a run with checkpoints up to step 3: continue it with --resume latest, choose "
        r"another folder, or delete it with training\.overwrite=true",
    ):
        claim(config(tmp_path), clear=True)


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    kept = leave_a_run(tmp_path)
    claim(config(tmp_path, overwrite=True), clear=False)  # every rank but one
    assert names(tmp_path) > kept
    claim(config(tmp_path, overwrite=True), clear=True)
    assert names(tmp_path) == kept


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["checkpoints", "adapter", "model.tmp", "record.json", "metrics.jsonl"]
)
def test_what_no_run_made_in_the_place_of_its_files_is_refused_and_left_alone(
    name, overwrite, tmp_path
):
    path = tmp_path / name
    path.mkdir() if path.suffix.startswith(".json") else path.write_text("x")
    (tmp_path / "timeline.json").write_text("{}")
    with pytest.raises(
        UserError, match=rf"{name} is a (file|folder), which no run has made; move it away"
    ):
        claim(config(tmp_path, overwrite=overwrite), clear=True)
    assert names(tmp_path) == {name, "timeline.json"}


def test_overwrite_leaves_what_a_link_leads_to(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "kept").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "far")
    claim(config(tmp_path / "run", overwrite=True), clear=True)
    assert names(tmp_path / "run") == set()
    assert names(tmp_path / "far") == {"kept"}


def test_overwrite_removes_nothing_where_there_is_no_run(tmp_path):
    (tmp_path / "model").mkdir()
    claim(config(tmp_path, overwrite=True), clear=True)
    assert names(tmp_path) == {"model"}


def test_overwrite_does_not_remove_the_model_that_the_run_reads(tmp_path):
    leave_a_run(tmp_path)
    before = names(tmp_path)
    with pytest.raises(
        UserError,
        match=r"this run reads .*/checkpoints, where it would write; choose another output_dir",
    ):
        claim(
            config(tmp_path, str(tmp_path / "checkpoints" / "step-3"), overwrite=True), clear=True
        )
    assert names(tmp_path) == before


def test_a_base_model_is_not_written_over_where_there_is_no_run_yet(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(
        UserError, match=r"this run reads .*/model, where it would write; choose another output_dir"
    ):
        claim(config(tmp_path, str(tmp_path / "model")), clear=True)


@pytest.mark.parametrize("resume", ["latest", "latest-good", "checkpoints/step-3"])
def test_a_run_that_goes_on_here_needs_no_overwrite_and_changes_nothing_yet(resume, tmp_path):
    leave_a_run(tmp_path)
    before = names(tmp_path)
    resume = str(tmp_path / resume) if "/" in resume else resume
    claim(config(tmp_path, resume=resume, overwrite=True), clear=True)
    assert names(tmp_path) == before
    assert names(tmp_path / "checkpoints") == {"step-3"}


def test_a_run_that_goes_on_elsewhere_does_not_replace_another(tmp_path):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        leave_a_run(tmp_path / name)
    with pytest.raises(UserError, match="holds a finished run"):
        claim(
            config(tmp_path / "here", resume=str(tmp_path / "elsewhere/checkpoints/step-3")),
            clear=True,
        )


@pytest.mark.parametrize(
    ("resume", "way_out"),
    [
        (".", "the newest is {}/checkpoints/step-3"),
        ("nope", "they are checkpoints/step-N in the output_dir of a run"),
        ("checkpoints/step-4", "they are checkpoints/step-N in the output_dir of a run"),
    ],
)
def test_what_is_no_checkpoint_is_not_called_damaged(resume, way_out, tmp_path):
    leave_a_run(tmp_path)
    path = tmp_path / resume
    with pytest.raises(UserError) as error:
        claim(config(tmp_path, resume=str(path), overwrite=True), clear=True)
    way_out = way_out.format(tmp_path)
    assert (
        str(error.value)
        == f"training.resume: {path} is no checkpoint, it has no checkpoint.json; {way_out}"
    )
    assert (tmp_path / "checkpoints" / "step-3").exists()


def test_results_are_not_replaced_because_a_command_runs_again(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "model.tmp").mkdir()
    claim(config(tmp_path, resume="auto"), clear=True)  # it died before anything was saved
    assert names(tmp_path) == set()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"holds a finished run .*, and no checkpoint to "):
        claim(config(tmp_path, resume="auto"), clear=True)
    assert names(tmp_path) == {"metrics.jsonl", "model"}


def test_checkpoints_alone_are_a_run(tmp_path):
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    with pytest.raises(UserError, match="holds a run with checkpoints up to step 3"):
        claim(config(tmp_path), clear=True)


def test_to_go_on_takes_the_metrics_of_the_checkpoint_and_removes_the_record(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n")
    (tmp_path / "at-step-2").write_text("1\n2\n")
    rewind(config(tmp_path), tmp_path / "at-step-2")
    assert names(tmp_path) == {"metrics.jsonl", "at-step-2"}
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"


def test_a_refused_run_does_not_stand_in_the_way_of_the_next(tmp_path):
    cfg = config(tmp_path)
    record_failure(cfg, "unsupported", "no such family")
    assert RunRecord.read(tmp_path / "record.json").status == "unsupported"
    claim(cfg, clear=True)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("metrics", [None, "", '{"step": 0, "eval_loss": 5.5}\n'])
@pytest.mark.parametrize("status", ["failed", "oom", "stopped", None])
def test_a_run_that_failed_before_its_first_step_does_not_stand_in_the_way(
    metrics, status, tmp_path
):
    cfg = config(tmp_path)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    if status is not None:
        record_failure(cfg, status, "data.train: row 7 has no field 'text'")
    claim(cfg, clear=True)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("metrics", "status"),
    [
        ('{"step": 0, "eval_loss": 5.5}\n{"step": 1, "loss": 5.4}\n', "failed"),
        ("not what a run writes\n", "failed"),
        ('{"loss": 5.4}\n', "failed"),
        ("", "ok"),
    ],
)
def test_a_run_that_took_a_step_stands_in_the_way(metrics, status, tmp_path):
    cfg = config(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(metrics)
    record_failure(cfg, status, "because")
    with pytest.raises(UserError, match="holds another run"):
        claim(cfg, clear=True)
    assert names(tmp_path) == {"metrics.jsonl", "record.json"}


@pytest.mark.parametrize(
    ("status", "began", "recorded"),
    [
        ("oom", True, "oom"),
        ("failed", False, "failed"),
        ("unsupported", False, "unsupported"),
        ("unsupported", True, "failed"),
    ],
)
def test_how_a_failure_is_recorded(status, began, recorded, tmp_path):
    if began:
        (tmp_path / "metrics.jsonl").write_text("")
    cfg = config(tmp_path)
    record_failure(cfg, status, "because")
    record = RunRecord.read(tmp_path / "record.json")
    assert (record.status, record.reason, parse_config(record.config)) == (recorded, "because", cfg)
    assert "torch" in str(record.environment)


def test_the_first_reason_stays(tmp_path):
    cfg = config(tmp_path)
    record_failure(cfg, "oom", "the cause")
    record_failure(cfg, "failed", "a rank that lost a peer")
    assert RunRecord.read(tmp_path / "record.json").reason == "the cause"


def test_a_record_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    record_failure(config(tmp_path / "gone"), "oom", "because")
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_is_gone_is_told_also_by_who_writes_tensors(tmp_path):
    with (
        pytest.raises(RunError, match=r"cannot be written \(No such file or directory\)"),
        writing(config(tmp_path)),
    ):
        save_file({"weight": torch.zeros(1)}, tmp_path / "gone" / "model.safetensors")


def test_a_folder_that_is_gone_is_told_whatever_a_library_calls_a_name(tmp_path):
    with (
        pytest.raises(RunError, match=r"tensorboard cannot be written \(No such file"),
        writing(config(tmp_path)),
    ):
        open(os.fsencode(tmp_path / "tensorboard"), "rb")  # noqa: SIM115


def test_a_disk_that_fails_without_a_name_is_told(tmp_path):
    with pytest.raises(RunError, match="Input/output error"), writing(config(tmp_path)):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
