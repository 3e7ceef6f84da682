"""What a run leaves for other programs: `record.json` at its end and `metrics.jsonl` line by line. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from shardwise.config import UserError

SCHEMA_VERSION = 1

# What may hold NaN or an infinity, written as a string.
_FIGURES = ("losses", "grad_norms", "eval", "largest_round_difference")

Status = Literal["ok", "oom", "failed", "timeout", "unsupported", "stopped"]


@dataclass(frozen=True)
class PipelineStep:
    """One step of a pipeline, from its first action to its last."""

    seconds: float
    bubble: float  # idle share of all ranks' time
    busy_seconds: list[float]  # of each rank
    idle_seconds: list[float]


@dataclass(frozen=True)
class PipelineRecord:
    """How a model was cut for a pipeline, and what came of it."""

    schedule: str
    split: str | list[int]  # as asked for
    boundaries: list[int]  # chunk c holds units boundaries[c] to boundaries[c + 1]: embedding, layers, head
    layers: list[int]  # of each chunk
    costs: str  # where the units' costs come from
    measured: PipelineStep | None  # the timed step of median length
    simulated: PipelineStep | None  # None where the costs are no times of this machine
    simulator_error_percent: float | None  # simulated over measured seconds, less one
    events: list[str] | None  # of the measured step, a line for each rank: see `schedule.trace.pack`


@dataclass(frozen=True)
class RunRecord:
    """One run: what was asked, where it ran, what was measured. Lists over ranks are in rank order.

    Figures that were not measured are None, never 0. Times and rates leave `measure.warmup_steps` steps out.
    """

    status: Status
    config: dict[str, Any]
    reason: str = ""  # why the status is not ok
    environment: dict[str, Any] = field(default_factory=dict)  # device, versions, commit
    mesh: dict[str, int] = field(default_factory=dict)  # axis -> size
    parameters: dict[str, int] = field(default_factory=dict)  # trainable, frozen, total
    lora: dict[str, Any] | None = None  # what was adapted, by layer kind
    kernels: dict[str, str] = field(default_factory=dict)  # what `lora.kernel` and `training.loss` came to
    losses: list[float] = field(default_factory=list)  # of each step, mean over the global batch's target tokens
    grad_norms: list[float] = field(default_factory=list)  # of each step, global, before clipping
    skipped_steps: int = 0  # whose float16 gradients had overflown
    eval: list[dict[str, float]] = field(default_factory=list)  # step, loss, perplexity, tokens
    data: dict[str, Any] | None = None  # train, validation: rows and documents
    tokens_per_second: float | None = None  # global
    step_seconds: dict[str, float] | None = None  # mean, p10, p50, p90, max; and steps, how many were timed
    peak_memory_bytes: list[int] | None = None
    memory_parts: list[dict[str, int]] | None = None  # state_bytes' three, activations, temporary
    state_bytes: list[dict[str, int]] | None = None  # weights, gradients, optimizer
    mfu: float | None = None
    hfu: float | None = None
    flops: dict[str, Any] | None = None  # per token (model, hardware), convention, peak and where it comes from
    pipeline: dict[str, Any] | None = None  # PipelineRecord as plain data
    sample: str | None = None
    notes: list[str] = field(default_factory=list)  # what a reader of these figures must know
    resumed_from: dict[str, Any] | None = None  # folder, step of a checkpoint; times are of what followed
    schema_version: int = SCHEMA_VERSION

    def write(self, path: str | Path) -> None:
        """Write strict JSON, all or nothing; NaN and infinities become the strings "nan", "inf" and "-inf"."""
        write_atomically(path, dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read what `write` wrote; UserError where it is not a record of this schema."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path}: cannot read the record ({error.strerror}); give a run's record.json") from None
        except ValueError as error:
            raise UserError(f"{path}: not a record, since not JSON ({error}); give a run's record.json") from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{path}: schema version {version}, but this program reads {SCHEMA_VERSION}; "
                "run again, or read it with the version of shardwise that wrote it"
            )
        unknown = content.keys() - {f.name for f in dataclasses.fields(cls)}
        missing = {"status", "config"} - content.keys()
        if unknown or missing:
            raise UserError(f"{path}: not a record ({min(unknown | missing)} is unknown or missing); run again")
        return cls(**{key: _floats(value) if key in _FIGURES else value for key, value in content.items()})


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, on disk as soon as it is written."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def write(self, **values: Any) -> None:
        """Append one line."""
        self._file.write(dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file (UTF-8) so that a reader meets either its old content or all of the new one.

    Raises OSError where the file cannot be written.
    """
    path = Path(path)
    temporary = temporary_of(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def temporary_of(path: Path) -> Path:
    """Return the file that `write_atomically` writes before it gives it the name of `path`."""
    return path.with_name(f".{path.name}.tmp")


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON that every parser reads: NaN and infinities, which JSON has no numbers for, become strings."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _floats(value: Any) -> Any:
    """Undo `_finite` in fields that hold no other strings."""
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return float(value) if isinstance(value, str) else value
