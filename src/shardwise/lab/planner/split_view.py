"""Text and files of `shardwise split`: a run's pipeline by stage, beside other splits."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from shardwise.assembly.costs import choose_split, costs_of, limits_bytes
from shardwise.assembly.describe import describe
from shardwise.base.layouts import fewest_ranks
from shardwise.base.process.world import device_type, threads_each
from shardwise.base.records.record import dumps
from shardwise.base.safety import write_output
from shardwise.base.schedule.costs import Cost, CostSource
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.split import Split, bound_seconds
from shardwise.base.schedule.timeline import Timeline
from shardwise.base.words import seconds as seconds_text
from shardwise.base.words import size as size_text
from shardwise.config import RunConfig, UserError
from shardwise.lab.drawing.gantt import gantt_file
from shardwise.lab.drawing.perfetto import perfetto_trace
from shardwise.lab.drawing.svg import require_matplotlib
from shardwise.lab.planner.recompute import within_budget
from shardwise.metrics.hardware import peak_flops
from shardwise.models.spec import ModelSpec

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
        """The name of the chosen split."""
        return self.cfg.parallel.split if isinstance(self.cfg.parallel.split, str) else "given"

    @property
    def splits(self) -> dict[str, Split]:
        """All splits, the chosen one last."""
        return {**self.others, self.name: self.chosen}

    @property
    def drawn(self) -> dict[str, Timeline]:
        """The timelines to draw, by title: the uniform split above the chosen one."""
        detail = ", of whole layers, before tp shards them" if self.cfg.parallel.tp > 1 else ""
        names = dict.fromkeys(("uniform", self.name))
        return {f"{name}{detail}": self.splits[name].timeline for name in names}

    @property
    def notes(self) -> list[str]:
        """Notes that a reader of the figures must know."""
        notes = []
        if self.cfg.parallel.tp > 1:
            notes.append(
                "seconds and memory are those of whole layers, before "
                f"{self.cfg.parallel.tp} tensor-parallel ranks shard them"
            )
        if self.cfg.parallel.ep > 1:
            notes.append(
                f"memory is that of a rank with 1/{self.cfg.parallel.ep} of each layer's experts; "
                "seconds are those of equally loaded experts, without sending tokens to them"
            )
        return notes


def plan(cfg: RunConfig, num_processes: int | None = None) -> Plan:
    """Cut a run's model as `shardwise train` would on so many processes.

    By default there are `fewest_ranks`. UserError as from training, and
    where there is no pipeline. Sets torch's threads of this process to those of a rank, for which
    costs are measured and looked up.
    """
    if cfg.parallel.pp == 1:
        raise UserError(
            "parallel.pp is 1, so there is nothing to split; set it to 2 or more (--parallel.pp=2)"
        )
    num_ranks = num_processes or fewest_ranks(cfg.parallel)
    device = torch.device(device_type(cfg))
    facts = describe(cfg, num_ranks, device)
    pipeline = facts.pipeline
    assert pipeline is not None
    torch.set_num_threads(threads_each(num_ranks))
    if cfg.training.budget_bytes is not None:
        cfg = within_budget(cfg, facts, device.type).applied(cfg)
    in_16_bits = cfg.training.precision != "float32" or cfg.model.dtype != "float32"
    peak = peak_flops(device, torch.bfloat16 if in_16_bits else torch.float32)
    rate = peak.flops_per_second
    units, source = costs_of(cfg, facts.hf, facts.spec, None, num_ranks, rate)
    if not source.is_measured:
        source = replace(source, rate=f"{rate / 1e12:.3g} TFLOP/s ({peak.source})")

    def split_as(name: Any) -> Split:
        parallel = replace(cfg.parallel, split=name, memory_limit_gib=None)
        return choose_split(replace(cfg, parallel=parallel), units, pipeline.num_microbatches)

    names = [name for name in ("uniform", "parameters") if name != cfg.parallel.split]
    return Plan(
        cfg=cfg,
        spec=facts.spec,
        pipeline=pipeline,
        units=units,
        source=source,
        chosen=choose_split(cfg, units, pipeline.num_microbatches),
        others={name: split_as(name) for name in names},
    )


def stages_table(planned: Plan) -> Table:
    """Return a table with a row for each stage, bottom up.

    The memory of a rank stands in the row of its lowest stage.
    """
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), title=planned.spec.family, title_justify="left")
    for column in ("stage", "rank", "layers", "kinds"):
        table.add_column(column, no_wrap=True)
    for column in ("forward", "backward", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    split = planned.chosen
    for chunk, cost in enumerate(split.chunks):
        rank, speed = planned.pipeline.rank_of(chunk), planned.pipeline.speed_of(chunk)
        is_lowest = chunk == planned.pipeline.chunks_of(rank)[0]
        table.add_row(
            str(chunk),
            str(rank),
            "\n".join(split.contents(chunk)),
            _kinds(planned, chunk),
            seconds_text((cost.forward_seconds + cost.stage_seconds) / speed),
            seconds_text(cost.backward_seconds / speed),
            size_text(split.memory_bytes[rank]) if is_lowest else "",
        )
    return table


def summary(planned: Plan) -> Iterator[str]:
    """Yield lines on the step: what it takes, beside other splits and what none can beat."""
    parallel, chosen = planned.cfg.parallel, planned.chosen
    seconds = chosen.timeline.seconds
    yield (
        f"{parallel.schedule}, {planned.pipeline.num_microbatches} micro-batches, split "
        f"{planned.name}: step {seconds_text(seconds)}, bubble {chosen.timeline.bubble():.1%}"
    )
    for name, other in planned.others.items():
        ratio = _ratio(other.timeline.seconds / seconds)
        line = f"{name}: {seconds_text(other.timeline.seconds)}, {ratio}"
        pairs = zip(other.memory_bytes, limits_bytes(parallel), strict=True)
        over = [num_bytes for num_bytes, limit in pairs if num_bytes > limit]
        if over:
            line += f" (over the limit: {size_text(max(over))} on a rank)"
        yield line
    bound = bound_seconds(planned.units, planned.pipeline)
    yield f"no split can beat {seconds_text(bound)} ({bound / seconds:.0%} of this step)"
    yield f"costs: {planned.source}"
    if not planned.source.is_measured:
        yield (
            "only ratios of these seconds are reliable; shardwise split --profile measures this "
            "machine"
        )
    yield from planned.notes


def write_files(planned: Plan, folder: Path) -> None:
    """Write FILES: the plan as data, the timelines drawn on one time axis, and as a trace."""
    content = {
        "schedule": planned.cfg.parallel.schedule,
        "num_ranks": planned.pipeline.num_ranks,
        "num_virtual": planned.pipeline.num_virtual,
        "num_microbatches": planned.pipeline.num_microbatches,
        "costs": str(planned.source),
        "notes": planned.notes,
        "chosen": planned.name,
        "bound_seconds": bound_seconds(planned.units, planned.pipeline),
        "splits": {name: _as_data(split) for name, split in planned.splits.items()},
        "units": [asdict(unit) for unit in planned.units],
    }
    texts = (dumps(content), gantt_file(planned.drawn), perfetto_trace(planned.drawn))
    for name, text in zip(FILES, texts, strict=True):
        write_output(folder / name, text + "\n")


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


def _as_data(split: Split) -> dict[str, Any]:
    return {
        "boundaries": split.boundaries,
        "layers": split.layers,
        "step_seconds": split.timeline.seconds,
        "bubble": split.timeline.bubble(),
        "memory_bytes": split.memory_bytes,
        "chunks": [asdict(chunk) for chunk in split.chunks],
    }


def _kinds(planned: Plan, chunk: int) -> str:
    """Return how many layers of each kind a chunk has, a kind per line."""
    low, high = planned.chosen.boundaries[chunk : chunk + 2]
    layers = planned.spec.layers[max(low - 1, 0) : high - 1]
    numbers = Counter(
        f"{layer.kind} + {layer.feed_forward}" if layer.experts else layer.kind for layer in layers
    )
    return "\n".join(f"{number} x {kind}" for kind, number in numbers.items()) or "-"


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f} times as long" if ratio >= 1 else f"{1 / ratio:.3f} times as fast"
