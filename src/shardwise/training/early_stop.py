"""Early stopping: a run ends when its validation loss no longer improves.

Whether it ends is a function of its evaluations. A checkpoint holds them in `metrics.jsonl`, so a
resumed run ends after the same step as one that was never interrupted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.base.interfaces import Evaluation


@dataclass(frozen=True)
class EarlyStop:
    """The end of a run before its last step."""

    step: int
    """The last step that was done."""
    best_step: int
    """The step after which the validation loss was lowest."""
    best_loss: float

    def __str__(self) -> str:
        return (
            f"stopped early after step {self.step}: the lowest validation loss is still "
            f"{self.best_loss:.4f}, after step {self.best_step}"
        )


def early_stop(evaluations: Sequence[Evaluation], patience: int, step: int) -> EarlyStop | None:
    """Return the early stop of a run that has done `step` steps, None where it continues.

    A run stops after `patience` evaluations in a row that are no better than the best before them;
    with patience 0 it never does. The evaluation before training does not count, as no checkpoint
    has its weights. Evaluations are compared with the last one if they have as many tokens: a
    resume may change `training.eval_batches`.
    """
    if patience == 0 or not evaluations:
        return None
    compared = [e for e in evaluations if e.step > 0 and e.tokens == evaluations[-1].tokens]
    before, last = compared[:-patience], compared[-patience:]
    if not before:
        return None
    best = min(before, key=lambda evaluation: evaluation.loss)
    if any(evaluation.loss < best.loss for evaluation in last):
        return None
    return EarlyStop(step, best.step, best.loss)
