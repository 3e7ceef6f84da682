"""What `shardwise split` shows and writes: a run's pipeline, stage by stage, beside other ways to cut it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from shardwise.assembly.costs import choose_split, costs_of, memory_caveat
from shardwise.assembly.describe import describe
from shardwise.config import RunConfig, UserError
from shardwise.drawing.gantt import gantt_file
from shardwise.drawing.perfetto import perfetto_trace
from shardwise.drawing.svg import require_matplotlib
from shardwise.metrics.hardware import peak_flops
from shardwise.models.spec import ModelSpec
from shardwise.process.world import device_type, threads_each
from shardwise.records.record import dumps
from shardwise.schedule.costs import Cost, CostSource
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.split import Split, bound_seconds
from shardwise.schedule.timeline import Timeline

FILES = ("split.json", "split.svg", "trace.json")


@dataclass(frozen=True)
class Plan:
    """A pipeline and its splits."""

    cfg: RunConfig
    spec: ModelSpec
    pipeline: Pipeline
    units: tuple[Cost, ...]
    source: CostSource
    chosen: Split
    others: dict[str, Split]
    """`uniform` and `parameters`, whatever memory they take."""

    @property
    def name(self) -> str:
        """Of the chosen split."""
        return self.cfg.parallel.split if isinstance(self.cfg.parallel.split, str) else "given"

    @property
    def drawn(self) -> dict[str, Timeline]:
        """The uniform split's timeline above the chosen one's."""
        splits = {**self.others, self.name: self.chosen}
        whole = ", of whole layers, not yet shared out by tp" * (self.cfg.parallel.tp > 1)
        return {
            f"{name}{whole}": splits[name].timeline
            for name in dict.fromkeys(("uniform", self.name))
        }

    @property
    def notes(self) -> list[str]:
        """What whoever reads the figures must know."""
        ranks = self.cfg.parallel.tp
        whole = f"seconds and memory are those of whole layers, before {ranks} tensor-parallel ranks share them out"
        return list(filter(None, (whole * (ranks > 1), memory_caveat(self.spec, self.source))))


def plan(cfg: RunConfig, num_processes: int | None = None) -> Plan:
    """Cut a run's model as `shardwise train` would on so many processes (default: as one copy of the model takes).

    UserError as it would, and where there is no pipeline. Torch's threads in this process become those of a rank, for
    which costs are measured and looked up.
    """
    if cfg.parallel.pp == 1:
        raise UserError(
            "parallel.pp is 1, so there is nothing to split; set it to 2 or more (--parallel.pp=2)"
        )
    world = num_processes or cfg.parallel.pp * cfg.parallel.tp
    device = torch.device(device_type(cfg))
    facts = describe(cfg, world, device)
    assert facts.pipeline is not None
    hf, spec, pipeline = facts.hf, facts.spec, facts.pipeline
    torch.set_num_threads(threads_each(world))
    in_16_bits = cfg.training.precision != "float32" or cfg.model.dtype != "float32"
    peak = peak_flops(device, torch.bfloat16 if in_16_bits else torch.float32)
    units, source = costs_of(
        cfg, hf, spec, None, world, facts.sizes["dp_shard"], peak.flops_per_second
    )
    if not source.is_measured:
        source = replace(source, rate=f"{peak.flops_per_second / 1e12:.3g} TFLOP/s ({peak.source})")
    chosen = choose_split(cfg, units, pipeline.num_microbatches)

    def other(name: Any) -> Split:
        parallel = replace(cfg.parallel, split=name, memory_limit_gib=None)
        return choose_split(replace(cfg, parallel=parallel), units, pipeline.num_microbatches)

    others = {name: other(name) for name in ("uniform", "parameters") if name != cfg.parallel.split}
    return Plan(cfg, spec, pipeline, units, source, chosen, others)


def stages_table(planned: Plan) -> Table:
    """A row for each stage, bottom up; the memory of a rank stands in the row of its lowest stage."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=planned.spec.family, title_justify="left")
    for column in ("stage", "rank", "layers", "kinds"):
        table.add_column(column, no_wrap=True)
    for column in ("forward", "backward", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    split = planned.chosen
    for chunk, cost in enumerate(split.chunks):
        rank = planned.pipeline.rank_of(chunk)
        lowest = chunk == planned.pipeline.chunks_of(rank)[0]
        table.add_row(
            str(chunk),
            str(rank),
            "\n".join(split.contents(chunk)),
            _kinds(planned, chunk),
            _seconds(cost.forward_seconds + cost.stage_seconds),
            _seconds(cost.backward_seconds),
            _bytes(split.memory_bytes[rank]) if lowest else "",
        )
    return table


def summary(planned: Plan) -> Iterator[str]:
    """Lines on the step: what it takes, beside other splits and what none can beat."""
    parallel, chosen = planned.cfg.parallel, planned.chosen
    seconds = chosen.timeline.seconds
    yield (
        f"{parallel.schedule}, {planned.pipeline.num_microbatches} micro-batches, split {planned.name}: step "
        f"{_seconds(seconds)}, bubble {chosen.timeline.bubble():.1%}"
    )
    for name, other in planned.others.items():
        most, limit = max(other.memory_bytes), parallel.memory_limit_gib
        told = (
            f" (over the limit: {_bytes(most)} on a rank)" if limit and most > limit * 2**30 else ""
        )
        yield f"{name}: {_seconds(other.timeline.seconds)}, {_ratio(other.timeline.seconds / seconds)}{told}"
    bound = bound_seconds(planned.units, planned.pipeline)
    yield f"no split can beat {_seconds(bound)} ({bound / seconds:.0%} of this step)"
    yield f"costs: {planned.source}"
    if not planned.source.is_measured:
        yield "shares are worth more than seconds here; shardwise split --profile measures this machine"
    yield from planned.notes


def write_files(planned: Plan, folder: Path) -> None:
    """Write FILES: the plan as data, the timelines drawn on one time axis, and as a trace."""
    splits = {**planned.others, planned.name: planned.chosen}
    content = {
        "schedule": planned.cfg.parallel.schedule,
        "num_ranks": planned.pipeline.num_ranks,
        "num_virtual": planned.pipeline.num_virtual,
        "num_microbatches": planned.pipeline.num_microbatches,
        "costs": str(planned.source),
        "notes": planned.notes,
        "chosen": planned.name,
        "bound_seconds": bound_seconds(planned.units, planned.pipeline),
        "splits": {name: _described(split) for name, split in splits.items()},
        "units": [asdict(unit) for unit in planned.units],
    }
    texts = (dumps(content), gantt_file(planned.drawn), perfetto_trace(planned.drawn))
    for name, text in zip(FILES, texts, strict=True):
        (folder / name).write_text(text + "\n", encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Make the folder for FILES, if need be; UserError where no file can be written or drawn."""
    require_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"--out {folder}: cannot write there ({error.strerror}); give another folder"
        ) from None


def _described(split: Split) -> dict[str, Any]:
    return {
        "boundaries": split.boundaries,
        "layers": split.layers,
        "step_seconds": split.timeline.seconds,
        "bubble": split.timeline.bubble(),
        "memory_bytes": split.memory_bytes,
        "chunks": [asdict(chunk) for chunk in split.chunks],
    }


def _kinds(planned: Plan, chunk: int) -> str:
    low, high = planned.chosen.boundaries[chunk : chunk + 2]
    own = planned.spec.layers[max(low - 1, 0) : high - 1]
    return (
        "\n".join(f"{n} x {kind}" for kind, n in Counter(layer.kind for layer in own).items())
        or "-"
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f} times as long" if ratio >= 1 else f"{1 / ratio:.3f} times as fast"


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    unit, name = (1.0, "s") if seconds >= 1.0 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")
    return f"{seconds / unit:.3g} {name}"
