"""What layers that move between the ranks of a running pipeline gain, on two processes.

    OMP_NUM_THREADS=1 python -m tools.resplit_gain [--rounds 2] [--out results/resplit/gain.json]

Each case runs with equal numbers of layers, cut by costs, and `dynamic`, by turns. `flops`: the
costs are FLOPs, of a hybrid model whose head counts as many layers. `wrong`: the costs of the lower
half of equal layers are taken three times. `slow`: whatever rank 1 computes takes twice as long,
since it then sleeps as long as it worked. A ratio is that of a round: steps after the last move
(`late`), and all steps after the first one with what the moves took (`whole`). Nothing is reported
where losses differ.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.paired import Results, command_line, spread, take_turns
from torch.distributed.pipelining import PipelineStage

from shardwise.assembly.describe import Description
from shardwise.base.interfaces import Mesh
from shardwise.base.records.record import RunRecord
from shardwise.config import Data, Lora, Measure, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.lab.instruments import INSTRUMENTS
from shardwise.launch.local import launch
from shardwise.metrics.hardware import environment
from shardwise.training.loop import train

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "runs" / "corpus"
MODELS = {"flops": "pipeline-head", "wrong": "pipeline-plain", "slow": "pipeline-plain"}
SPLITS = ("uniform", "balanced", "dynamic")
SECONDS = ("forward_seconds", "input_seconds", "weight_seconds")
STEPS, LATE = 20, 6
"""Steps of a run, and the last ones of them, which are `late`: a first move comes after 5 steps."""


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "resplit" / "gain.json")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if torch.get_num_threads() != 1:
        sys.exit("set OMP_NUM_THREADS=1: two cores can time two processes of one thread each")
    if not CORPUS.is_dir():
        sys.exit("there is no runs/corpus; run python examples/corpus.py")
    sizes = {"steps": STEPS, "late": LATE, "rounds": options.rounds}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    for case in MODELS:
        results.add(case, partial(of_case, case, options.rounds))
    results.write()


def of_case(case: str, rounds: int) -> dict[str, Any]:
    """Return what the splits of a case take, round by round."""
    records: dict[str, list[RunRecord]] = {name: [] for name in SPLITS}

    def side(name: str, _: int) -> dict[str, float]:
        record, seconds = run_of(case, name)
        records[name].append(record)
        moves = sum(move["seconds"] for move in record.resplits)
        return {"late": statistics.median(seconds[-LATE:]), "whole": sum(seconds[1:]) + moves}

    load_average = os.getloadavg()[0]
    taken = take_turns({name: partial(side, name) for name in SPLITS}, rounds)
    losses = [record.losses for of_split in records.values() for record in of_split]
    if any(abs(a - b) > 1e-4 for other in losses for a, b in zip(other, losses[0], strict=True)):
        sys.exit(f"{case}: losses differ")
    return {
        "load_average": load_average,
        "seconds": {
            figure: {name: spread(values) for name, values in sides.items()}
            for figure, sides in taken.items()
        },
        "layers": {name: of_split[-1].pipeline["layers"] for name, of_split in records.items()},
        "resplits": [record.resplits for record in records["dynamic"]],
    }


def run_of(case: str, name: Any) -> tuple[RunRecord, list[float]]:
    """Run a case under a split on two processes; return its record and the seconds of its steps."""
    models = ROOT / "configs" / "models"
    with tempfile.TemporaryDirectory() as folder:
        cfg = RunConfig(
            model=Model(
                str(models / MODELS[case]), tokenizer=str(CORPUS / "tokenizer"), init="random"
            ),
            lora=Lora(r=8, alpha=16) if case == "flops" else None,
            data=Data(str(CORPUS / "python"), sequence_length=32),
            parallel=Parallel(pp=2, split=name),
            optimizer=Optimizer(lr=1e-3),
            training=Training(
                folder, steps=STEPS, global_batch_size=8, micro_batch_size=1, device="cpu"
            ),
            measure=Measure(warmup_steps=1, memory=False),
        )
        if launch(cfg, 2, partial(train_case, case)):
            sys.exit(f"{case}, {name}: the run failed")
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = [row["seconds"] for row in map(json.loads, lines) if "loss" in row]
        return RunRecord.read(Path(folder) / "record.json"), seconds


def train_case(case: str, cfg: RunConfig, mesh: Mesh) -> RunRecord | None:
    """Train on this rank, with the costs or the speed that the case is about."""
    if case == "wrong":
        costs_of = Description.costs

        def wrong(*args: Any) -> Any:
            units, source = costs_of(*args)
            lower = units[1 : len(units) // 2]
            thrice = [replace(u, **{key: 3 * getattr(u, key) for key in SECONDS}) for u in lower]
            return (units[0], *thrice, *units[1 + len(lower) :]), source

        Description.costs = wrong
    if case == "slow" and dist.get_rank() == 1:
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(PipelineStage, name, twice_as_long(getattr(PipelineStage, name)))
    return train(cfg, mesh, INSTRUMENTS)


def twice_as_long(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that then sleeps as long as it has worked; its caller times both."""

    def slowed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = work(*args, **kwargs)
        time.sleep(time.perf_counter() - begin)
        return result

    return slowed


if __name__ == "__main__":
    main()
