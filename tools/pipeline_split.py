"""What a split by measured cost gains over equal numbers of layers: measured, and possible at most.

    python tools/pipeline_split.py [--sweep configs/pipeline-split.yaml]
        [--runs runs/pipeline-split] [--out results/pipeline-split]

For each case of the sweep the costs of its model's units are measured (`shardwise split
--profile`), `shardwise bench` runs both splits by turns, and one JSON file and one chart are
written. A ratio is tokens per second of a round, balanced over uniform. Nothing is reported of a
case whose losses differ.

The bound is what no split could beat: the uniform split's predicted step over `bound_seconds`, in
which both ranks are busy all the time (`physical`), and over the best of all splits, whose pipeline
has to fill and drain (`simulated`).

Both assume that a rank is as fast whether the other one works or waits. On a machine whose
processes share caches and memory it is not: the costs are those of two busy processes, but under
the uniform split the slower rank often works while the other one waits, and is `slowdown` times
faster then. So the uniform step is shorter than predicted, the balanced one hardly so, and less can
be gained. The correction is exact for two ranks and messages that take no time: on a clock that
runs `slowdown` times faster while one rank alone works, every action takes its predicted time, so
on that clock the step is the simulated one, with the same waits. `corrected_seconds` turns it back.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.assembly.build import build
from shardwise.benchmark.paired import command_line, ratios, spread, table, write_json
from shardwise.benchmark.runner import bench
from shardwise.benchmark.sweep import Sweep, read_sweep
from shardwise.config import RunConfig
from shardwise.drawing.gantt import gantt_file
from shardwise.interfaces import Batch, Mesh
from shardwise.launch.local import start_processes
from shardwise.models.stage import Stage
from shardwise.parallel.reduce import of_every_rank
from shardwise.planner import profile
from shardwise.planner.split_view import plan
from shardwise.records.cell import CellRecord
from shardwise.records.record import RunRecord
from shardwise.report.verdict import verdicts
from shardwise.run_file import parse_config
from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.simulate import simulate
from shardwise.schedule.split import bound_seconds
from shardwise.schedule.timeline import Timeline, unpack

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "pipeline-split"
SPLITS = ("uniform", "balanced")
WINDOW_SECONDS, WINDOWS = 0.4, 9
TRIES, CALM = 3, 0.1


def main() -> None:
    parser = command_line(__doc__, OUT)
    parser.add_argument("--sweep", type=Path, default=ROOT / "configs" / "pipeline-split.yaml")
    parser.add_argument("--runs", type=Path, default=Path("runs/pipeline-split"))
    options = parser.parse_args()
    sweep, records = measured_bench(options.sweep, options.runs)
    figures = options.out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    timed = [cell for cell in sweep.record.cells if not cell.control]
    lines = []
    for case in dict.fromkeys(cell.values["case"] for cell in timed):
        of_case = [cell for cell in timed if cell.values["case"] == case]
        cells = {cell.values["parallel.split"]: records[cell.id] for cell in of_case}
        check(sweep, records, list(cells.values()))
        result = result_of(case, sweep, options.runs, cells)
        write_json(options.out / f"{case}.json", result)
        (figures / f"{case}.svg").write_text(chart(cells) + "\n", encoding="utf-8")
        ratio, bound = result["ratio"], result["bound"]["physical"]
        corrected = result["corrected_bound"]["physical"]
        lines.append([case, bound, corrected, ratio["median"], *ratio["interval"]])
    head = ["case", "bound", "corrected bound", "measured", "from", "to"]
    (options.out / "bounds.md").write_text(table(head, lines) + "\n", encoding="utf-8")
    print(table(head, lines))


def chart(cells: dict[str, CellRecord]) -> str:
    """Return an SVG file with the measured step of each split."""
    timelines = {}
    for name in SPLITS:
        pipeline = cells[name].pipeline
        assert pipeline is not None
        layers = " + ".join(map(str, pipeline["layers"]))
        timelines[f"{name}: {layers} layers"] = unpack(pipeline["events"])
    return gantt_file(timelines)


# Measurements


def measured_bench(path: Path, runs: Path) -> tuple[Sweep, dict[str, CellRecord]]:
    """Measure the costs that the cells of a sweep need, run it, and return its records by cell."""
    if torch.get_num_threads() != 1:
        sys.exit("set OMP_NUM_THREADS=1: two cores can time two processes of one thread each")
    profiles = runs.with_name(f"{runs.name}-profiles")
    for folder in (runs, profiles):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["SHARDWISE_CACHE"] = str(profiles.absolute())
    sweep = read_sweep(path, runs)
    for cell in sweep.cells:
        cfg = parse_config(cell.run, str(path))
        if not plan(cfg).source.is_measured:
            print(f"measuring the units of {cell.plan.id}", flush=True)
            measure(cfg, profiles)
    return sweep, {record.cell["id"]: record for record in bench(path, runs)}


def measure(cfg: RunConfig, cache: Path) -> None:
    """Measure a profile into the cache, again while it is disturbed; keep the fastest one."""
    profiles: list[tuple[float, str, Path]] = []
    before = set(cache.rglob("*.json"))
    for _ in range(TRIES):
        assert profile.measure(cfg, cfg.parallel.pp, start_processes) == 0, "the profile failed"
        (path,) = set(cache.rglob("*.json")) - before
        text = path.read_text(encoding="utf-8")
        path.unlink()
        content = json.loads(text)
        units = content["units"].values()
        seconds = sum(unit["forward_seconds"] + unit["backward_seconds"] for unit in units)
        profiles.append((seconds, text, path))
        if content["spread"] < CALM and content["slowdown"] < 1 + 2 * CALM:
            break
    _, text, path = min(profiles)
    path.write_text(text, encoding="utf-8")


def check(sweep: Sweep, records: dict[str, CellRecord], cells: Sequence[CellRecord]) -> None:
    """Exit where a cell did not run, or where its losses are not those of its reference."""
    states = verdicts(sweep.record, records)
    for record in cells:
        name = record.cell["id"]
        if record.status != "ok" or states[name].state != "ok":
            reason = record.reason or states[name].reason or "its losses have no reference"
            sys.exit(f"{name}: {reason}")


def stage_slowdown(cfg: RunConfig) -> list[float]:
    """Return how much longer each rank's stage takes while the other's runs too, for each window.

    Forwards and backwards of the stages as they are in the run, without messages between them.
    Ranks take turns alone and together, and every turn lasts WINDOW_SECONDS.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        file = Path(folder, "slowdown.json")
        cfg = replace(cfg, training=replace(cfg.training, output_dir=folder))
        code = start_processes(cfg, cfg.parallel.pp, partial(_measure_slowdown, file))
        assert code == 0, "the stages failed"
        return json.loads(file.read_text(encoding="utf-8"))


def _measure_slowdown(file: Path, cfg: RunConfig, mesh: Mesh) -> None:
    job = build(cfg, mesh)
    (part,) = job.pm.parts
    assert isinstance(part, Stage)
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    shape = (cfg.training.micro_batch_size, cfg.data.sequence_length)
    generator = torch.Generator().manual_seed(cfg.training.seed)
    tokens = torch.randint(part.spec.vocab_size, shape, generator=generator)
    slots = tuple(range(shape[0]))
    hidden = torch.randn(*shape, part.spec.hidden_size, generator=generator)
    part.train()
    part.microbatches = [Batch(tokens, tokens, torch.zeros_like(tokens), slots, step=1)]
    assert job.cut is not None
    below = any(unit.trainable for unit in job.cut.units[: job.cut.split.boundaries[rank]])

    def microbatch() -> None:
        number = torch.zeros(1, dtype=torch.int64)
        carried = number if part.spec.first else hidden.clone().requires_grad_(below)
        output = part(carried, number)
        if output.requires_grad:
            output.backward(None if part.spec.last else hidden)

    def seconds_each(turn: Sequence[int]) -> float:
        dist.barrier()
        start, number = time.perf_counter(), 0
        while rank in turn and time.perf_counter() - start < WINDOW_SECONDS:
            microbatch()
            number += 1
        return (time.perf_counter() - start) / max(number, 1)

    slowdowns = []
    for window in range(WINDOWS + 1):
        turns = [[r] for r in ranks] + [list(ranks)]
        taken = [seconds_each(turn) for turn in turns]
        # 8 bytes, from every rank to all.
        slowdown = statistics.mean(of_every_rank(taken[-1] / taken[rank]))
        if window > 0:  # the first one warms up
            slowdowns.append(slowdown)
    if rank == 0:
        file.write_text(json.dumps(slowdowns), encoding="utf-8")
    dist.barrier()


# Arithmetic


def alone_seconds(timeline: Timeline) -> float:
    """Return for how long just one rank works."""
    starts = [(event.start, 1) for event in timeline.events]
    edges = sorted(starts + [(event.end, -1) for event in timeline.events])
    busy, alone = 0, 0.0
    for (moment, change), (after, _) in pairwise(edges):
        busy += change
        if busy == 1:
            alone += after - moment
    return alone


def corrected_seconds(timeline: Timeline, slowdown: float) -> float:
    """Return the seconds of a step if a rank that works alone is `slowdown` times faster.

    The costs of the timeline are those of two busy ranks.
    """
    assert timeline.num_ranks == 2, "how fast some of more ranks are is not known"
    return timeline.seconds - alone_seconds(timeline) * (1 - 1 / slowdown)


# Results


def result_of(
    case: str, sweep: Sweep, runs: Path, records: dict[str, CellRecord]
) -> dict[str, Any]:
    """Return the result of a case; the head of this file says what it is."""
    cfg = parse_config(records["balanced"].config, case)
    cut = plan(cfg)
    units, pipeline = cut.units, cut.pipeline
    slowdown = spread(stage_slowdown(cfg))
    predicted = {"uniform": cut.others["uniform"].timeline, "balanced": cut.chosen.timeline}
    corrected = {
        name: corrected_seconds(timeline, slowdown["median"])
        for name, timeline in predicted.items()
    }
    rounds = {name: read_rounds(runs / record.cell["id"]) for name, record in records.items()}
    ratio = ratios(speeds(rounds["balanced"]), speeds(rounds["uniform"]))
    seconds = bound_seconds(units, pipeline)
    limits = bounds(corrected["uniform"], seconds, corrected["balanced"])
    layers = [unit.seconds for unit in units[1:-1]]
    return {
        "case": case,
        "what": sweep.record.equal[records["balanced"].cell["group"]],
        "environment": records["balanced"].environment,
        "schedule": pipeline.schedule,
        "ranks": pipeline.num_ranks,
        "micro_batches": pipeline.num_microbatches,
        "ratio": ratio,
        "bound": bounds(predicted["uniform"].seconds, seconds, predicted["balanced"].seconds),
        "slowdown": slowdown,
        "corrected_bound": limits,
        "share_reached": {
            name: round(ratio["median"] / limit, 4) for name, limit in limits.items()
        },
        "head_in_layers": round(units[-1].seconds / statistics.mean(layers), 2),
        "layers_slowest_over_fastest": round(max(layers) / min(layers), 2),
        "splits": {
            name: of_split(records[name], rounds[name], predicted[name], corrected[name])
            for name in SPLITS
        },
        "costs": str(cut.source),
        "unit_seconds": {
            unit.name: [round(unit.forward_seconds, 6), round(unit.backward_seconds, 6)]
            for unit in units
        },
    }


def bounds(uniform: float, least: float, balanced: float) -> dict[str, float]:
    """Return how much faster than the uniform split no pipeline is, and the best split is."""
    return {"physical": round(uniform / least, 4), "simulated": round(uniform / balanced, 4)}


def read_rounds(folder: Path) -> list[RunRecord]:
    """Return the records of a cell's rounds."""
    return [RunRecord.read(path) for path in sorted(folder.glob("round-*/record.json"))]


def speeds(rounds: Sequence[RunRecord]) -> list[float]:
    """Return the tokens per second of each round."""
    return [record.tokens_per_second or 0.0 for record in rounds]


def of_split(
    record: CellRecord, rounds: Sequence[RunRecord], predicted: Timeline, corrected: float
) -> dict[str, Any]:
    """Return where a split cuts, how fast it was, and how far the simulator was off."""
    steps = [r.pipeline["measured"] for r in rounds if r.pipeline]
    seconds = [step["seconds"] for step in steps]
    own_costs = [100 * (own_seconds(r.pipeline) - 1) for r in rounds if r.pipeline]
    assert record.pipeline is not None
    return {
        "layers": record.pipeline["layers"],
        "boundaries": record.pipeline["boundaries"],
        "tokens_per_second": spread(speeds(rounds)),
        "pipeline_seconds": spread(seconds),
        "predicted_seconds": round(predicted.seconds, 4),
        "corrected_seconds": round(corrected, 4),
        "error_percent": spread([100 * (predicted.seconds / s - 1) for s in seconds]),
        "corrected_error_percent": spread([100 * (corrected / s - 1) for s in seconds]),
        "error_percent_of_own_costs": spread(own_costs),
        "bubble": spread([step["bubble"] for step in steps]),
        "predicted_bubble": round(predicted.bubble(), 4),
        "started": [entry["started"] for entry in record.rounds],
    }


def own_seconds(step: dict[str, Any]) -> float:
    """Return the simulated over the measured step, where costs are the means of that very step.

    So it shows what the simulator leaves out. `error_percent` also has what the machine did between
    the profile and the step.
    """
    measured = unpack(step["events"])
    lasted: dict[tuple[int, str], list[float]] = {}
    for event in measured.events:
        lasted.setdefault((event.chunk, event.kind), []).append(event.end - event.start)
    mean = {action: statistics.mean(seconds) for action, seconds in lasted.items()}
    pipeline = Pipeline(step["schedule"], measured.num_ranks, len(lasted[0, "F"]))
    chunks = [
        Cost(str(c), mean[c, "F"], mean.get((c, "B"), 0.0), 0.0, 0, 0, backward=(c, "B") in mean)
        for c in range(pipeline.num_chunks)
    ]
    return simulate(pipeline, chunks).seconds / measured.seconds


if __name__ == "__main__":
    main()
