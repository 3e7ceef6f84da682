"""How far the predicted step times are from measured ones, on a machine that was calibrated.

    python tools/plan_times.py [--rounds 3] [--runs runs/plan-times] [--out results/plan]
    python tools/plan_times.py --keep-measured

Each round calibrates with two processes, then trains every case; after the last round the machine
is calibrated once more. A case's measured seconds are the median of its steps in a round, and the
median over rounds. So are its predicted seconds, which in a round are the mean of what the
calibrations before and after it give: a shared machine is not as fast in every quarter of an hour.
`rounds` of a case has both. A calibration has seen none of the models: its layers have other
widths, depths, vocabularies and rows. Nothing is fitted to these runs. `choices` has the layout and
micro-batch that is predicted fastest for each model, and by how much it was slower than the one
measured fastest.

The calibrations are kept in OUT/calibrations. With `--keep-measured` predictions alone are made
again from them, in a minute, on a machine with the same processor.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch

from shardwise.assembly.describe import describe
from shardwise.benchmark.paired import command_line, write_json
from shardwise.config import RunConfig
from shardwise.launch.local import launch, start_processes
from shardwise.metrics.hardware import environment
from shardwise.planner.calibration import default_path
from shardwise.planner.cluster import cluster_of
from shardwise.planner.measure_machine import calibrate
from shardwise.planner.step_time import StepTime, time_of_step
from shardwise.run_file import parse_config

ROOT = Path(__file__).parents[1]
STEPS, WARM_UP = 5, 2
RECOMPUTED = "ddp recomputed"
"""With full activation checkpointing."""
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
    RECOMPUTED: (2, {"data": "ddp"}),
    "zero1": (2, {"data": "zero1"}),
    "fsdp2": (2, {"data": "fsdp2"}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "schedule": "1f1b"}),
    "cp": (2, {"cp": 2}),
}
Cases = list[tuple[str, int, RunConfig]]
"""Each one's name, number of processes and run."""


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "plan")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep-measured", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs/plan-times"))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    options = parser.parse_args()
    if torch.get_num_threads() != 1:
        sys.exit("set OMP_NUM_THREADS=1: two cores can time two processes of one thread each")
    options.runs.mkdir(parents=True, exist_ok=True)
    os.environ["SHARDWISE_CACHE"] = str(options.runs.absolute() / "cache")
    cases = list(cases_of(options.runs, options.layouts.split(",")))
    calibrations = options.out / "calibrations"
    if options.keep_measured:
        content = json.loads((options.out / "times.json").read_text())
        facts = content["environment"]
        measured = {r["case"]: [of["measured"] for of in r["rounds"]] for r in content["rows"]}
    else:
        facts = environment(torch.device("cpu"))
        measured = measure(cases, options.rounds, calibrations)
    middles = [middle_of(rounds) for rounds in predict(cases, measured, calibrations).values()]
    errors = sorted(abs(row["error"]) for row in middles)
    summary = {"cases": len(middles), "median": statistics.median(errors), "worst": errors[-1]}
    chosen = choices(middles)
    summary["regret"] = max((row["regret"] for row in chosen), default=0.0)
    content = {"environment": facts, "error": summary, "choices": chosen, "rows": middles}
    write_json(options.out / "times.json", content)
    draw(middles, options.out / "times.svg")
    print(json.dumps(summary))


def measure(cases: Cases, num_rounds: int, calibrations: Path) -> dict[str, list[float]]:
    """Return the seconds of a step of each case in each round; keep each calibration."""
    shutil.rmtree(calibrations, ignore_errors=True)
    calibrations.mkdir(parents=True)
    measured: dict[str, list[float]] = {name: [] for name, *_ in cases}
    for number in range(num_rounds + 1):
        assert calibrate(2, default_path(), start_processes) == 0, "the calibration failed"
        shutil.copy(default_path(), calibrations / f"{number}.json")
        if number == num_rounds:
            break
        for name, nproc, cfg in cases[:: 1 if number % 2 == 0 else -1]:
            print(f"round {number}: {name}", flush=True)
            shutil.rmtree(cfg.training.output_dir, ignore_errors=True)
            assert launch(cfg, nproc) == 0, name
            lines = Path(cfg.training.output_dir, "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            seconds = [step["seconds"] for step in steps if "seconds" in step]
            measured[name].append(round(statistics.median(seconds[WARM_UP:]), 5))
    return measured


def predict(
    cases: Cases, measured: dict[str, list[float]], calibrations: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return each case's measured and predicted seconds in each round."""
    predicted: dict[str, list[StepTime]] = defaultdict(list)
    for path in sorted(calibrations.iterdir()):
        default_path().parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, default_path())
        cluster = cluster_of("here")
        for name, nproc, cfg in cases:
            predicted[name].append(time_of_step(cfg, describe(cfg, nproc), cluster))
    return {
        name: [
            row_of(name, seconds, around)
            for seconds, around in zip(of_case, pairwise(predicted[name]), strict=True)
        ]
        for name, of_case in measured.items()
    }


def cases_of(runs: Path, layouts: list[str]) -> Iterator[tuple[str, int, RunConfig]]:
    """Yield the name, number of processes and run of every case."""
    for model, layout, mode, rows in itertools.product(MODELS, layouts, ("full", "lora"), (1, 2)):
        base, sizes = MODELS[model]
        folder = runs.absolute() / "models" / model.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((ROOT / "configs/models" / base / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | sizes))
        nproc, parallel = LAYOUTS[layout]
        name = f"{model}, {layout}, {mode}, {rows} rows"
        data = {
            "train": str(ROOT / "runs/corpus/python"),
            "sequence_length": 256,
            "packing": "concat",
        }
        run = {
            "model": {
                "path": str(folder),
                "tokenizer": str(ROOT / "runs/corpus/tokenizer"),
                "init": "random",
            },
            "data": data,
            "training": {
                "output_dir": str(runs / name.replace(", ", "-").replace(" ", "-")),
                "steps": STEPS,
                "global_batch_size": 8,
                "micro_batch_size": rows,
                "checkpointing": "full" if layout == RECOMPUTED else "none",
                "device": "cpu",
            },
            "parallel": parallel,
            "measure": {"warmup_steps": WARM_UP, "memory": False},
        }
        if mode == "lora":
            run["lora"] = {"r": 8, "targets": "auto"}
        yield name, nproc, parse_config(run, name)


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


def choices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per model and way to train the layout and micro-batch that is predicted fastest.

    Its regret is how much longer its measured step is than that of the one measured fastest.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        model, layout, mode, _ = row["case"].split(", ")
        if layout != "single":
            groups.setdefault(f"{model}, {mode}", []).append(row)
    chosen = []
    for name, of_group in groups.items():
        predicted = min(of_group, key=lambda row: row["predicted"])
        fastest = min(of_group, key=lambda row: row["measured"])
        regret = round(predicted["measured"] / fastest["measured"] - 1, 4)
        cases = {"predicted": predicted["case"], "fastest": fastest["case"]}
        chosen.append({"of": name, "regret": regret, **cases})
    return chosen


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a scatter plot of predicted over measured seconds, a colour per layout."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, ScalarFormatter

    figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
    for layout in dict.fromkeys(row["case"].split(", ")[1] for row in rows):
        of_layout = [row for row in rows if row["case"].split(", ")[1] == layout]
        measured = [row["measured"] for row in of_layout]
        axes.scatter(measured, [row["predicted"] for row in of_layout], label=layout, s=18)
    ends = [min(row["measured"] for row in rows), max(row["measured"] for row in rows)]
    axes.plot(ends, ends, color="grey", linewidth=1, zorder=0)
    low, high = ([end * factor for end in ends] for factor in (0.9, 1.1))
    axes.fill_between(ends, low, high, color="grey", alpha=0.15, linewidth=0, label="within 10 %")
    axes.set(xscale="log", yscale="log", xlabel="measured s/step", ylabel="predicted s/step")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(FixedLocator([]))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
