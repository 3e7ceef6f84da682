"""The section `launch` of the run file: where processes run, for how long, and how often."""

import re
from dataclasses import dataclass, field
from typing import ClassVar

from shardwise.config.ranges import shown
from shardwise.config.section import KeyFacts, Section, require, with_facts

MOST_BYTES = 2**17  # Linux: MAX_ARG_STRLEN
_NO_TEXT = re.compile(r"(?<!\\)(\\\\)*\\(x00|ud[89a-f])")  # as repr writes them
_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{1,2}){0,2}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"([a-z0-9]+://)?[^,:\n]+")
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Launch(Section):
    """Where `shardwise launch` starts processes, and for how long and how often they may run.

    Of these keys `shardwise train` reads `restarts` and `timeout_seconds`.
    """

    facts: ClassVar[KeyFacts] = KeyFacts(resumable=True, timed=False)

    nodes: int = with_facts(1, between=(1, 1_000_000))
    """Nodes of a cluster."""
    min_nodes: int | None = with_facts(None, between=(1, 1_000_000))
    """The fewest nodes with which a run under torchrun or Slurm goes on, on smaller data axes, when
    it has lost some; null: all of them."""
    processes: int = with_facts(1, between=(1, 1_024))
    """Processes on each node, of which each takes one GPU where there are any."""
    time: str | None = None
    """Slurm: the job's time limit, as `04:00:00` or `1-12:00:00`; null: the partition's."""
    ahead_seconds: int = with_facts(300, between=(1, 65_535))
    """Slurm: how long before that limit the run is told to finish its step and save."""
    restarts: int | None = with_facts(None, between=(0, 1_000_000))
    """How often the processes are started again, from the last checkpoint, after one has died.
    Machines that are preempted do not count, nor does the time limit of a Slurm job, before which
    the run saves. null: 10 times by `launch`, wherever it starts them, and never by `train`."""
    timeout_seconds: float = with_facts(600.0, between=(0.001, 1_000_000))
    """How long a step, or a rank's wait for others, may take before the run ends and prints every
    rank's stacks."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the processes."""
    before: list[str] = field(default_factory=list)
    """Lines of bash that run before the processes start: on the first node under Slurm, on every
    node of SkyPilot and Kubernetes."""
    slurm: dict[str, str | int | bool | None] = field(default_factory=dict)
    """Options of sbatch without their dashes, such as `gpus-per-node: 8`; true or null: without a
    value."""
    torchrun: dict[str, str | int | bool | None] = field(default_factory=dict)
    """Options of torchrun without their dashes, such as `rdzv-endpoint: node1:29400`; true or null:
    without a value."""
    ray: dict[str, str | int] = field(default_factory=dict)
    """`address` of the cluster, `cpus` of each process, `accelerator`, a type of GPU."""
    container: str | None = None
    """An image in which the processes run, with shardwise installed. Slurm: one for pyxis, or a
    file that ends with `.sif` for apptainer. SkyPilot and Kubernetes: a name in a registry."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Folders of the processes, and what each is. Slurm with a container: a path of the nodes.
    SkyPilot: a volume's name, a bucket's address, or a path here, which is copied. Kubernetes: the
    name of a persistent volume claim."""
    resources: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Resources of each node. SkyPilot: its `resources`, such as `accelerators: H100:8`.
    Kubernetes: limits of a container, such as `nvidia.com/gpu: 8`."""

    @property
    def restarts_of_launch(self) -> int:
        """The restarts of a run that `shardwise launch` has started."""
        return 10 if self.restarts is None else self.restarts

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.time is None or _TIME.fullmatch(self.time) is not None,
            f"launch.time is {shown(self.time)}; give it as 04:00:00 or 1-12:00:00, in quotes",
        )
        require(
            self.time is None or not 0 < _seconds(self.time) <= self.ahead_seconds,
            f"launch.time is {self.time}, and the run would be told to stop {self.ahead_seconds} "
            "seconds before (launch.ahead_seconds), which is at once; lower them, or raise it",
        )
        require(
            self.min_nodes is None or self.min_nodes <= self.nodes,
            f"launch.min_nodes is {self.min_nodes} of {self.nodes} launch.nodes; lower it",
        )
        for key, value in vars(self).items():
            require(
                not _NO_TEXT.search(repr(value)),
                f"launch.{key} has a NUL or half a character, which no process can be given; take "
                "it out",
            )
        for name, value in self.environment.items():
            require(
                _NAME.fullmatch(name) is not None and len(f"{name}={value}".encode()) < MOST_BYTES,
                f"launch.environment has {shown(name)}, which is no name of a variable, or takes "
                f"{MOST_BYTES:,} bytes, which Linux gives none; rename it, or write it into a file",
            )
        for path, source in self.mounts.items():
            require(
                _PATH.fullmatch(path) is not None and _PATH.fullmatch(source) is not None,
                f"launch.mounts has {shown(path)}: {shown(source)}; write FOLDER: SOURCE without "
                "commas, colons (except in ://) and line breaks",
            )
        for key, own in OWN.items():
            for name, value in getattr(self, key).items():
                require(
                    _OPTION.fullmatch(name) is not None and "\n" not in str(value),
                    f"launch.{key} has {shown(name)}: {shown(value)}, which is no option of it; "
                    "write a name as in its manual, without dashes in front, and its value in one "
                    "line",
                )
                require(
                    name not in own,
                    f"launch.{key} has {name}, which launch itself sets; use its other keys",
                )
                require(
                    value is not False,
                    f"launch.{key} has {name}: false; leave out an option that is not to be given",
                )
        for name, value in self.ray.items():
            is_enough = value > 0 if isinstance(value, int) else bool(value)
            require(
                isinstance(value, OF_RAY.get(name, ())) and is_enough,
                f"launch.ray has {shown(name)}: {shown(value)}, which Ray does not take; it takes "
                f"{', '.join(f'{key} ({kind.__name__})' for key, kind in OF_RAY.items())}",
            )


def _seconds(time: str) -> int:
    """Return the seconds of a time limit in one of Slurm's forms; 0: none."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not days and len(parts) < 3:  # minutes come first
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


OWN = {
    "slurm": (
        *("nodes", "ntasks", "ntasks-per-node", "time", "signal", "requeue", "no-requeue"),
        *("chdir", "output", "error", "open-mode", "array", "parsable", "quiet"),
        *("test-only", "wait", "wrap", "no-kill"),
    ),
    "torchrun": (
        *("nnodes", "nproc-per-node", "max-restarts", "rdzv-id", "standalone", "node-rank"),
        *("module", "no-python", "run-path", "virtual-local-rank", "signals-to-handle"),
        "shutdown-timeout",
    ),
}
"""Options that have keys of their own, or that submitting or restarts need as they are."""
OF_RAY = {"address": str, "cpus": int, "accelerator": str}
"""The options of Ray, and the type of their values."""
