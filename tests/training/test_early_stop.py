"""When a run ends because its validation loss no longer improves."""

from __future__ import annotations

import pytest

from shardwise.base.interfaces import Evaluation
from shardwise.training.early_stop import EarlyStop, early_stop


def stop_after(losses: list[float], patience: int, tokens: dict[int, int]) -> EarlyStop | None:
    """The early stop after evaluations of these losses after steps 0, 10, 20, ..."""
    evaluations = [Evaluation(10 * i, loss, 1.0, tokens.get(i, 8)) for i, loss in enumerate(losses)]
    return early_stop(evaluations, patience, 10 * (len(losses) - 1))


@pytest.mark.parametrize(
    ("losses", "patience", "tokens", "expected"),
    [
        ([], 1, {}, None),
        ([9.0], 1, {}, None),
        ([9.0, 5.0, 6.0, 7.0, 8.0], 0, {}, None),
        ([9.0, 5.0, 6.0], 2, {}, None),
        ([9.0, 5.0, 6.0, 7.0], 2, {}, (30, 10, 5.0)),
        # The count begins anew with each loss that is lower than all before.
        ([9.0, 5.0, 6.0, 4.0, 4.5], 2, {}, None),
        ([9.0, 5.0, 6.0, 4.0, 4.5, 4.2], 2, {}, (50, 30, 4.0)),
        # Better than the one before is not enough, nor is as good as the best.
        ([9.0, 5.0, 7.0, 6.0], 2, {}, (30, 10, 5.0)),
        ([9.0, 5.0, 5.0, 5.0], 2, {}, (30, 10, 5.0)),
        # An untrained model is no rival: a checkpoint of it is never kept.
        ([1.0, 5.0, 4.0, 3.0], 1, {}, None),
        # Losses over other text are not compared.
        ([9.0, 1.0, 5.0, 6.0], 1, {0: 4, 1: 4}, (30, 20, 5.0)),
        ([9.0, 1.0, 5.0, 6.0], 2, {0: 4, 1: 4}, None),
    ],
)
def test_patience_counts_evaluations_since_the_best(losses, patience, tokens, expected):
    assert stop_after(losses, patience, tokens) == (expected and EarlyStop(*expected))
