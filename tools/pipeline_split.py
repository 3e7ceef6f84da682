"""What a split by measured cost gains over equal numbers of layers: measured, and possible at most.

    python -m tools.pipeline_split [--sweep configs/pipeline-split.yaml]
        [--runs runs/pipeline-split] [--out results/pipeline-split]

For each case of the sweep the costs of its model's units are measured (`shardwise split
--profile`), `shardwise bench` runs both splits by turns, and one JSON file and one chart are
written. A ratio is tokens per second of a round, balanced over uniform. Nothing is reported of a
case whose losses differ.

The bound is what no split could beat: the uniform split's predicted step over `bound_seconds`, in
which both ranks are busy all the time (`physical`), and over the best of all splits, whose pipeline
has to fill and drain (`simulated`).

With `--costs SWEEP ...` only the costs are measured that the timed pipelines of these sweeps need
and the cache ($SHARDWISE_CACHE) does not have.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tools.paired import command_line, ratios, spread, table, write_json

from shardwise.base.records.cell import CellRecord
from shardwise.base.records.record import RunRecord
from shardwise.base.safety import cache_folder
from shardwise.base.schedule.split import bound_seconds
from shardwise.base.schedule.timeline import Timeline, unpack
from shardwise.config import RunConfig
from shardwise.config.run_file import parse_config
from shardwise.lab.benchmark.runner import bench
from shardwise.lab.benchmark.sweep import Sweep, read_sweep
from shardwise.lab.drawing.gantt import NARROW, gantt_file
from shardwise.lab.planner import profile
from shardwise.lab.planner.split_view import plan
from shardwise.lab.report.verdict import verdicts
from shardwise.launch.local import start_processes

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "pipeline-split"
SPLITS = ("uniform", "balanced")
TRIES, CALM = 3, 0.1


def main() -> None:
    parser = command_line(__doc__, OUT)
    parser.add_argument("--sweep", type=Path, default=ROOT / "configs" / "pipeline-split.yaml")
    parser.add_argument("--runs", type=Path, default=Path("runs/pipeline-split"))
    parser.add_argument("--costs", type=Path, nargs="+", metavar="SWEEP")
    options = parser.parse_args()
    if options.costs:
        cache = cache_folder()
        for path in options.costs:
            measure_costs(read_sweep(path, options.runs), cache)
        return
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
        ratio, bound = result["ratio"], result["bound"]
        lines.append([case, *bound.values(), ratio["median"], *ratio["interval"]])
    head = ["case", "bound", "best split", "measured", "from", "to"]
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
    return gantt_file(timelines, NARROW)


def measured_bench(path: Path, runs: Path) -> tuple[Sweep, dict[str, CellRecord]]:
    """Measure the costs that the cells of a sweep need, run it, and return its records by cell."""
    profiles = runs.with_name(f"{runs.name}-profiles")
    for folder in (runs, profiles):
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["SHARDWISE_CACHE"] = str(profiles.absolute())
    sweep = read_sweep(path, runs)
    measure_costs(sweep, profiles)
    return sweep, {record.cell["id"]: record for record in bench(path, runs)}


def measure_costs(sweep: Sweep, cache: Path) -> None:
    """Measure what the timed pipelines of a sweep need and the cache does not have."""
    if torch.get_num_threads() != 1:
        sys.exit("set OMP_NUM_THREADS=1: two cores can time two processes of one thread each")
    for cell in sweep.cells:
        cfg = parse_config(cell.run, cell.plan.id)
        if cfg.parallel.pp > 1 and cell.plan.timed and not plan(cfg).source.is_measured:
            print(f"measuring the units of {cell.plan.id}", flush=True)
            measure(cfg, cache)


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
        if content["spread"] < CALM:
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


def result_of(
    case: str, sweep: Sweep, runs: Path, records: dict[str, CellRecord]
) -> dict[str, Any]:
    """Return the result of a case; the head of this file says what it is."""
    cfg = parse_config(records["balanced"].config, case)
    cut = plan(cfg)
    units, pipeline = cut.units, cut.pipeline
    predicted = {"uniform": cut.others["uniform"].timeline, "balanced": cut.chosen.timeline}
    rounds = {name: read_rounds(runs / record.cell["id"]) for name, record in records.items()}
    ratio = ratios(speeds(rounds["balanced"]), speeds(rounds["uniform"]))
    least_seconds = {
        "physical": bound_seconds(units, pipeline),
        "simulated": predicted["balanced"].seconds,
    }
    bound = {
        name: round(predicted["uniform"].seconds / seconds, 4)
        for name, seconds in least_seconds.items()
    }
    layers = [unit.seconds for unit in units[1:-1]]
    return {
        "case": case,
        "what": sweep.record.equal[records["balanced"].cell["group"]],
        "environment": records["balanced"].environment,
        "schedule": pipeline.schedule,
        "ranks": pipeline.num_ranks,
        "micro_batches": pipeline.num_microbatches,
        "ratio": ratio,
        "bound": bound,
        "share_reached": {name: round(ratio["median"] / most, 4) for name, most in bound.items()},
        "head_in_layers": round(units[-1].seconds / statistics.mean(layers), 2),
        "layers_slowest_over_fastest": round(max(layers) / min(layers), 2),
        "splits": {name: of_split(records[name], rounds[name], predicted[name]) for name in SPLITS},
        "costs": str(cut.source),
        "unit_seconds": {
            unit.name: [round(unit.forward_seconds, 6), round(unit.backward_seconds, 6)]
            for unit in units
        },
    }


def read_rounds(folder: Path) -> list[RunRecord]:
    """Return the records of a cell's rounds."""
    return [RunRecord.read(path) for path in sorted(folder.glob("round-*/record.json"))]


def speeds(rounds: Sequence[RunRecord]) -> list[float]:
    """Return the tokens per second of each round."""
    return [record.tokens_per_second or 0.0 for record in rounds]


def of_split(
    record: CellRecord, rounds: Sequence[RunRecord], predicted: Timeline
) -> dict[str, Any]:
    """Return where a split cuts, how fast it was, and how far the simulator was off."""
    steps = [r.pipeline["measured"] for r in rounds if r.pipeline]
    seconds = [step["seconds"] for step in steps]
    assert record.pipeline is not None
    return {
        "layers": record.pipeline["layers"],
        "boundaries": record.pipeline["boundaries"],
        "tokens_per_second": spread(speeds(rounds)),
        "pipeline_seconds": spread(seconds),
        "predicted_seconds": round(predicted.seconds, 4),
        "error_percent": spread([100 * (predicted.seconds / s - 1) for s in seconds]),
        "bubble": spread([step["bubble"] for step in steps]),
        "predicted_bubble": round(predicted.bubble(), 4),
        "started": [entry["started"] for entry in record.rounds],
    }


if __name__ == "__main__":
    main()
