"""Trackers, offline: TensorBoard itself, and for the others packages that record their calls."""

from __future__ import annotations

import importlib
import signal
import sys
from contextlib import ExitStack

import pytest

from shardwise.base.process.ending import RunError, Stopped
from shardwise.config import Data, Model, RunConfig, Training, UserError
from shardwise.training.trackers import check_installed, open_trackers

CONFIG = {"model": {"path": "tiny"}, "optimizer": {"lr": 0.5, "betas": (0.9, 0.95)}, "lora": None}

# `calls` has an entry for each call of the module, or of the run that `init` returns.
FAKE = """
calls = []

class Run:
    def __getattr__(self, name):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
        return call

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def call(*args, **kwargs):
        calls.append((name, args, kwargs))
        return Run()
    return call
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Make a package of this name importable; returns a function that gives its calls."""
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)

    def make(name):
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text(FAKE)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return lambda: importlib.import_module(name).calls

    yield make
    for name in ("wandb", "mlflow", "trackio"):
        sys.modules.pop(name, None)


def log_two_steps(name, output_dir):
    with ExitStack() as stack:
        (log,) = open_trackers([name], output_dir, CONFIG, stack)
        log({"loss": 2.5, "lr": 0.25}, step=1)
        log({"loss": 1.5}, step=2)


def test_tensorboard_event_files_hold_what_was_logged(tmp_path):
    log_two_steps("tensorboard", tmp_path)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    } == {"loss": [(1, 2.5), (2, 1.5)], "lr": [(1, 0.25)]}
    (text,) = events.Tensors("config/text_summary")
    assert "betas:\n  - 0.9\n  - 0.95\n" in text.tensor_proto.string_val[0].decode()


def test_tensorboard_takes_a_resolved_run_file(tmp_path):
    cfg = RunConfig(Model("m"), Data("d"), Training(str(tmp_path)))
    with ExitStack() as stack:
        open_trackers(["tensorboard"], tmp_path, cfg.to_dict(), stack)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_wandb_calls(fake, tmp_path):
    calls = fake("wandb")
    log_two_steps("wandb", tmp_path)
    assert calls() == [
        (
            "init",
            (),
            {"project": "shardwise", "name": tmp_path.name, "dir": str(tmp_path), "config": CONFIG},
        ),
        ("log", ({"loss": 2.5, "lr": 0.25},), {"step": 1}),
        ("log", ({"loss": 1.5},), {"step": 2}),
        ("finish", (), {"exit_code": 0}),
    ]


def test_trackio_calls(fake, tmp_path):
    calls = fake("trackio")
    log_two_steps("trackio", tmp_path)
    assert calls() == [
        ("init", (), {"project": "shardwise", "name": tmp_path.name, "config": CONFIG}),
        ("log", ({"loss": 2.5, "lr": 0.25},), {"step": 1}),
        ("log", ({"loss": 1.5},), {"step": 2}),
        ("finish", (), {}),
    ]


def test_mlflow_calls(fake, tmp_path):
    calls = fake("mlflow")
    log_two_steps("mlflow", tmp_path)
    parameters = {
        "model.path": "tiny",
        "optimizer.lr": 0.5,
        "optimizer.betas": (0.9, 0.95),
        "lora": None,
    }
    assert calls() == [
        ("set_experiment", ("shardwise",), {}),
        ("start_run", (), {"run_name": tmp_path.name}),
        ("log_params", (parameters,), {}),
        ("log_metrics", ({"loss": 2.5, "lr": 0.25},), {"step": 1}),
        ("log_metrics", ({"loss": 1.5},), {"step": 2}),
        ("end_run", ("FINISHED",), {}),
    ]


@pytest.mark.parametrize(
    ("error", "exit_code", "status"),
    [(ValueError("loss is nan"), 1, "FAILED"), (Stopped(signal.SIGTERM, 2, "x"), 0, "FINISHED")],
)
def test_a_run_that_fails_has_failed_in_its_trackers(fake, tmp_path, error, exit_code, status):
    wandb, mlflow = fake("wandb"), fake("mlflow")
    stack = ExitStack()
    open_trackers(["wandb", "mlflow"], tmp_path, CONFIG, stack)
    stack.__exit__(type(error), error, None)
    assert wandb()[-1] == ("finish", (), {"exit_code": exit_code})
    assert mlflow()[-1] == ("end_run", (status,), {})


def test_a_trackers_own_variable_names_the_project(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    wandb, mlflow = fake("wandb"), fake("mlflow")
    with ExitStack() as stack:
        open_trackers(["wandb", "mlflow", "wandb"], tmp_path, CONFIG, stack)
    projects = [options["project"] for name, _, options in wandb() if name == "init"]
    assert projects == ["mine"]  # a run in each tracker, even where its name is given twice
    assert mlflow()[0] == ("set_experiment", ("ours",), {})


def test_a_tracker_that_is_not_installed_is_the_users_mistake(fake):
    fake("wandb")
    with pytest.raises(UserError, match=r"pip install trackio"):
        check_installed(["wandb", "trackio"])
    assert "wandb" not in sys.modules


def test_a_tracker_that_does_not_start_closes_those_before_it(fake, tmp_path):
    calls = fake("wandb")
    (tmp_path / "packages" / "mlflow.py").write_text(
        "def set_experiment(name):\n    raise OSError('no server')\n"
    )
    with pytest.raises(OSError, match="no server"), ExitStack() as stack:
        open_trackers(["wandb", "mlflow"], tmp_path, CONFIG, stack)
    assert [call[0] for call in calls()] == ["init", "finish"]


def test_no_tracker_no_import(tmp_path):
    assert open_trackers([], tmp_path, CONFIG, ExitStack()) == []
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- resumes


@pytest.mark.parametrize("done", [1, 4, 8])
def test_tensorboard_shows_each_step_once_after_a_resume(done, tmp_path):
    # TensorBoard's own reader says what it shows. The run died after step 8.
    for first, value in ((1, 1.0), (done + 1, 2.0)):
        with ExitStack() as stack:
            (log,) = open_trackers(["tensorboard"], tmp_path, CONFIG, stack, first - 1)
            for step in range(first, 9):
                log({"loss": value}, step=step)
            if first == 1:
                log({"eval_loss": 3.0}, step=done)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [
        (step, 1.0 if step <= done else 2.0) for step in range(1, 9)
    ]
    assert [point.step for point in events.Scalars("eval_loss")] == [done]


# A stand-in for MLflow 3.17, whose calls below do this with a file store: a run that is continued
# says what it has, another value of a parameter is refused, a step may have a value twice.
MLFLOW = """
from types import SimpleNamespace as Object
import os

params, points, experiments = {}, [], []

class MlflowException(Exception):
    pass

def set_experiment(name):
    experiments.append(name)

def start_run(run_name):
    if os.environ.get("MLFLOW_RUN_ID", "known") != "known":
        raise MlflowException("Run 'other' not found")
    if "MLFLOW_RUN_ID" in os.environ and experiments:
        raise MlflowException("active experiment ID does not match environment run ID")
    newest = {name: value for name, step, value in points}
    return Object(info=Object(run_id="known"), data=Object(params=dict(params), metrics=newest))

def log_params(new):
    for name, value in new.items():
        if params.setdefault(name, str(value)) != str(value):
            raise MlflowException("Changing param values is not allowed.")

def log_metrics(values, step):
    points.extend((name, step, value) for name, value in values.items())

def end_run(status):
    experiments.clear()

class MlflowClient:
    def get_metric_history(self, run_id, key):
        assert run_id == "known"
        return [Object(step=step) for name, step, _ in points if name == key]
"""


def test_mlflow_continues_a_run_by_its_id(fake, tmp_path, monkeypatch):
    fake("mlflow")
    (tmp_path / "packages" / "mlflow.py").write_text(MLFLOW)
    config = CONFIG
    for done, last in ((0, 6), (4, 8), (8, 8)):
        with ExitStack() as stack:
            (log,) = open_trackers(["mlflow"], tmp_path, config, stack, done)
            for step in range(done + 1, last + 1):
                log({"loss": 1.0 + done, "lr": 0.5}, step=step)
            if done == 4:
                log({"mine": 1.0}, step=5)
        monkeypatch.setenv("MLFLOW_RUN_ID", "known")
        config = {**CONFIG, "optimizer": {"lr": 0.25}, "training": {"resume": "latest"}}
    mlflow = importlib.import_module("mlflow")
    losses = [(step, value) for name, step, value in mlflow.points if name == "loss"]
    assert losses == [(step, 1.0 if step <= 6 else 5.0) for step in range(1, 9)]
    assert ("mine", 5, 1.0) in mlflow.points
    assert mlflow.params == {
        **{"model.path": "tiny", "optimizer.lr": "0.5", "optimizer.betas": "(0.9, 0.95)"},
        **{"lora": "None", "training.resume": "latest"},
    }


def test_a_run_id_that_a_tracker_does_not_know_is_told_in_a_line(fake, tmp_path, monkeypatch):
    fake("mlflow")
    (tmp_path / "packages" / "mlflow.py").write_text(MLFLOW)
    monkeypatch.setenv("MLFLOW_RUN_ID", "other")
    with pytest.raises(RunError, match=r"mlflow begins no run .*'other' not found"):
        open_trackers(["mlflow"], tmp_path, CONFIG, ExitStack())
