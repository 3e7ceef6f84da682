"""Does a zero-bubble schedule help where weights are frozen? Measured and predicted.

    python tools/pipeline_zero_bubble.py [--sweep configs/pipeline-zero-bubble.yaml]
        [--runs runs/pipeline-zero-bubble] [--out results/pipeline-split]

With F, I and W the seconds of a stage's forward and of its backward's two halves, 1F1B idles
(p - 1)(F + I + W) of a step and ZB1P (p - 1)(F + I - W) (arXiv 2401.10241, table 1): with W = 0, as
LoRA nearly has it, nothing is won. The prediction is for equal stages that cost F = I = 1 and W = 1
(full) or 0 (LoRA); only the measurement has what cutting a backward in two costs. ZB-V has two
chunks on each rank; interleaved 1F1B shows what these alone are worth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline_split import OUT, ROOT, check, measured_bench, read_rounds, speeds

from shardwise.benchmark.paired import command_line, ratios, spread, write_json
from shardwise.records.cell import CellRecord
from shardwise.run_file import parse_config
from shardwise.schedule.costs import Cost
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.simulate import simulate

SCHEDULES = {
    "1f1b": ("1f1b", 1),
    "zb1p": ("interleaved-zero-bubble", 1),
    "interleaved": ("interleaved-1f1b", 2),
    "zbv": ("zbv", 2),
}
"""Each zero-bubble schedule follows the one that it is compared with: as many chunks, backwards in
one piece.
"""
MODES = {"lora": 0.0, "full": 1.0}
"""Seconds of the weights' gradients where forward and inputs' gradients take 1."""
RANKS, PER_RANK = (2, 4, 8), (2, 4, 8)


def main() -> None:
    parser = command_line(__doc__, OUT)
    default = ROOT / "configs" / "pipeline-zero-bubble.yaml"
    parser.add_argument("--sweep", type=Path, default=default)
    parser.add_argument("--runs", type=Path, default=Path("runs/pipeline-zero-bubble"))
    options = parser.parse_args()
    sweep, records = measured_bench(options.sweep, options.runs)
    plans = [plan for plan in sweep.record.cells if not plan.control]
    cells = {(plan.values["mode"], plan.values["schedule"]): records[plan.id] for plan in plans}
    check(sweep, records, list(cells.values()))
    measured = {
        mode: {
            name: of_cell(options.runs, cells[mode, name], cells[mode, "1f1b"])
            for name in SCHEDULES
        }
        for mode in MODES
    }
    result = {
        "environment": next(iter(records.values())).environment,
        "what": sweep.record.equal,
        "measured": measured,
        "predicted_for_equal_stages": [
            predicted(mode, p, each * p) for mode in MODES for p in RANKS for each in PER_RANK
        ],
    }
    write_json(options.out / "zero-bubble.json", result)
    for mode, schedules in measured.items():
        for name, cell in schedules.items():
            shown = {key: cell[key] for key in ("speed_over_1f1b", "predicted", "layers")}
            print(mode, name, json.dumps(shown))


def of_cell(runs: Path, record: CellRecord, base: CellRecord) -> dict[str, Any]:
    """Return how fast a schedule was, also over 1F1B round by round, and what the simulator
    predicts.
    """
    rounds, base_rounds = (read_rounds(runs / one.cell["id"]) for one in (record, base))
    steps = [r.pipeline["measured"] for r in rounds if r.pipeline]
    errors = [r.pipeline["simulator_error_percent"] for r in rounds if r.pipeline]
    assert record.pipeline is not None
    assert base.pipeline is not None
    simulated, base_simulated = record.pipeline["simulated"], base.pipeline["simulated"]
    return {
        "layers": record.pipeline["layers"],
        "micro_batches": parse_config(record.config, record.cell["id"]).training.global_batch_size,
        "tokens_per_second": spread(speeds(rounds)),
        "speed_over_1f1b": ratios(speeds(rounds), speeds(base_rounds)),
        "pipeline_seconds": spread([step["seconds"] for step in steps]),
        "bubble": spread([step["bubble"] for step in steps]),
        "predicted": {
            "speed_over_1f1b": round(base_simulated["seconds"] / simulated["seconds"], 4),
            "seconds": round(simulated["seconds"], 4),
            "bubble": round(simulated["bubble"], 4),
        },
        "error_percent": spread(errors),
        "costs": record.pipeline["costs"],
    }


def predicted(mode: str, ranks: int, num_microbatches: int) -> dict[str, Any]:
    """Return bubble and speed over 1F1B of each schedule, on stages that all cost the same."""
    steps = {}
    for name, (schedule, num_virtual) in SCHEDULES.items():
        pipeline = Pipeline(schedule, ranks, num_microbatches, num_virtual)
        each = 1.0 / num_virtual
        chunk = Cost("stage", each, each, MODES[mode] * each, activation_bytes=0, output_bytes=0)
        steps[name] = simulate(pipeline, [chunk] * pipeline.num_chunks)
    return {
        "mode": mode,
        "ranks": ranks,
        "micro_batches": num_microbatches,
        "bubble": {name: round(step.bubble(), 4) for name, step in steps.items()},
        "speed_over_1f1b": {
            name: round(steps["1f1b"].seconds / step.seconds, 4) for name, step in steps.items()
        },
    }


if __name__ == "__main__":
    main()
