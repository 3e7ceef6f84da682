"""Run a layout and one process on this CPU, and tell whether they computed the same."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE
from rich.table import Table

from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import layout_of
from shardwise.base.words import scientific
from shardwise.config import RunConfig
from shardwise.lab.proof import harness
from shardwise.lab.proof.harness import TOLERANCE, Differences, Outcome, RandomRows
from shardwise.lab.proof.small_run import SmallRun, in_float32, is_in_16_bits
from shardwise.launch.local import start_processes

NOISE = 4
"""How many times what rounding alone does to one process a layout may differ by."""
KINDS = {
    "loss": "loss",
    "grad": "gradients",
    "norm": "gradient norm",
    "param": "weights",
    "saved": "saved file",
}
MOST_TENSORS = 12
"""The most tensors that are listed one by one."""
BETWEEN_RANKS = "between ranks"
"""The name of the difference among the ranks' own losses and norms, which must be none."""


@dataclass(frozen=True)
class Wrong:
    """A number or a tensor that is not what one process computes."""

    kind: str
    name: str
    difference: float
    axes: tuple[str, ...]
    """The mesh axes that the tensor is sharded over."""


@dataclass(frozen=True)
class Proof:
    """Result of a comparison."""

    run: SmallRun
    differences: Differences
    """Differences between the layout and one process."""
    noise: Differences
    """Differences of one process from itself, if only the order of sums and the last bits of
    weights differ."""
    tolerance: Mapping[str, float]
    weaknesses: tuple[str, ...]
    """Why the comparison proves less than it could."""
    axes: Mapping[str, list[str]]

    def limit(self, kind: str, name: str) -> float:
        """Return the largest difference that is allowed."""
        return max(self.tolerance[kind], NOISE * self.noise[kind].get(name, 0.0))

    @property
    def wrong(self) -> list[Wrong]:
        """All that is wrong, the worst first."""
        wrong = [
            Wrong(kind, name, difference, tuple(self.axes.get(name, ())))
            for kind, by_name in self.differences.items()
            for name, difference in by_name.items()
            if not difference <= self.limit(kind, name)
        ]
        # NaN comes first.
        return sorted(wrong, key=lambda one: (one.difference == one.difference, -one.difference))


def prove(run: SmallRun, folder: Path) -> Proof | int:
    """Compare a layout with one process. What the processes leave is in `folder`.

    Returns the exit code of processes that failed; the reason is then on stderr.
    """
    alone = run.one_process()
    nudged = replace(alone, measure=replace(alone.measure, nudge_weights=True))
    sides = [
        ("layout", run.cfg, run.num_ranks, False),
        ("one process", alone, 1, False),
        ("noise", nudged, 1, True),
    ]
    if is_in_16_bits(run.cfg):
        sides.append(("float32", in_float32(alone), 1, False))
    outcomes: dict[str, list[Outcome]] = {}
    for name, side, num_ranks, backwards in sides:
        place = folder / name
        place.mkdir()
        training = replace(side.training, output_dir=str(place))
        compute = partial(_compute, run.rows, backwards)
        code = start_processes(replace(side, training=training), num_ranks, compute)
        if code:
            return code
        outcomes[name] = [_read(_file(place, rank)) for rank in range(num_ranks)]
    return _compare(run, outcomes)


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.pt")


def _compute(rows: RandomRows, backwards: bool, cfg: RunConfig, mesh: Mesh) -> None:
    """Run one side as one rank, and leave what it saw in the output folder."""

    def batches_of(mesh: Mesh, step: int) -> list[Any]:
        return harness.microbatches(cfg, mesh, step, rows)[:: -1 if backwards else 1]

    outcome = harness.run(cfg, mesh, batches_of)
    torch.save(vars(outcome), _file(cfg.training.output_dir, dist.get_rank()))


def _read(path: Path) -> Outcome:
    return Outcome(**torch.load(path, weights_only=True))


def _compare(run: SmallRun, outcomes: Mapping[str, list[Outcome]]) -> Proof:
    ranks, (reference,), noise = outcomes["layout"], outcomes["one process"], outcomes["noise"]
    differences = harness.differences(ranks, reference)
    seen = {(tuple(rank.losses), tuple(rank.norms), rank.eval_loss) for rank in ranks}
    differences["loss"][BETWEEN_RANKS] = 0.0 if len(seen) == 1 else float("inf")
    tolerance: Mapping[str, float] = TOLERANCE
    if "float32" in outcomes:
        tolerance = harness.tolerance(reference, *outcomes["float32"])
    max_norm = run.cfg.optimizer.max_grad_norm
    assert max_norm is not None
    return Proof(
        run=run,
        differences=differences,
        noise=harness.differences(noise, reference),
        tolerance=tolerance,
        weaknesses=tuple(harness.weaknesses(reference, max_norm)),
        axes={name: axes for rank in ranks for name, axes in rank.axes.items()},
    )


def heading(run: SmallRun) -> Iterator[str]:
    """Yield lines on what is compared, and on what was made smaller."""
    axes = ", ".join(f"{axis} {size}" for axis, size in run.axes.items())
    before, after = run.num_parameters
    yield (
        f"{layout_of(run.cfg.parallel)} on {run.num_ranks} processes "
        f"({axes or 'nothing is split'}) against one process, on this CPU"
    )
    if run.num_ranks == 1:
        yield "note: one process is compared with one process; give a layout (--parallel.data=ddp)"
    precision = "in the run's own precision" if is_in_16_bits(run.cfg) else "in float32"
    yield f"compared {precision} under SGD, with random weights and rows"
    layout = {key: pair for key, pair in run.changes.items() if key.startswith("parallel.")}
    model = {key: pair for key, pair in run.changes.items() if key not in layout}
    if model:
        yield f"model: {after:,} parameters in place of {before:,}: {_changed(model)}"
    if layout:
        yield (
            f"layout: {_changed(layout)}: two ranks along an axis run all that it communicates; "
            "--nproc N takes more"
        )
    yield from (f"note: {note}" for note in run.notes)


def _changed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes.items())


def differences_table(proof: Proof) -> Table:
    """Return a table with a row for the loss of each step and for each other kind of number."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "largest difference", "tolerance", "rounding alone", ""):
        table.add_column(column, no_wrap=True)
    wrong = {(one.kind, one.name) for one in proof.wrong}
    for kind, title in KINDS.items():
        by_name, noise = proof.differences[kind], proof.noise[kind]
        rows = {f"{title}, {name}": [name] for name in by_name}
        if kind != "loss":
            rows = {f"{title} ({len(by_name)})": [*by_name]}
        for row, names in rows.items():
            is_wrong = any((kind, name) in wrong for name in names)
            table.add_row(
                row,
                scientific(harness.maximum(by_name[name] for name in names)),
                scientific(proof.tolerance[kind]),
                scientific(max(noise.get(name, 0.0) for name in names)),
                "WRONG" if is_wrong else "equal",
            )
    return table


def wrong_lines(proof: Proof) -> Iterator[str]:
    """Yield lines that name the numbers and tensors that are wrong, the worst first."""
    columns = "{:14}{:>12}{:>17}  {:22}{}"
    yield columns.format("wrong", "difference", "rounding alone", "sharded over", "step or tensor")
    for one in proof.wrong[:MOST_TENSORS]:
        noise = proof.noise[one.kind].get(one.name, 0.0)
        axes = ", ".join(one.axes) or "-"
        numbers = scientific(one.difference), scientific(noise)
        yield columns.format(KINDS[one.kind], *numbers, axes, one.name)
    if len(proof.wrong) > MOST_TENSORS:
        yield f"and {len(proof.wrong) - MOST_TENSORS} more"


def as_data(proof: Proof) -> dict[str, Any]:
    """Return a proof as plain data, for `--json`."""
    run = proof.run
    return {
        "equal": not proof.wrong,
        "layout": layout_of(run.cfg.parallel),
        "num_ranks": run.num_ranks,
        "axes": run.axes,
        "smaller": {key: list(pair) for key, pair in run.changes.items()},
        "num_parameters": list(run.num_parameters),
        "notes": [*run.notes, *proof.weaknesses],
        "tolerance": dict(proof.tolerance),
        "largest": harness.largest(proof.differences),
        "wrong": [vars(one) for one in proof.wrong],
        "differences": proof.differences,
        "noise": proof.noise,
        "run": run.cfg.to_dict(),
    }
