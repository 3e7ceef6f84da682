"""Experiment trackers behind one small interface; a tracker's package is imported only when a run asks for it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from shardwise.config import UserError

PROJECT = "shardwise"
"""Where runs are filed in a tracker, unless the tracker's own environment variable names another place."""


class Logger(Protocol):
    """What a run needs of a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step; steps come in order."""

    def close(self) -> None:
        """Send what is left and end the run."""


class TensorBoard:
    """Event files in `output_dir`/tensorboard."""

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(output_dir / "tensorboard"))
        self._writer.add_text(
            "config", f"```yaml\n{yaml.safe_dump(_plain(config), sort_keys=False)}```"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar chart per value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class Wandb:
    """Weights & Biases; `WANDB_MODE=offline` keeps everything in `output_dir`/wandb."""

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            project=project, name=_run_name(output_dir), dir=str(output_dir), config=config
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One history row, or more columns in the row of the same step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until the run is uploaded (or written, offline)."""
        self._run.finish()


class MLflow:
    """MLflow, at `MLFLOW_TRACKING_URI` or in MLflow's own local default."""

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self._mlflow.start_run(run_name=_run_name(output_dir))
        self._mlflow.log_params(_flat(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point in each value's series."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._mlflow.end_run()


class Trackio:
    """Trackio's local database."""

    def __init__(self, output_dir: Path, config: dict[str, Any]) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(project=PROJECT, name=_run_name(output_dir), config=config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is buffered."""
        self._run.finish()


LOGGERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}
"""By the name in `measure.trackers`, which is the package's too."""


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError where a named tracker's package is not installed; imports nothing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"measure.trackers names {name}, which is not installed; pip install {name}, or leave it out"
            )


def open_loggers(
    names: Sequence[str], output_dir: str | Path, config: dict[str, Any]
) -> list[Logger]:
    """Start a run in each named tracker; call it on one rank only.

    `config` is the resolved run file as plain data. Raises UserError as `check_installed` does.
    """
    check_installed(names)
    loggers: list[Logger] = []
    try:
        for name in dict.fromkeys(names):
            loggers.append(LOGGERS[name](Path(output_dir), config))
    except BaseException:
        for logger in loggers:  # or they would show as running for ever
            logger.close()
        raise
    return loggers


def _run_name(output_dir: Path) -> str:
    return output_dir.resolve().name


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
