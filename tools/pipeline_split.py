"""What a split by measured cost gains over equal numbers of layers: measured, predicted, and possible at most.

    python tools/pipeline_split.py [--sweep configs/pipeline-split.yaml] [--runs runs/pipeline-split]
                                   [--out results/pipeline-split]

For each case of the sweep: the costs of its model's units are measured (`shardwise split --profile`), and what two busy
processes lose against one; `shardwise bench` runs both splits by turns; then one JSON file and one chart are written.

Of each round the ratio of tokens per second, balanced over uniform. The interval goes from the smallest to the largest:
with n rounds it holds the true median with a probability of 1 - 2^(1-n). Nothing is reported of a case whose losses
differ.

The bound is what no split could beat: the uniform split's predicted step over `bound_seconds`, in which both ranks are
busy all the time (`physical`), and over the best of all splits, whose pipeline has to fill and drain (`simulated`).

Both assume that a rank is as fast whether the other one works or waits. On a machine whose processes share caches and
memory it is not: the costs are those of two busy processes, but under the uniform split the slower rank often works
while the other one waits, and is `slowdown` times faster then. So the uniform step is shorter than predicted, the
balanced one hardly so, and less can be gained. The correction is exact for two ranks and messages that take no time:
on a clock that runs `slowdown` times faster while one rank alone works, every action takes what it was said to cost, so
on that clock the step is the simulated one, with the same waits. `corrected_seconds` turns it back.
"""

from __future__ import annotations

import argparse
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
from shardwise.benchmark.runner import bench
from shardwise.benchmark.sweep import Sweep, read_sweep
from shardwise.config import RunConfig
from shardwise.drawing.gantt import gantt_file
from shardwise.drawing.svg import PALETTE, colour, drawing, svg_of
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
SPLITS = ("uniform", "balanced")
WINDOW_SECONDS, WINDOWS = 0.4, 9
TRIES, CALM = 3, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", type=Path, default=ROOT / "configs" / "pipeline-split.yaml")
    parser.add_argument("--runs", type=Path, default=Path("runs/pipeline-split"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "pipeline-split")
    options = parser.parse_args()
    sweep, records = measured_bench(options.sweep, options.runs)
    (options.out / "figures").mkdir(parents=True, exist_ok=True)
    found = {}
    plans = [p for p in sweep.record.cells if not p.control]
    for case in dict.fromkeys(p.values["case"] for p in plans):
        cells = {
            p.values["parallel.split"]: records[p.id] for p in plans if p.values["case"] == case
        }
        check(sweep, records, list(cells.values()))
        found[case] = result(case, sweep, options.runs, cells)
        (options.out / f"{case}.json").write_text(
            json.dumps(found[case], indent=1) + "\n", encoding="utf-8"
        )
        timelines = {
            f"{name}: {' + '.join(map(str, pipeline['layers']))} layers": unpack(pipeline["events"])
            for name, pipeline in ((name, cells[name].pipeline) for name in SPLITS)
            if pipeline is not None
        }
        (options.out / "figures" / f"{case}.svg").write_text(
            gantt_file(timelines) + "\n", encoding="utf-8"
        )
        told = {
            key: found[case][key]
            for key in ("ratio", "bound", "slowdown", "corrected_bound", "share_reached")
        }
        print(case, json.dumps(told), flush=True)
    (options.out / "figures" / "bounds.svg").write_text(bars(found), encoding="utf-8")


# ----------------------------------------------------------------------------------------------- measurements


def measured_bench(path: Path, runs: Path) -> tuple[Sweep, dict[str, CellRecord]]:
    """Measure the costs that the cells of a sweep need, anew, then run the sweep; its cells' records by id."""
    if torch.get_num_threads() != 1:
        sys.exit(
            "set OMP_NUM_THREADS=1: two processes of one thread each are what two cores can time"
        )
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
    records = {record.cell["id"]: record for record in bench(path, runs)}
    return sweep, records


def measure(cfg: RunConfig, cache: Path) -> None:
    """Measure a profile into the cache, again while something disturbs it; the fastest is kept, as load only adds."""
    found: list[tuple[float, str, Path]] = []
    before = set(cache.rglob("*.json"))
    for _ in range(TRIES):
        assert profile.measure(cfg, cfg.parallel.pp, start_processes) == 0, "the profile failed"
        (path,) = set(cache.rglob("*.json")) - before
        text = path.read_text(encoding="utf-8")
        told = json.loads(text)
        total = sum(
            unit["forward_seconds"] + unit["backward_seconds"] for unit in told["units"].values()
        )
        found.append((total, text, path))
        path.unlink()
        if told["spread"] < CALM and told["slowdown"] < 1 + 2 * CALM:
            break
    _, text, path = min(found)
    path.write_text(text, encoding="utf-8")


def check(sweep: Sweep, records: dict[str, CellRecord], cells: Sequence[CellRecord]) -> None:
    """End where a cell did not run, or its losses are not those of its reference: no figures on a wrong result."""
    found = verdicts(sweep.record, records)
    for record in cells:
        name = record.cell["id"]
        if record.status != "ok" or found[name].state != "ok":
            sys.exit(
                f"{name}: {record.reason or found[name].reason or 'nothing to compare its losses with'}"
            )


def stage_slowdown(cfg: RunConfig) -> list[float]:
    """How much longer each rank's own stage takes while the other's runs too, against alone: one figure a window.

    Forwards and backwards of the stages as they are in the run, no messages between them; ranks take turns alone and
    together, and every turn lasts WINDOW_SECONDS.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        told = Path(folder, "slowdown.json")
        here = replace(cfg, training=replace(cfg.training, output_dir=folder))
        assert start_processes(here, cfg.parallel.pp, partial(_take_turns, told)) == 0, (
            "the stages failed"
        )
        return json.loads(told.read_text(encoding="utf-8"))


def _take_turns(told: Path, cfg: RunConfig, mesh: Mesh) -> None:
    job = build(cfg, mesh)
    (part,) = job.pm.parts
    assert isinstance(part, Stage)
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    shape = (cfg.training.micro_batch_size, cfg.data.sequence_length)
    generator = torch.Generator().manual_seed(cfg.training.seed)
    tokens = torch.randint(part.spec.vocab_size, shape, generator=generator)
    hidden = torch.randn(*shape, part.spec.hidden_size, generator=generator)
    part.train()
    part.microbatches = [
        Batch(tokens, tokens, torch.zeros_like(tokens), tuple(range(shape[0])), step=1)
    ]
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

    ratios = []
    for window in range(WINDOWS + 1):
        turns = [[r] for r in ranks] + [list(ranks)]
        taken = [seconds_each(turn) for turn in turns]
        # A number, from every rank to all.
        ratio = statistics.mean(of_every_rank(taken[-1] / taken[rank]))
        ratios += [ratio] if window else []  # the first one warms up
    if rank == 0:
        told.write_text(json.dumps(ratios), encoding="utf-8")
    dist.barrier()


# ----------------------------------------------------------------------------------------------- arithmetic


def alone_seconds(timeline: Timeline) -> float:
    """For how long just one rank works."""
    edges = sorted(
        edge for event in timeline.events for edge in ((event.start, 1), (event.end, -1))
    )
    busy, alone = 0, 0.0
    for (moment, change), (after, _) in pairwise(edges):
        busy += change
        alone += (after - moment) * (busy == 1)
    return alone


def corrected_seconds(timeline: Timeline, slowdown: float) -> float:
    """The step of a timeline whose costs are those of two busy ranks, if a rank alone is `slowdown` times faster."""
    assert timeline.num_ranks == 2, "of more ranks it is not known how fast some of them are"
    return timeline.seconds - alone_seconds(timeline) * (1 - 1 / slowdown)


def middle(values: Sequence[float]) -> dict[str, Any]:
    """Values, their median, and from where to where they go."""
    return {
        "median": round(statistics.median(values), 4),
        "interval": [round(min(values), 4), round(max(values), 4)],
        "rounds": [round(value, 4) for value in values],
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Round by round, with how surely the interval holds the median."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return middle(each) | {"interval_holds_median": round(1 - 2.0 ** (1 - len(each)), 4)}


# ----------------------------------------------------------------------------------------------- results


def result(case: str, sweep: Sweep, runs: Path, records: dict[str, CellRecord]) -> dict[str, Any]:
    """What one case came to: see the head of this file."""
    cfg = parse_config(records["balanced"].config, case)
    cut = plan(cfg)
    units, pipeline = cut.units, cut.pipeline
    slowdown = middle(stage_slowdown(cfg))
    predicted = {"uniform": cut.others["uniform"].timeline, "balanced": cut.chosen.timeline}
    bound = bound_seconds(units, pipeline)
    corrected = {
        name: corrected_seconds(timeline, slowdown["median"])
        for name, timeline in predicted.items()
    }
    rounds = {name: read_rounds(runs / record.cell["id"]) for name, record in records.items()}
    speeds = {name: [r.tokens_per_second or 0.0 for r in each] for name, each in rounds.items()}
    ratio = ratios(speeds["balanced"], speeds["uniform"])
    limits = {
        "physical": round(corrected["uniform"] / bound, 4),
        "simulated": round(corrected["uniform"] / corrected["balanced"], 4),
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
        "bound": {
            "physical": round(predicted["uniform"].seconds / bound, 4),
            "simulated": round(predicted["uniform"].seconds / predicted["balanced"].seconds, 4),
        },
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


def read_rounds(folder: Path) -> list[RunRecord]:
    """What each round of a cell left."""
    return [RunRecord.read(path) for path in sorted(folder.glob("round-*/record.json"))]


def of_split(
    record: CellRecord, rounds: Sequence[RunRecord], predicted: Timeline, corrected: float
) -> dict[str, Any]:
    """One split: where it cuts, how fast it was, and how far the simulator was off."""
    steps = [r.pipeline["measured"] for r in rounds if r.pipeline]
    seconds = [step["seconds"] for step in steps]
    assert record.pipeline is not None
    return {
        "layers": record.pipeline["layers"],
        "boundaries": record.pipeline["boundaries"],
        "tokens_per_second": middle([r.tokens_per_second or 0.0 for r in rounds]),
        "pipeline_seconds": middle(seconds),
        "predicted_seconds": round(predicted.seconds, 4),
        "corrected_seconds": round(corrected, 4),
        "error_percent": middle([100 * (predicted.seconds / s - 1) for s in seconds]),
        "corrected_error_percent": middle([100 * (corrected / s - 1) for s in seconds]),
        "error_percent_of_own_costs": middle(
            [100 * (own_seconds(r.pipeline) - 1) for r in rounds if r.pipeline]
        ),
        "bubble": middle([step["bubble"] for step in steps]),
        "predicted_bubble": round(predicted.bubble(), 4),
        "started": [entry["started"] for entry in record.rounds],
    }


def own_seconds(step: dict[str, Any]) -> float:
    """The simulated over the measured step, if every action took as long as such actions did on average in that step.

    So it shows what the simulator leaves out, where `error_percent` also has what the machine did between the profile
    and the step.
    """
    measured = unpack(step["events"])
    lasted: dict[tuple[int, str], list[float]] = {}
    for event in measured.events:
        lasted.setdefault((event.chunk, event.kind), []).append(event.end - event.start)
    mean = {action: statistics.mean(seconds) for action, seconds in lasted.items()}
    pipeline = Pipeline(step["schedule"], measured.num_ranks, len(lasted[0, "F"]))
    chunks = [
        Cost(f"{c}", mean[c, "F"], mean.get((c, "B"), 0.0), 0.0, 0, 0, backward=(c, "B") in mean)
        for c in range(pipeline.num_chunks)
    ]
    return simulate(pipeline, chunks).seconds / measured.seconds


def bars(found: dict[str, dict[str, Any]]) -> str:
    """An SVG file: of each case the bound, the corrected bound, and what was measured with its interval."""
    from matplotlib.figure import Figure

    shown = {"bound": "muted", "corrected bound": "c1", "measured": "c2"}
    assert set(shown.values()) <= PALETTE.keys()
    with drawing():
        figure = Figure(figsize=(6.4, 0.9 * len(found) + 1.1), layout="constrained")
        axes = figure.subplots()
        for place, values in enumerate(found.values()):
            low, high = values["ratio"]["interval"]
            lengths = (
                values["bound"]["physical"],
                values["corrected_bound"]["physical"],
                values["ratio"]["median"],
            )
            for row, ((name, tint), length) in enumerate(zip(shown.items(), lengths, strict=True)):
                y = place + 0.26 * (row - 1)
                axes.barh(
                    y,
                    length - 1,
                    0.22,
                    left=1,
                    color=colour(tint),
                    label=name if place == 0 else None,
                )
                axes.text(
                    (max(length, high) if name == "measured" else length) + 0.01,
                    y,
                    f"{length:.2f}",
                    va="center",
                    size=8,
                )
            axes.plot([low, high], [place + 0.26] * 2, color=colour("ink"), linewidth=1.2)
        axes.set_yticks(range(len(found)), [f"case {case}" for case in found])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(
            1,
            max(max(v["bound"]["physical"], v["ratio"]["interval"][1]) for v in found.values())
            * 1.08,
        )
        axes.set_xlabel("times the tokens per second of equal numbers of layers")
        figure.legend(loc="outside upper left", ncols=3)
        return svg_of(figure, "bounds")


if __name__ == "__main__":
    main()
