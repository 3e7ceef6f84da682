"""A draw under its layout beside one process: equal, equal up to rounding, refused, or failed."""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from shardwise.assembly.describe import describe
from shardwise.base.schedule.orders import ORDERS
from shardwise.config import Parallel, RunConfig, UserError
from shardwise.models import load
from tests.distributed import PATIENCE, run_ranks
from tests.fuzz.draws import Draw, Rows
from tests.parity.harness import TOLERANCE, Outcome, differences, microbatches, run
from tests.parity.layouts import CONTEXT, EXPERTS, PROVEN

NOISE = 4.0
"""How many times what one process differs from itself is still rounding."""
KINDS = ("grad", "loss", "norm", "param", "saved")
"""In the order in which a difference is reported; the gradients are the first step's."""
LAYOUT_WORDS = (
    "parallel.",
    "processes",
    "tensor parallelism",
    "pipeline",
    " stage",
    *(f" {name}" for name in (*PROVEN, *CONTEXT, *EXPERTS, *ORDERS) if name != "single"),
)
"""A refusal that one process does not share has one of them in it."""
Differences = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Result:
    """What became of a draw."""

    status: str  # equal | noise | refused | failed
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # the largest of each kind
    detail: str = ""  # a traceback


def judge(draw: Draw, bug: Callable[[], None] | None = None) -> Result:
    """Run a draw; `bug` is planted into the ranks of the layout, not into the one process."""
    try:
        return _judge(draw, bug)
    except Exception as error:  # of the check, or, in its message, of a rank, if it is no hang
        reason = str(error).strip().splitlines()[-1:]
        return Result(
            "failed", "".join(reason) or type(error).__name__, detail=traceback.format_exc()
        )


def _judge(draw: Draw, bug: Callable[[], None] | None) -> Result:
    refused = _refusal(draw.cfg, draw.num_ranks)
    if refused:
        shared = _refusal(replace(draw.cfg, parallel=Parallel()), 1) is not None
        if not shared and not any(word in f" {refused}" for word in LAYOUT_WORDS):
            return Result("failed", f"refused under the layout only: {refused}")
        return Result("refused", refused)
    if alone := _refusal(draw.one_process(), 1):
        return Result("failed", f"refused in one process only: {alone}")
    outcomes = run_ranks(draw.num_ranks, attempt, draw.cfg, draw.rows, bug)
    reference = _alone(draw.one_process(), draw)
    if len({(tuple(one.losses), tuple(one.norms), one.eval_loss) for one in outcomes}) > 1:
        return Result(
            "failed",
            f"the ranks report different losses or norms: {[one.losses for one in outcomes]}",
        )
    return _compared(draw, outcomes, reference)


def _refusal(cfg: RunConfig, num_ranks: int) -> str | None:
    """Why a run is refused, as the launcher and every rank find it; None where it may run."""
    try:
        describe(cfg, num_ranks)
    except UserError as error:
        return str(error)
    return None


def _compared(draw: Draw, outcomes: Sequence[Outcome], reference: Outcome) -> Result:
    found = differences(outcomes, reference)
    errors = _largest(found)
    limits = TOLERANCE
    if draw.cfg.training.precision != "float32":  # as harness.tolerance has it
        changed = _largest(differences([reference], _float(draw, "float32")))
        limits = {kind: max(TOLERANCE[kind], 3 * changed[kind]) for kind in TOLERANCE}
    wrong = [
        (kind, name)
        for kind in KINDS
        for name, error in found[kind].items()
        if not error <= limits[kind]
    ]
    if not wrong:
        return Result("equal", errors=errors)
    noises = _noises(draw, reference)
    noise = {
        (kind, name): max(each[kind].get(name, 0.0) for each in noises) for kind, name in wrong
    }
    beyond = [pair for pair in wrong if not found[pair[0]][pair[1]] <= NOISE * noise[pair]]
    kind, name = (beyond or wrong)[0]
    of_itself = f"one process from itself by {noise[kind, name]:.1e}"
    first = f"{kind} {name} differs by {found[kind][name]:.1e} ({of_itself})"
    return Result(
        "failed" if beyond else "noise", f"{first}, and {len(beyond or wrong) - 1} more", errors
    )


def _noises(draw: Draw, reference: Outcome) -> list[Differences]:
    """What rounding does to the one process: its micro-batches in the other order, its weights off
    by one rounding each, and its own distance from float64.
    """
    cfg = draw.one_process()
    unit = torch.finfo(getattr(torch, cfg.training.precision)).eps / 2
    changed = [
        _alone(cfg, draw, backwards=True),
        *(_alone(cfg, draw, rounded(seed, unit)) for seed in range(6)),
    ]
    if cfg.training.precision == "float32":
        changed.append(_float(draw, "float64"))
    return [differences([outcome], reference) for outcome in changed]


def rounded(seed: int, unit: float) -> Callable[[], None]:
    """Let a rank start from weights each of which is off by `unit` of itself, up or down."""

    def plant() -> None:
        exact, generator = load.random_weights, torch.Generator().manual_seed(seed)

        def moved(*args: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in exact(*args):
                side = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
                yield name, value * (1 + side * unit)

        load.random_weights = moved

    return plant


def attempt(
    cfg: RunConfig, rows: Rows, before: Callable[[], None] | None, backwards: bool = False
) -> Outcome:
    """What this rank sees of a run. A hang leaves every thread's stack on stderr."""
    faulthandler.dump_traceback_later(0.9 * PATIENCE)
    if before is not None:
        before()
    if cfg.model.dtype == "float64":
        functional.grouped_mm = _grouped_mm
    try:
        return run(
            cfg, lambda mesh, step: microbatches(cfg, mesh, step, rows)[:: -1 if backwards else 1]
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Torch's product of each expert's rows [T, in] with its weight [E, in, out], which torch has
    not in float64."""
    groups = rows.tensor_split(offs[:-1].long())
    return torch.cat([group @ weight for group, weight in zip(groups, weights)])


def _alone(
    cfg: RunConfig, draw: Draw, before: Callable[[], None] | None = None, backwards: bool = False
) -> Outcome:
    (outcome,) = run_ranks(1, attempt, cfg, draw.rows, before, backwards)
    return outcome


def _float(draw: Draw, dtype: str) -> Outcome:
    """One process whose weights, adapters and products have this dtype."""
    cfg = draw.one_process()
    adapters = cfg.lora and replace(cfg.lora, dtype="model")
    # float64 is for tests alone
    model = replace(cfg.model, dtype=dtype)  # ty: ignore[invalid-argument-type]
    wide = replace(
        cfg, model=model, lora=adapters, training=replace(cfg.training, precision="float32")
    )
    return _alone(wide, draw)


def _largest(found: Differences) -> dict[str, float]:
    return {kind: max(errors.values()) for kind, errors in found.items()}
