"""What budgets of memory choose to compute again, beside none, operators and full for all layers.

    python -m tools.budget_grid [--out results/plan/budgets.json]

Of each case (a small model under a layout, as in tests/planner/grid.py) the three ways for all
layers are measured: the exact bytes of the rank with the most, in the second of two steps. Budgets
then go in equal steps from the smallest of these peaks to the largest one, and beyond, each over
the share of a budget that a choice may use. What each budget chooses is measured as well.
Recomputed FLOPs are counted (metrics/flops.py), per token of the whole model.
"""

from __future__ import annotations

import math
import operator
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.planner.grid import Cell, config_of, measure_runs
from tools.paired import Results, command_line, table, write_json

from shardwise.assembly.describe import Description, describe
from shardwise.assembly.recomputation import Chosen
from shardwise.config import Recomputation, RunConfig
from shardwise.lab.planner.memory import USABLE
from shardwise.lab.planner.recompute import WAYS, TooSmallError, as_way, within_budget
from shardwise.lab.planner.share import counts_of
from shardwise.metrics.flops import hardware_flops_per_token
from shardwise.metrics.hardware import environment

SHARES = tuple(place / 16 for place in range(1, 18, 2))
"""The budgets of a case, between its smallest and its largest peak, and one above."""
FAMILIES = ("llama", "qwen3_5", "falcon_h1", "kimi_linear", "gpt2")
LAYOUTS = ("ddp", "zero1", "fsdp2", "tp", "cp", "1f1b", "interleaved")


@dataclass(frozen=True)
class Case:
    """A run without a budget."""

    family: str
    layout: str
    mode: str

    @property
    def id(self) -> str:
        """Unique in the grid."""
        return f"{self.family}-{self.layout}-{self.mode}"

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return 1 if self.layout == "single" else 2

    def run(self, folder: Path) -> RunConfig:
        """Return the run file; `folder` gets the model's config."""
        rows = 4 if self.layout in ("1f1b", "interleaved") else 2
        sizes = self.num_ranks, 256, 2, rows, "none", "float32"
        return config_of(Cell(self.family, self.layout, self.mode, *sizes), folder)


def cases() -> list[Case]:
    """Return the grid: all families in one process, two of them under the other layouts."""
    return [
        *(Case(family, "single", mode) for family in FAMILIES for mode in ("lora", "full")),
        *(
            Case(family, layout, mode)
            for layout in LAYOUTS
            for family, mode in (("llama", "full"), ("qwen3_5", "lora"))
        ),
    ]


def main() -> None:
    options = command_line(
        __doc__, Path(__file__).parents[1] / "results" / "plan" / "budgets.json"
    ).parse_args()
    equal = environment()
    results = Results(options.out, {"environment": equal})
    with tempfile.TemporaryDirectory() as name:
        for case in cases():
            if case.id not in results.rows:
                results.add(case.id, partial(row_of, case, Path(name)))
    rows = results.rows
    summary = summary_of(rows)
    write_json(options.out, {"summary": summary, "environment": equal, "rows": rows})
    print(table(("", "number"), [*summary.items()]))


def row_of(case: Case, folder: Path) -> dict[str, Any]:
    """Return the peaks and FLOPs of the ways for all layers, and those of each budget's choice."""
    cfg = case.run(folder)
    run = describe(cfg, case.num_ranks)
    uniform = [as_way(cfg, way) for way in WAYS]
    peaks = dict(zip(WAYS, measured(case, uniform), strict=True))
    flops = {way: recomputed(run, cfg, way) for way in WAYS}
    low, high = min(peaks.values()), max(peaks.values())
    budgets = [int((low + share * (high - low)) / USABLE) for share in SHARES]
    chosen = [choice_of(cfg, run, budget) for budget in budgets]
    runs = {budget: one.applied(cfg) for budget, one in zip(budgets, chosen) if one is not None}
    different = {key_of(run): run for run in runs.values()}
    of_choice = dict(zip(different, measured(case, [*different.values()]), strict=True))
    cells: list[dict[str, Any]] = []
    for budget, one in zip(budgets, chosen, strict=True):
        # With the same margin as a choice has, and with none.
        bests = best(peaks, flops, int(USABLE * budget)), best(peaks, flops, budget)
        cell = {"budget": budget, "best_of_three": bests[0], "best_without_margin": bests[1]}
        if one is not None:
            ways: Any = runs[budget].training.checkpointing
            cell |= {way: list(one.numbers(way)) for way in WAYS}
            cell |= {"predicted": max(one.peak_bytes), "peak": of_choice[key_of(runs[budget])]}
            cell |= {"recomputed_flops": recomputed(run, cfg, ways)}
        cells.append(cell)
    return {"peaks": peaks, "recomputed_flops": flops, "budgets": cells}


def choice_of(cfg: RunConfig, run: Description, budget: int) -> Chosen | None:
    """Return what a budget of so many bytes chooses; None where it refuses the run."""
    try:
        return within_budget(as_way(cfg, Recomputation(budget_gib=budget / 2**30)), run, "cpu")
    except TooSmallError:
        return None


def key_of(cfg: RunConfig) -> str:
    """Return what distinguishes the choices of a case: the layers, and a pipeline's split."""
    return f"{cfg.training.checkpointing}, {cfg.parallel.split}"


def measured(case: Case, cfgs: Sequence[RunConfig]) -> list[int]:
    """Return the peak of the fullest rank of each run."""
    ranks = run_ranks(case.num_ranks, measure_runs, list(cfgs))
    return [max(one.peak for one in of_run) for of_run in zip(*ranks, strict=True)]


def recomputed(run: Description, cfg: RunConfig, ways: Any) -> float:
    """Return the FLOPs per token that a model's layers compute again."""
    counts, length = counts_of(run.hf, run.spec), cfg.data.sequence_length
    plain = hardware_flops_per_token(counts, length, "none")
    return hardware_flops_per_token(counts, length, ways) - plain


def best(peaks: dict[Any, int], flops: dict[Any, float], most: int) -> float | None:
    """Return the fewest recomputed FLOPs of the ways for all layers within so many bytes."""
    return min((flops[way] for way, peak in peaks.items() if peak <= most), default=None)


def summary_of(rows: dict[str, Any]) -> dict[str, int]:
    """Return in how many cells a choice is within its budget, and not worse than the best way."""
    cells = [cell for row in rows.values() for cell in row["budgets"]]
    chosen = [cell for cell in cells if "peak" in cell]

    def number(best: str, is_counted: Callable[[float, float], bool]) -> int:
        pairs = [
            (c.get("recomputed_flops", math.inf), c[best]) for c in cells if c[best] is not None
        ]
        return sum(is_counted(own, other) for own, other in pairs)

    return {
        "cases": len(rows),
        "budgets": len(cells),
        "refused": len(cells) - len(chosen),
        "peaks above the budget": sum(cell["peak"] > cell["budget"] for cell in chosen),
        "worse than the best of three": number("best_of_three", operator.gt),
        "better than the best of three": number("best_of_three", operator.lt),
        "worse than the best without margin": number("best_without_margin", operator.gt),
        "better than the best without margin": number("best_without_margin", operator.lt),
    }


if __name__ == "__main__":
    main()
