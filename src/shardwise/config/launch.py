"""The section `launch` of the run file: the nodes that `shardwise launch` asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shardwise.config.section import Section, require
from shardwise.ranges import shown

_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{1,2}){0,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Launch(Section):
    """Nodes and processes of `shardwise launch`. No other command reads them."""

    nodes: int = 1
    """Nodes of a cluster."""
    processes: int = 1
    """Processes on each node, of which each takes one GPU where there are any."""
    time: str | None = None
    """Slurm: the job's time limit, as `04:00:00` or `1-12:00:00`; null: the partition's."""
    ahead_seconds: int = 300
    """Slurm: how long before that limit the run is told to finish its step and save."""
    restarts: int = 10
    """Slurm: how often the job is queued again, at its time limit or after a failure. Ray: how
    often the processes start again after one has died."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the processes."""
    before: list[str] = field(default_factory=list)
    """Slurm: lines of bash that run on the first node before the processes start."""
    options: dict[str, str | int | None] = field(default_factory=dict)
    """Slurm: options of sbatch without their dashes, such as `gpus-per-node: 8`; null: without a
    value. Ray: `address` of the cluster, `cpus` of each process, `accelerator`, a type of GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.time is None or _TIME.fullmatch(self.time) is not None,
            f"launch.time is {shown(self.time)}; give it as 04:00:00 or 1-12:00:00, in quotes",
        )
        for name in self.environment:
            require(
                _NAME.fullmatch(name) is not None,
                f"launch.environment has {shown(name)}, which is no name of a variable; rename it",
            )
        for name, value in self.options.items():
            require(
                _OPTION.fullmatch(name) is not None and "\n" not in str(value),
                f"launch.options has {shown(name)}: {shown(value)}, which is no option of sbatch; "
                "write a name as in its manual, without dashes in front, and its value in one line",
            )
            require(
                name not in OWN,
                f"launch.options has {name}, which launch itself sets; use its other keys",
            )


OWN = (
    *("nodes", "ntasks", "ntasks-per-node", "time", "signal", "requeue", "no-requeue", "chdir"),
    *("output", "error", "open-mode", "array"),
)
"""Options of sbatch that have keys of their own, or that the restarts need as they are."""
