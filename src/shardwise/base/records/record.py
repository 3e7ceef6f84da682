"""The files of a run for other programs: `record.json`, and `metrics.jsonl`, line by line.

This file needs no torch.
"""

import dataclasses
import errno
import json
import math
import os
import stat
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from shardwise.base.safety import write_atomically
from shardwise.config import UserError

SCHEMA_VERSION = 1

# Fields that may have NaN or infinities, which are written as strings.
_FIGURES = ("losses", "grad_norms", "eval", "largest_round_difference")

Status = Literal["ok", "oom", "failed", "timeout", "unsupported", "stopped"]


@dataclass(frozen=True)
class PipelineStep:
    """One step of a pipeline, from its first action to its last."""

    seconds: float
    bubble: float  # idle share of the time of all ranks
    busy_seconds: list[float]  # each rank's
    idle_seconds: list[float]  # each rank's


@dataclass(frozen=True)
class PipelineRecord:
    """How a model was cut for a pipeline, and one of its steps."""

    schedule: str
    split: str | list[int]  # `parallel.split`
    boundaries: list[int]
    """Chunk c has units boundaries[c] to boundaries[c + 1], of embedding, layers and head."""
    layers: list[int]  # number in each chunk
    costs: str  # the source of the units' costs
    measured: PipelineStep | None  # the timed step of median length
    simulated: PipelineStep | None  # None where costs are no times of this machine
    simulator_error_percent: float | None  # simulated over measured seconds, less one
    events: list[str] | None  # the measured step, a line per rank: see `schedule.timeline.pack`
    simulated_events: list[str] | None = None  # the simulated step


@dataclass(frozen=True)
class RoutingRecord:
    """How evenly routers gave tokens to experts: lists by layer, over the steps since a resume."""

    layers: list[str]  # paths of their experts
    share: list[list[float]]  # share of its tokens that each expert was given
    max_over_mean: list[float]  # the busiest expert's tokens over the mean
    entropy: list[float]  # entropy of the shares, over that of equal ones
    dropped: list[float] = field(default_factory=list)  # share of its tokens
    steps: dict[str, list[float]] = field(default_factory=dict)
    """The `router_...` numbers of `metrics.jsonl`, after each step."""


@dataclass(frozen=True)
class RunRecord:
    """One run: its config, its machine, and what was measured.

    Lists over ranks are in the order of ranks. A figure that was not measured is None, never 0.
    Times and rates leave out `measure.warmup_steps` steps.
    """

    status: Status
    config: dict[str, Any]
    reason: str = ""  # why the status is not ok
    environment: dict[str, Any] = field(default_factory=dict)  # device, versions, commit
    mesh: dict[str, int] = field(default_factory=dict)  # axis -> size
    parameters: dict[str, int] = field(default_factory=dict)  # trainable, frozen, total
    lora: dict[str, Any] | None = None  # adapted modules, by kind of layer
    kernels: dict[str, str] = field(default_factory=dict)
    """Backends of the loss, LoRA and each recurrent core: `torch`, or a package's kernels; under
    `parallel.cp` the way of `attention`."""
    recomputation: dict[str, Any] | None = None
    """Choice of `training.checkpointing: {budget_gib}`: the layers by number as full,
    operators and none, and the predicted peak of each place in the pipeline."""
    losses: list[float] = field(default_factory=list)
    """The loss of each step: the mean over the target tokens of the global batch."""
    grad_norms: list[float] = field(default_factory=list)
    """The gradient norm of each step: global, before clipping."""
    skipped_steps: int = 0  # steps whose float16 gradients overflowed
    eval: list[dict[str, Any]] = field(default_factory=list)
    """The step, loss, perplexity and tokens of each evaluation; of pairs, `metrics` of these."""
    data: dict[str, Any] | None = None  # train, validation: rows and documents
    tokens_per_second: float | None = None  # all ranks together
    samples_per_second: float | None = None
    """Rows of the global batches over the same seconds, rows of padding at the end of epochs too.
    With `data.packing: none` a row is one document (a conversation or a text), else a packed row of
    `data.sequence_length` tokens; in a loop of the caller one of its rows."""
    step_seconds: dict[str, float] | None = None
    """mean, p10, p50, p90 and max of the timed steps; `steps` is their number."""
    first_step_seconds: float | None = None
    """From the beginning of `train` to the end of the first step: data, weights, compilation."""
    peak_memory_bytes: list[int] | None = None  # each rank's
    memory_parts: list[dict[str, int]] | None = None
    """The parts of each rank's peak (see `memory_parts.PARTS`)."""
    state_bytes: list[dict[str, int]] | None = None  # each rank's: weights, gradients, optimizer
    launches_per_step: list[int] | None = None  # operators of each rank; None if compiled
    host_waits_per_step: list[int] | None = None
    """How often the host of each rank waits for its device in a step, beside collectives."""
    offloaded_bytes_per_step: list[int] | None = None
    """The activations that each rank moved to the CPU in a step; None where none are."""
    sent_bytes_per_step: list[int] | None = None
    """Bytes that leave each rank in the last step of the warm-up, by rings."""
    sent_bytes_by_formula: list[int] | None = None
    """The same as `shardwise plan` computes it; None for a model that it does not know."""
    disk_bytes_per_step: list[tuple[int, int]] | None = None
    """With `parallel.offload: disk`: the bytes that each rank reads and writes in a step."""
    mfu: float | None = None
    hfu: float | None = None
    flops: dict[str, Any] | None = None
    """Model and hardware FLOPs per token, their convention, and the peak with its source."""
    routing: dict[str, Any] | None = None  # RoutingRecord as plain data
    pairs: dict[str, list[float]] = field(default_factory=dict)
    """The `rewards/...` and `logps/...` of `metrics.jsonl`, after each step on pairs of answers."""
    pipeline: dict[str, Any] | None = None  # PipelineRecord as plain data
    resplits: list[dict[str, Any]] = field(default_factory=list)
    """How layers moved between the ranks of a pipeline: the step after which they did, `layers` of
    each stage and before, the work of each rank in a step, the step before, as expected and as
    measured since, and the bytes and seconds of the move."""
    stopped_early: dict[str, Any] | None = None
    """step, best_step and best_loss, where `training.patience` ended the run."""
    saved_step: int | None = None
    """The step after which the weights in `adapter/` or `model/` were: the last one or, with
    `training.keep_best`, that of the lowest validation loss."""
    sample: str | None = None
    notes: list[str] = field(default_factory=list)  # lines that a reader of these figures must know
    resumed_from: dict[str, Any] | None = None
    """Folder and step of a checkpoint; times are those of the steps after it."""
    schema_version: int = SCHEMA_VERSION

    def write(self, path: str | Path) -> None:
        """Write strict JSON, all or nothing; NaN and infinities become "nan", "inf" and "-inf"."""
        write_atomically(path, dumps(vars(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> "RunRecord":
        """Read a file that `write` wrote; UserError where it is not a record of this schema."""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            what = f"{path}: cannot read the record ({error.strerror})"
            raise UserError(f"{what}; give the record.json of a run") from None
        except (ValueError, RecursionError) as error:
            what = f"{path}: not a record, since it is not JSON ({error})"
            raise UserError(f"{what}; give the record.json of a run") from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{path}: schema version {version}, but this program reads {SCHEMA_VERSION}; run "
                "again, or read it with the version of shardwise that wrote it"
            )
        unknown = content.keys() - {f.name for f in dataclasses.fields(cls)}
        missing = {"status", "config"} - content.keys()
        if unknown or missing:
            name = min(unknown | missing)
            raise UserError(f"{path}: not a record ({name} is unknown or missing); run again")
        figures = {key: _floats(content[key]) for key in _FIGURES if key in content}
        return cls(**{**content, **figures})


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, which is on disk as soon as it is written."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def write(self, **values: Any) -> None:
        """Append one line."""
        self._file.write(dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def is_temporary(path: Path, of: Path) -> bool:
    """Return whether `write_atomically` writes this file before it names it `of`."""
    return fnmatch(path.name, f".{of.name}.*.tmp")


def dumps(value: Any, indent: int | None = None) -> str:
    """Return JSON that every parser reads: NaN and infinities, not numbers in JSON, are strings."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _floats(value: Any) -> Any:
    """Undo `_finite` in fields that have no other strings."""
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return float(value) if isinstance(value, str) else value
