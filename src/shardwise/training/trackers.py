"""Experiment trackers: a table of functions, each of which begins a run in one tracker.

A tracker's package is imported only when a run asks for it.
"""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from shardwise.base.process.ending import RunError, Stopped
from shardwise.config import UserError
from shardwise.config.keys import flat

PROJECT = "shardwise"
"""The project of a run, unless the tracker's own environment variable names another one."""

Log = Callable[..., object]
"""`log(values, step=step)` adds the values of a step; steps come in order."""
Close = Callable[[bool], object]
"""Sends or writes what is left, and ends the run; true: as a failed one, if a tracker has those."""


def _tensorboard(output_dir: Path, config: dict[str, Any], done: int) -> tuple[Log, Close]:
    """Write event files to `output_dir`/tensorboard; of later steps, older ones no longer count."""
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    first = done + 1 if done else None
    writer = tensorboard.SummaryWriter(str(output_dir / "tensorboard"), purge_step=first)
    plain = json.loads(json.dumps(config))  # lists for tuples, which YAML would tag
    writer.add_text("config", f"```yaml\n{yaml.safe_dump(plain, sort_keys=False)}```")

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, lambda failed: writer.close()


def _wandb(output_dir: Path, config: dict[str, Any], done: int) -> tuple[Log, Close]:
    """Begin a run of Weights & Biases; WANDB_MODE=offline keeps it in `output_dir`/wandb."""
    run = importlib.import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=_run_name(output_dir),
        dir=str(output_dir),
        config=config,
    )
    return run.log, lambda failed: run.finish(exit_code=int(failed))


def _mlflow(output_dir: Path, config: dict[str, Any], done: int) -> tuple[Log, Close]:
    """Begin a run of MLflow, or continue that of MLFLOW_RUN_ID with what it does not have yet.

    MLflow refuses another value of a parameter, and keeps a metric twice that a step has twice.
    """
    mlflow = importlib.import_module("mlflow")
    is_given = "MLFLOW_RUN_ID" in os.environ
    if not is_given:  # a run that exists has its experiment
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    run = mlflow.start_run(run_name=_run_name(output_dir))
    parameters, last_steps = flat(config), {}
    if is_given:
        parameters = {k: v for k, v in parameters.items() if k not in run.data.params}
        history = mlflow.MlflowClient().get_metric_history
        for name in run.data.metrics if done else ():
            last_steps[name] = max(point.step for point in history(run.info.run_id, name))
    mlflow.log_params(parameters)

    def log(values: Mapping[str, float], step: int) -> None:
        new = {name: value for name, value in values.items() if step > last_steps.get(name, -1)}
        if new:
            mlflow.log_metrics(new, step=step)

    return log, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED")


def _trackio(output_dir: Path, config: dict[str, Any], done: int) -> tuple[Log, Close]:
    """Begin a run in Trackio's local database; a resume is another run there."""
    trackio = importlib.import_module("trackio")
    run = trackio.init(project=PROJECT, name=_run_name(output_dir), config=config)
    return run.log, lambda failed: run.finish()


def _run_name(output_dir: Path) -> str:
    return output_dir.resolve().name


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
"""The trackers by their names in `measure.trackers`, which are those of the packages too."""


def _end(close: Close, kind: type[BaseException] | None, *_: object) -> None:
    close(kind is not None and not issubclass(kind, Stopped))


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError where the package of a tracker is not installed; import nothing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"measure.trackers names {name}, which is not installed; "
                f"pip install {name}, or leave it out"
            )


def open_trackers(
    names: Sequence[str], output_dir: Path, config: dict[str, Any], stack: ExitStack, done: int = 0
) -> list[Log]:
    """Begin a run in each tracker, on one rank only; `stack` ends them.

    A run that an error ends has failed, except by a request to stop. `config` is the resolved run
    file as plain data; `done`: the steps that a resume begins after. RunError where one refuses.
    """
    logs = []
    for name in dict.fromkeys(names):
        try:
            log, close = TRACKERS[name](output_dir, config, done)
        except OSError:
            raise
        except Exception as error:  # such as a run id that it does not know
            way_out = "correct that or leave it out"
            raise RunError(f"{name} begins no run ({error}); {way_out}") from error
        stack.push(partial(_end, close))
        logs.append(log)
    return logs
