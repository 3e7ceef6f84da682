"""How far the predicted step times are from measured ones, on a machine that was calibrated.

    python -m tools.plan_times [--rounds 2] [--runs runs/plan-times] [--out results/plan]
    python -m tools.plan_times --keep-measured

The machine is calibrated with two processes. Each round trains every case, then calibrates again. A
case's measured seconds are the median of its steps in a round, and the median over rounds. So are
its predicted seconds, which in a round are the mean of what the calibrations before and after it
give: a shared machine is not as fast in every quarter of an hour. `rounds` of a case has both. A
calibration has seen none of the models: its layers have other widths, depths, vocabularies and
rows. Nothing is fitted to these runs.

The cases are a grid, and for each model and way to train the layout that `search` finds with the
first calibration, among all that it knows. `choices` has by how much that one is slower than the
fastest on two processes. As the least of many noisy figures is too low, that one and those which
looked fastest are measured once more, in turns, and only these figures count.

The calibrations are kept in OUT/calibrations. With `--keep-measured` predictions alone are made
again from them, in a minute, on a machine with the same processor.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tools.paired import command_line, turns, write_json

from shardwise.assembly.describe import describe
from shardwise.base.words import counted
from shardwise.commands.library import LOOP
from shardwise.config import RunConfig
from shardwise.config.run_file import parse_config
from shardwise.lab.drawing.svg import colour, drawing, svg_file
from shardwise.lab.planner.calibration import default_path
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.measure_machine import calibrate
from shardwise.lab.planner.search import search
from shardwise.lab.planner.step_time import StepTime, time_of_step
from shardwise.launch.local import launch, start_processes
from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[1]
STEPS, WARM_UP = 5, 2
FINALISTS, FINAL_ROUNDS = 3, 10
"""How many runs of each model and way to train are compared with what the search found."""
GLOBAL_ROWS = 8
MICRO_BATCHES = (1, 4)
"""Rows."""
COMMON = {"num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 256}
MODELS = {
    "gated delta": (
        "demo-hybrid",
        {
            **COMMON,
            "intermediate_size": 896,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "head_dim": 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "mamba2": ("tiny-bamba", {**COMMON, "intermediate_size": 896, "mamba_d_head": 64}),
    "dense": ("tiny-qwen3", {**COMMON, "intermediate_size": 896, "head_dim": 64}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {"data": "ddp"}),
    "zero1": (2, {"data": "zero1"}),
    "fsdp2": (2, {"data": "fsdp2"}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "schedule": "1f1b"}),
    "cp": (2, {"cp": 2}),
}


class Case(NamedTuple):
    """A run that is measured, and what the tables call it."""

    model: str
    mode: str
    layout: str
    num_processes: int
    cfg: RunConfig

    @property
    def name(self) -> str:
        """Distinct, in words."""
        return f"{self.model}, {self.mode}, {self.layout}"


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "plan")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep-measured", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs/plan-times"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    options = parser.parse_args()
    if torch.get_num_threads() != 1:
        sys.exit("set OMP_NUM_THREADS=1: two cores can time two processes of one thread each")
    options.runs.mkdir(parents=True, exist_ok=True)
    os.environ["SHARDWISE_CACHE"] = str(options.runs.absolute() / "cache")
    calibrations = options.out / "calibrations"
    if not options.keep_measured:
        shutil.rmtree(calibrations, ignore_errors=True)
        calibrations.mkdir(parents=True)
        calibrate_into(calibrations / "0.json")
    take(calibrations / "0.json")
    models = options.models.split(",")
    cases = [*grid(options.runs, models, options.layouts.split(",")), *found(options.runs, models)]
    if options.keep_measured:
        content = json.loads((options.out / "times.json").read_text())
        facts = content["environment"]
        measured = {r["case"]: [of["measured"] for of in r["rounds"]] for r in content["rows"]}
        chosen = content["choices"]
        if new := [case.name for case in cases if case.name not in measured]:
            sys.exit(f"never measured: {'; '.join(new)}; leave --keep-measured out")
    else:
        facts = environment(torch.device("cpu"))
        measured = measure(cases, options.rounds, calibrations)
        chosen = choices(cases, measured)
    rows = [middle_of(rounds) for rounds in predict(cases, measured, calibrations)]
    errors = sorted(abs(row["error"]) for row in rows)
    summary = {"cases": len(rows), "median": statistics.median(errors), "worst": errors[-1]}
    summary["regret"] = max(choice["regret"] for choice in chosen)
    content = {"environment": facts, "error": summary, "choices": chosen, "rows": rows}
    write_json(options.out / "times.json", content)
    (options.out / "times.svg").write_text(figure_of(cases, rows))
    print(json.dumps(summary))


def calibrate_into(path: Path) -> None:
    """Measure this machine and keep the figures."""
    assert calibrate(2, default_path(), start_processes) == 0, "the calibration failed"
    shutil.copy(default_path(), path)


def take(calibration: Path) -> None:
    """Let plans take this calibration of the machine."""
    default_path().parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(calibration, default_path())


def measure(cases: list[Case], num_rounds: int, calibrations: Path) -> dict[str, list[float]]:
    """Return the seconds of a step of each case in each round, calibrating after each."""
    measured: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(num_rounds):
        for case in cases[:: 1 if number % 2 == 0 else -1]:
            print(f"round {number}: {case.name}", flush=True)
            measured[case.name].append(seconds_of(case))
        calibrate_into(calibrations / f"{number + 1}.json")
    return measured


def seconds_of(case: Case) -> float:
    """Train a case and return the seconds of its median step."""
    folder = Path(case.cfg.training.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    assert launch(case.cfg, case.num_processes, LOOP) == 0, case.name
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    seconds = [step["seconds"] for step in steps if "seconds" in step]
    return round(statistics.median(seconds[WARM_UP:]), 5)


def predict(
    cases: list[Case], measured: dict[str, list[float]], calibrations: Path
) -> Iterator[list[dict[str, Any]]]:
    """Yield each case's measured and predicted seconds in each round."""
    predicted: dict[str, list[StepTime]] = defaultdict(list)
    for path in sorted(calibrations.iterdir()):
        take(path)
        cluster = cluster_of("here")
        for case in cases:
            run = describe(case.cfg, case.num_processes)
            predicted[case.name].append(time_of_step(case.cfg, run, cluster))
    for case in cases:
        rounds = zip(measured[case.name], pairwise(predicted[case.name]), strict=True)
        yield [row_of(case.name, seconds, around) for seconds, around in rounds]


def grid(runs: Path, models: list[str], layouts: list[str]) -> Iterator[Case]:
    """Yield every layout with and without recomputation and with each micro-batch."""
    for model, layout, mode, rows, recomputed in product(
        models, layouts, ("full", "lora"), MICRO_BATCHES, ("none", "full")
    ):
        nproc, parallel = LAYOUTS[layout]
        training = {"micro_batch_size": rows, "checkpointing": recomputed}
        words = [layout, *(["recomputed"] if recomputed == "full" else []), counted(rows, "row")]
        yield case_of(runs, model, mode, " ".join(words), nproc, parallel, training)


def found(runs: Path, models: list[str]) -> Iterator[Case]:
    """Yield what a search finds for each model and way to train."""
    for model, mode in product(models, ("full", "lora")):
        open_one = case_of(runs, model, mode, "found", 2, {}, {})
        best = search(Question(open_one.cfg, cluster_of("here"))).best
        layout = f"found: {best.title}, {best.details}"
        yield open_one._replace(layout=layout, cfg=best.applied)


def case_of(
    runs: Path,
    model: str,
    mode: str,
    layout: str,
    num_processes: int,
    parallel: dict[str, Any],
    training: dict[str, Any],
) -> Case:
    """Return the run of a small model that the calibration has not seen."""
    base, sizes = MODELS[model]
    folder = runs.absolute() / "models" / model.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((ROOT / "configs/models" / base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    name = f"{model}-{mode}-{layout}".replace(" ", "-")
    run = {
        "model": {
            "path": str(folder),
            "tokenizer": str(ROOT / "runs/corpus/tokenizer"),
            "init": "random",
        },
        "data": {
            "train": str(ROOT / "runs/corpus/python"),
            "sequence_length": 256,
            "packing": "concat",
        },
        "training": {
            "output_dir": str(runs / name),
            "steps": STEPS,
            "global_batch_size": GLOBAL_ROWS,
            "device": "cpu",
            **training,
        },
        "parallel": parallel,
        "measure": {"warmup_steps": WARM_UP, "memory": False},
        **({"lora": {"r": 8, "targets": "auto"}} if mode == "lora" else {}),
    }
    return Case(model, mode, layout, num_processes, parse_config(run, name))


def row_of(name: str, measured: float, around: tuple[StepTime, StepTime]) -> dict[str, Any]:
    """Return what was measured of a case in a round, and the mean of what is predicted."""
    before, after = map(asdict, around)
    parts = {part: round((before[part] + after[part]) / 2, 5) for part in before}
    predicted = statistics.mean(step.total for step in around)
    return {
        "case": name,
        "measured": measured,
        "predicted": round(predicted, 5),
        "error": round(predicted / measured - 1, 4),
        "parts": parts,
    }


def middle_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a case's medians over rounds, with the parts that its last round predicted."""
    measured, predicted = (
        statistics.median(r[key] for r in rounds) for key in ("measured", "predicted")
    )
    return rounds[-1] | {
        "measured": measured,
        "predicted": predicted,
        "error": round(predicted / measured - 1, 4),
        "rounds": [{key: r[key] for key in ("measured", "predicted", "error")} for r in rounds],
    }


def choices(cases: list[Case], measured: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Measure what the search found again, per model and way to train, beside those that looked
    fastest on two processes; return by how much longer its step is than that of the fastest.
    """
    finals = [*finalists(cases, measured)]
    seconds = {case.name: list[float]() for of_group in finals for case in of_group}
    for number, case in turns([case for of_group in finals for case in of_group], FINAL_ROUNDS):
        print(f"final round {number}: {case.name}", flush=True)
        seconds[case.name].append(seconds_of(case))
    chosen = []
    for of_group in finals:
        medians = {case.name: statistics.median(seconds[case.name]) for case in of_group}
        found_one, fastest = of_group[0].name, min(medians, key=medians.__getitem__)
        regret = round(medians[found_one] / medians[fastest] - 1, 4)
        rounds = {case.name: seconds[case.name] for case in of_group}
        chosen.append({"regret": regret, "found": found_one, "fastest": fastest, "rounds": rounds})
    return chosen


def finalists(cases: list[Case], measured: dict[str, list[float]]) -> Iterator[list[Case]]:
    """Yield what the search found for a model and a way to train, and the fastest other runs."""
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        if case.num_processes == 2:
            groups[case.model, case.mode].append(case)
    for *grid_cases, found_one in groups.values():
        folder = found_one.cfg.training.output_dir
        others = [
            case
            for case in grid_cases
            if replace(case.cfg, training=replace(case.cfg.training, output_dir=folder))
            != found_one.cfg
        ]
        others.sort(key=lambda case: statistics.median(measured[case.name]))
        yield [found_one, *others[:FINALISTS]]


def figure_of(cases: list[Case], rows: list[dict[str, Any]]) -> str:
    """Return predicted over measured seconds as SVG, a colour per layout."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case, row in zip(cases, rows, strict=True):
        groups[case.layout.split()[0].removesuffix(":")].append(row)
    with drawing():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, NullLocator

        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.subplots()
        for place, (layout, of_layout) in enumerate(groups.items()):
            measured, predicted = (
                [row[key] for row in of_layout] for key in ("measured", "predicted")
            )
            axes.scatter(measured, predicted, label=layout, s=14, color=colour(f"c{place + 1}"))
        ends = [pick(row["measured"] for row in rows) for pick in (min, max)]
        axes.plot(ends, ends, color=colour("faint"), linewidth=1, zorder=0)
        low, high = ([end * factor for end in ends] for factor in (0.9, 1.1))
        axes.fill_between(ends, low, high, color=colour("line"), zorder=-1, label="within 10 %")
        axes.set(xscale="log", yscale="log", xlabel="measured s/step", ylabel="predicted s/step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5]))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        axes.legend()
        return svg_file(figure, "times")


if __name__ == "__main__":
    main()
