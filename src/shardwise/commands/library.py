"""The library: a run from a script or a notebook, and loops of one's own on the ranks of a run."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.process.ending import USER_ERROR, Ending, report_ending
from shardwise.base.records.record import RunRecord
from shardwise.config import CALLERS, RunConfig, UserError, require
from shardwise.config.ranges import shown
from shardwise.config.run_file import apply_override, parse_config, read_yaml
from shardwise.launch.local import launch
from shardwise.launch.rank import Function, Loop, Train

if TYPE_CHECKING:
    from torch import nn

    from shardwise.base.interfaces import Mesh
    from shardwise.training.instruments import Instruments
    from shardwise.training.own_loop import OwnLoop

Source = RunConfig | str | Path | Mapping[str, Any]
"""A run: a RunConfig, the path of a run file, or its sections as plain data."""

CALLERS_KEYS = {"model": {"path": CALLERS}, "data": {"train": CALLERS}}
"""The required keys that a loop of the caller may leave out."""


def _instruments() -> Instruments:
    from shardwise.lab.instruments import INSTRUMENTS

    return INSTRUMENTS


LOOP = Loop(_instruments)
"""The training loop of a run."""


class RunFailed(RuntimeError):
    """A run that did not succeed, for another reason than the user's mistake.

    `exit_code` and `status` are those of the command and of `record.json`; the traceback of the
    rank that failed first is on stderr.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.exit_code = ending.exit_code
        self.status = ending.status


def train(config: Source, nproc: int | None = None, overrides: Sequence[str] = ()) -> RunRecord:
    """Train as `shardwise train` does, on `nproc` processes of this machine, and return the record.

    Without `nproc` it runs in this process, or, under torchrun or srun, as one of their ranks.
    `overrides` are those of the command line, `--section.key=value`. UserError for the user's
    mistake, RunFailed for anything else.
    """
    cfg = read_config(config, overrides, {})
    _start(cfg, nproc, LOOP)
    return RunRecord.read(Path(cfg.training.output_dir, "record.json"))


def run(
    function: Function, config: Source, nproc: int | None = None, overrides: Sequence[str] = ()
) -> None:
    """Call `function(cfg, mesh)` on each rank of a run, as `train` does with its own loop.

    The process group is up and the output folder is this run's. What `function` returns is dropped:
    it leaves files. The keys that a module and rows of the caller replace, `model.path` and
    `data.train`, may be left out. Where processes are spawned (on a GPU, in a notebook), `function`
    has to be importable: in a module, or in a script that starts runs under `if __name__ ==
    "__main__"`.

    UserError for the user's mistake, RunFailed for anything else.
    """
    require(callable(function), f"the first argument is {function!r}; give function(cfg, mesh)")
    _start(read_config(config, overrides, CALLERS_KEYS), nproc, function)


def prepare(cfg: RunConfig, mesh: Mesh, model: nn.Module | None = None) -> OwnLoop:
    """Return the run of a caller's loop on this rank, as a context manager.

    Without `model` it trains the transformers model that `cfg` names. A module of the caller is
    only read: the run trains a copy, and saves it as `model/model.safetensors`. With
    `training.resume` the run begins after the checkpoint's step, `OwnLoop.done`.

    UserError, the same on every rank, for a run that may not begin.
    """
    from shardwise.training import own_loop

    return own_loop.prepare(cfg, mesh, model, _instruments())


def read_config(
    config: Source, overrides: Sequence[str], defaults: Mapping[str, Mapping[str, Any]]
) -> RunConfig:
    """Return a config; `defaults` stand for required keys that it leaves out."""
    if isinstance(config, RunConfig):
        config = config.to_dict()
    require(
        isinstance(config, str | Path | Mapping),
        f"a run is given as {type(config).__name__}; give a path, a mapping of sections, or a "
        "RunConfig",
    )
    require(
        isinstance(overrides, list | tuple) and all(isinstance(text, str) for text in overrides),
        f"overrides is {shown(overrides)}; give a list of strings, as in ['--training.steps=2']",
    )
    source = "config"
    if isinstance(config, str | Path):
        source, config = str(config), read_yaml(config, "a run file is a mapping of sections")
    sections = {**config}
    for override in overrides:
        apply_override(sections, override)
    for section, keys in defaults.items():
        given = sections.get(section) or {}
        if isinstance(given, Mapping):  # what is none is refused below
            sections[section] = {**keys, **given}
    return parse_config(sections, source)


def _start(cfg: RunConfig, nproc: int | None, function: Train) -> None:
    # Before torch is imported: its CPU allocator else warns when the memory of a run is measured.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    endings: list[Ending] = []

    def report(ending: Ending) -> None:
        endings.append(ending)
        if ending.exit_code != USER_ERROR:  # which is raised below
            report_ending(ending)

    try:
        if not launch(cfg, nproc, function, report):
            return
    finally:
        gc.collect()  # objects that refer to each other hold process groups: sockets and threads
    if endings[-1].exit_code == USER_ERROR:
        raise UserError(endings[-1].reason)
    raise RunFailed(endings[-1])
