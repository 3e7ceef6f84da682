"""Benches made by hand: folders as `shardwise bench` leaves them, with chosen figures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.records.cell import (
    RECORD,
    RUN_FILE,
    SWEEP,
    Axis,
    CellPlan,
    CellRecord,
    SweepRecord,
)
from shardwise.base.records.record import dumps
from shardwise.base.schedule.costs import Cost
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.split import split
from shardwise.base.schedule.timeline import Timeline
from shardwise.config import Parallel
from shardwise.lab.planner.timeline import describe

MIB = 2**20
PLACE = {
    "shardwise": "0.1.0",
    "commit": "a6c3927",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "device": "AMD EPYC",
    "cuda": None,
    "cpu_count": 2,
    "threads": 1,
}
STEPS = 12
LOSSES = [6.0 - 0.05 * step for step in range(STEPS)]
NOISE = 2.0**-20
"""The difference of the noise control in one step: two spacings of float32 between 4 and 8."""


def shifted(by: float, step: int = 7) -> list[float]:
    """The reference's losses, one of them larger by `by`."""
    return [loss + by if i == step else loss for i, loss in enumerate(LOSSES)]


def record(plan: CellPlan, **given: Any) -> CellRecord:
    """A cell's record. Fields that are not given are those of a good run of the reference."""
    speed = given.pop("speed", 1000.0)
    peak = given.pop("peak", 100 * MIB)
    data = given.pop("data", "single")
    sent = 0 if plan.nproc == 1 else 3 * MIB
    ok = given.get("status", "ok") == "ok"
    parts = {
        "weights": 0.4,
        "gradients": 0.1,
        "optimizer": 0.2,
        "activations": 0.25,
        "temporary": 0.05,
    }
    measured = {
        "losses": LOSSES,
        "tokens_per_second": speed,
        "samples_per_second": speed / 50,
        "step_seconds": {"mean": 1.0, "p10": 0.9, "p50": 1.0, "p90": 1.15, "max": 1.3, "steps": 9},
        "peak_memory_bytes": [peak] * plan.nproc,
        "memory_parts": [{name: round(share * peak) for name, share in parts.items()}] * plan.nproc,
        "spread": {"tokens_per_second": [0.95 * speed, 1.04 * speed]},
        "rounds": [
            {
                "status": "ok",
                "tokens_per_second": speed * x,
                "started": f"2026-01-0{day}T00:00:00.000+00:00",
            }
            for day, x in enumerate((0.95, 1.0, 1.04), start=1)
        ],
        "mfu": 0.31,
        "grad_norms": [2.0 - 0.1 * step for step in range(STEPS)],
        "eval": [
            {"step": 0, "loss": 6.25, "tokens": 99},
            {"step": STEPS, "loss": 5.5, "tokens": 99},
        ],
        "first_step_seconds": 3.5,
        "sent_bytes_per_step": [sent] * plan.nproc,
        "sent_bytes_by_formula": [sent] * plan.nproc,
    }
    config: dict[str, dict[str, Any]] = {"parallel": {"data": data}, "training": {"steps": STEPS}}
    for axis, value in plan.values.items():
        section, _, key = axis.partition(".")
        if key:
            config.setdefault(section, {})[key] = value
    return CellRecord(
        **{
            "status": "ok",
            "config": config,
            "environment": PLACE,
            "cell": dataclasses.asdict(plan),
            "command": ["shardwise", "train", f"{plan.id}/run.yaml", "--nproc", str(plan.nproc)],
            **(measured if ok else {}),
            **given,
        }
    )


def write(folder: Path, sweep: SweepRecord, records: dict[str, CellRecord]) -> Path:
    """Write the folder of a bench. Each cell with a record has a run file too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP).write_text(dumps(dataclasses.asdict(sweep)), encoding="utf-8")
    for name, content in records.items():
        (folder / name).mkdir()
        (folder / name / RUN_FILE).write_text(f"parallel: {{data: {name}}}\n", encoding="utf-8")
        content.write(folder / name / RECORD)
    return folder


def sweep_of(
    axes: tuple[Axis, ...], cells: list[CellPlan], title: str = "Strategies on two processes"
) -> SweepRecord:
    equal = {
        plan.group: {"model.path": "tiny", "training.steps": STEPS, "training.seed": 0}
        for plan in cells
    }
    return SweepRecord(
        title, axes, tuple(cells), equal, 3, 120.0, ["shardwise", "bench", "sweep.yaml"]
    )


STRATEGIES = Axis(
    "strategy", ("single", "ddp", "fsdp2", "zero1", "fsdp1", "pp"), ("nproc", "parallel.data"), True
)


def strategies() -> tuple[SweepRecord, dict[str, CellRecord]]:
    """One group with every state.

    It has the reference, ddp, an fsdp2 with little memory, a wrong zero1, an fsdp1 that ran out of
    memory, and a pp that has not run.
    """

    def plan(name: str) -> CellPlan:
        reference = None if name == "single" else "single"
        return CellPlan(
            name,
            {"strategy": name},
            1 if name == "single" else 2,
            "lora",
            reference,
            baseline=reference,
        )

    control = CellPlan("control-single", {"strategy": "single"}, 1, "lora", "single", control=True)
    plans = {name: plan(name) for name in STRATEGIES.values}
    made = {
        "single": record(plans["single"], speed=1000.0, peak=100 * MIB),
        "ddp": record(plans["ddp"], speed=1500.0, peak=80 * MIB, data="ddp", losses=shifted(NOISE)),
        "fsdp2": record(
            plans["fsdp2"], speed=1250.0, peak=60 * MIB, data="fsdp2", losses=shifted(-2 * NOISE)
        ),
        "zero1": record(
            plans["zero1"], speed=9000.0, peak=10 * MIB, data="zero1", losses=shifted(1e-3)
        ),
        "fsdp1": record(
            plans["fsdp1"], status="oom", reason="out of memory on rank 1 of 2", data="fsdp1"
        ),
        "control-single": record(control, losses=shifted(NOISE, step=3), speed=990.0),
    }
    return sweep_of((STRATEGIES,), [*plans.values(), control]), made


def large() -> tuple[SweepRecord, dict[str, CellRecord]]:
    """Four groups (context length x adapter) of strategies and micro-batches."""
    names = ("single", "ddp", "zero1", "zero2", "fsdp1", "fsdp2", "fsdp2-keep")
    axes = (
        Axis("strategy", names, ("nproc", "parallel.data", "parallel.reshard_after_forward"), True),
        Axis("training.micro_batch_size", ("1", "2", "4"), ("training.micro_batch_size",), True),
        Axis("data.sequence_length", ("128", "256", "512"), ("data.sequence_length",), False),
        Axis("adapter", ("lora", "full"), ("lora",), False),
    )
    plans, made = [], {}
    for length in axes[2].values:
        for adapter in axes[3].values:
            group = f"{length}-{adapter}"
            for i, name in enumerate(names):
                for batch in axes[1].values:
                    values = dict(zip((a.name for a in axes), (name, batch, length, adapter)))
                    ident = f"{name}-{batch}-{group}"
                    reference = f"single-{batch}-{group}"
                    nproc = 1 if name == "single" else 2
                    plan = CellPlan(
                        ident,
                        values,
                        nproc,
                        group,
                        None if ident == reference else reference,
                        baseline=None if ident == f"single-1-{group}" else f"single-1-{group}",
                    )
                    plans.append(plan)
                    speed = (
                        (900 if nproc == 1 else 1500 - 90 * i)
                        * float(batch) ** 0.3
                        * (128 / float(length)) ** 0.1
                    )
                    peak = round(
                        (100 - 6 * i) * MIB * math.sqrt(float(batch) * float(length) / 128)
                    )
                    made[ident] = record(
                        plan, speed=speed, peak=peak, data=name.removesuffix("-keep")
                    )
            for batch in axes[1].values:
                base = f"single-{batch}-{group}"
                values = dict(zip((a.name for a in axes), ("single", batch, length, adapter)))
                plan = CellPlan(f"control-{base}", values, 1, group, base, control=True)
                plans.append(plan)
                made[plan.id] = record(plan, losses=shifted(NOISE, step=3))
    return sweep_of(axes, plans, "Every strategy, by context and micro-batch"), made


def processes(kind: str = "strong") -> tuple[SweepRecord, dict[str, CellRecord]]:
    """ddp and fsdp2 on 1, 2 and 4 processes."""
    keys = ("nproc",) if kind == "strong" else ("nproc", "training.global_batch_size")
    axes = (
        Axis("strategy", ("ddp", "fsdp2"), ("parallel.data",), True),
        Axis("nproc", ("1", "2", "4"), keys, True),
    )
    speeds = {"ddp": (1000.0, 1800.0, 3200.0), "fsdp2": (900.0, 1500.0, 2400.0)}
    plans, made = [], {}
    for name, of_name in speeds.items():
        for nproc, speed in zip((1, 2, 4), of_name):
            ident = f"{name}-{nproc}"
            reference = None if ident == "ddp-1" else "ddp-1"
            values = {"strategy": name, "nproc": str(nproc)}
            plan = CellPlan(ident, values, nproc, "all", reference, baseline=reference)
            plans.append(plan)
            peak = (100 if name == "ddp" else 60 + 40 // nproc) * MIB
            made[ident] = record(plan, speed=speed, data=name, peak=peak)
    plan = CellPlan(
        "control-ddp-1", {"strategy": "ddp", "nproc": "1"}, 1, "all", "ddp-1", control=True
    )
    plans.append(plan)
    made[plan.id] = record(plan, losses=shifted(NOISE, step=3))
    return sweep_of(axes, plans, "Scaling"), made


def pipelines() -> tuple[SweepRecord, dict[str, CellRecord]]:
    """Two shapes of a pipeline, each split in three ways. The head costs as much as six layers."""
    shapes = {"2 ranks": Pipeline("1f1b", 2, 32), "4 ranks": Pipeline("interleaved-1f1b", 4, 16, 2)}
    splits = ("balanced", "uniform", "parameters")
    axes = (
        Axis("shape", tuple(shapes), ("nproc", "parallel.pp"), True),
        Axis("parallel.split", splits, ("parallel.split",), True),
    )
    layer = Cost("layer", 0.010, 0.011, 0.009, activation_bytes=1, output_bytes=1, parameters=1)
    head = Cost("head", 0.060, 0.066, 0.054, activation_bytes=1, output_bytes=1, parameters=2)
    units = [Cost("embedding", 0.001, 0.0, 0.001, 1, 1, parameters=4), *[layer] * 18, head]
    plans, made = [], {}
    for shape, pipeline in shapes.items():
        for i, name in enumerate(splits):
            reference = None if not plans else plans[0].id
            values = {"shape": shape, "parallel.split": name}
            plan = CellPlan(
                f"{shape[0]}-{name}",
                values,
                pipeline.num_ranks,
                "all",
                reference,
                baseline=reference,
            )
            plans.append(plan)
            cut = split(name, units, pipeline)
            measured = slower(cut.timeline, 1.02 + 0.01 * i)
            parallel = Parallel(pp=pipeline.num_ranks, split=name)
            described = describe(parallel, cut, "made by hand", measured, cut.timeline)
            content = dataclasses.asdict(dataclasses.replace(described, schedule=pipeline.schedule))
            made[plan.id] = record(plan, speed=1e3 / measured.seconds, pipeline=content)
            made[plan.id].spread["pipeline.simulator_error_percent"] = [-3.0 - i, -1.0]
            made[plan.id].config["parallel"]["pp"] = pipeline.num_ranks
    control = dataclasses.replace(plans[0], id="control", reference=plans[0].id, control=True)
    plans.append(control)
    made[control.id] = record(control, losses=shifted(NOISE), pipeline=made[plans[0].id].pipeline)
    return sweep_of(axes, plans, "Splits of a pipeline"), made


def seeds() -> tuple[SweepRecord, dict[str, CellRecord]]:
    """Three seeds of single and ddp, each with its own losses; the last ddp ran out of memory."""
    axes = (
        Axis("strategy", ("single", "ddp"), ("nproc", "parallel.data"), True),
        Axis("training.seed", ("1", "2", "3"), ("training.seed",), False),
    )
    plans, made = [], {}
    for i, seed in enumerate(axes[1].values):
        single = f"single-{seed}"
        names = {single: "single", f"ddp-{seed}": "ddp", f"control-{single}": "single"}
        for ident, name in names.items():
            values = {"strategy": name, "training.seed": seed}
            nproc, control = 1 + (name == "ddp"), ident.startswith("control")
            reference = None if ident == single else single
            plan = CellPlan(ident, values, nproc, f"training.seed={seed}", reference, control)
            plans.append(plan)
            far = 0.25 * i * i + (NOISE if control else 0.0)
            losses = [loss + far for loss in LOSSES]
            evals = [{"step": STEPS, "loss": 5.5 + far}]
            made[ident] = record(
                plan, losses=losses, eval=evals, speed=1000.0 * nproc + i, data=name
            )
    made["ddp-3"] = record(plans[-2], status="oom", reason="out of memory", data="ddp")
    return sweep_of(axes, plans, "Three seeds"), made


def mixtures() -> tuple[SweepRecord, dict[str, CellRecord]]:
    """A model with two layers of experts in two layouts, and with a capacity that drops tokens."""
    names = ("single", "fsdp2-ep", "fsdp2-ep-capacity")
    axis = Axis("strategy", names, ("nproc", "parallel.ep", "model.expert_capacity"), True)
    plans, made = [], {}
    for name in names:
        reference = None if name == "single" else "single"
        group = "capacity" if name.endswith("capacity") else "all"
        if group == "capacity":
            reference = None
        nproc = 1 if name == "single" else 2
        plan = CellPlan(name, {"strategy": name}, nproc, group, reference, baseline=reference)
        plans.append(plan)
        dropped = [0.05, 0.15] if group == "capacity" else [0.0, 0.0]
        steps = {
            "router_max_over_mean": [2.0 - 0.05 * step for step in range(STEPS)],
            "router_entropy": [0.9 + 0.005 * step for step in range(STEPS)],
            "router_dropped": [sum(dropped) / 2] * STEPS,
        }
        routing = {
            "layers": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
            "share": [[0.5, 0.3, 0.1, 0.1], [0.4, 0.2, 0.2, 0.2]],
            "max_over_mean": [2.0, 1.6],
            "entropy": [0.843, 0.961],
            "dropped": dropped,
            "steps": steps,
        }
        made[name] = record(plan, routing=routing)
    control = CellPlan("control", {"strategy": "single"}, 1, "all", "single", control=True)
    plans.append(control)
    made[control.id] = record(control, losses=shifted(NOISE, step=3))
    return sweep_of((axis,), plans, "A mixture of experts"), made


def slower(timeline: Timeline, times: float) -> Timeline:
    """The same timeline, `times` as slow."""
    events = (
        event._replace(start=times * event.start, end=times * event.end)
        for event in timeline.events
    )
    return Timeline(timeline.num_ranks, tuple(events))


@pytest.fixture
def strategies_folder(tmp_path: Path) -> Path:
    """The bench of `strategies()`."""
    return write(tmp_path / "bench", *strategies())


HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"'$\\frac{1}{0}$ & {{ 7*7 }} | `x` 😀\n"
)


def hostile(folder: Path) -> Path:
    """The folder of a bench whose every text is HOSTILE."""
    strategy = Axis("strategy", ("single", HOSTILE), ("parallel.data",), True)
    plans = [
        CellPlan("single", {"strategy": "single"}, 1, HOSTILE, None),
        CellPlan("odd", {"strategy": HOSTILE}, 1, HOSTILE, "single"),
        CellPlan("control", {"strategy": "single"}, 1, HOSTILE, "single", control=True),
        CellPlan("broken", {"strategy": HOSTILE}, 1, "other", None),
    ]
    made = {
        plan.id: record(
            plan, environment={"device": HOSTILE}, notes=[HOSTILE], command=[HOSTILE], peak=MIB
        )
        for plan in plans[:3]
    }
    made["broken"] = record(plans[3], status="failed", reason=HOSTILE)
    sweep = dataclasses.replace(
        sweep_of((strategy,), plans, HOSTILE), equal={HOSTILE: {HOSTILE: HOSTILE}}
    )
    return write(folder, sweep, made)
