"""The columns of a report's tables: what they show of a cell, on the page and in Markdown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from shardwise.base.words import NOTHING, number, percent, ratio, scientific, seconds, size, span
from shardwise.lab.report.tables import Row


@dataclass(frozen=True)
class Column:
    """A column of numbers."""

    heading: str
    read: Callable[[Row], Any]  # a number, a pair of numbers, or None
    write: Callable[[Any], str]
    remark: Callable[[Row], str] = lambda row: ""  # the cell that a ratio is relative to

    def text(self, row: Row) -> str:
        """Return the text of a cell."""
        return self.write(self.read(row))

    def sort_value(self, row: Row) -> str:
        """Return the number by which the page sorts, or nothing where it is missing or NaN."""
        value = self.read(row)
        if isinstance(value, tuple):
            value = value[0]
        return "" if value is None or value != value else repr(value)


def with_numbers(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which some row has a number; all of them if none has."""
    found = [one for one in columns if any(one.text(row) != NOTHING for row in rows)]
    return found or list(columns)


def loss_text(value: float | None) -> str:
    """Return a loss with four decimals."""
    return NOTHING if value is None else f"{value:.4f}"


def _relative(word: str, name: str) -> Callable[[Row], str]:
    """Return a function that names the other cell of a ratio."""
    return lambda row: f"{word} {row.relative_to[name]}" if name in row.relative_to else ""


def last_loss(row: Row) -> float | None:
    """Return the loss of the last step of a cell that has losses."""
    return row.record.losses[-1] if row.record and row.record.losses else None


def _validation(row: Row) -> tuple[float, ...] | None:
    """Return the last validation loss, and the first one where there are several."""
    losses = [loss for _, loss in row.validation]
    ends = (losses[-1], losses[0]) if len(losses) > 1 else tuple(losses)
    return ends or None


def _perplexity(row: Row) -> float | None:
    if not row.validation or not row.validation[-1][1] < 700:
        return None
    return math.exp(row.validation[-1][1])


def _first_to_last(last_first: tuple[float, ...] | None) -> str:
    if last_first is None:
        return NOTHING
    return " → ".join(loss_text(loss) for loss in reversed(last_first))


def _excess(row: Row) -> int | None:
    """Return the bytes that were counted less those of the formula."""
    if row.sent_bytes is None or row.predicted_bytes is None:
        return None
    return row.sent_bytes - row.predicted_bytes


def _signed(num_bytes: int | None) -> str:
    if not num_bytes:
        return NOTHING if num_bytes is None else "equal"
    return f"{'+' if num_bytes > 0 else '-'}{size(abs(num_bytes))}"


def _between_rounds(row: Row) -> float | None:
    if row.record is None or row.num_good_rounds < 2:
        return None
    return row.record.largest_round_difference


def _of_layers(field: str, reduce: Callable[[list[float]], float]) -> Callable[[Row], float | None]:
    """Return a function that gives one number for all layers with routers."""

    def read(row: Row) -> float | None:
        by_layer = getattr(row.routing, field, [])
        return reduce(by_layer) if by_layer else None

    return read


PROCESSES = Column("Processes", lambda row: row.plan.nproc, str)
SPEED = Column("Tokens/s", lambda row: row.tokens_per_second, number)
SAMPLES = Column(
    "Samples/s", lambda row: row.figures.samples_per_second if row.figures else None, number
)
SPEED_RANGE = Column("Min – max", lambda row: row.tokens_range, span)
STEP = Column("Median step", lambda row: row.step_seconds.get("p50"), seconds)
PEAK = Column("Peak memory", lambda row: row.peak_memory_bytes, size)
MFU = Column("MFU", lambda row: row.figures.mfu if row.figures else None, percent)

FIRST_STEP = Column(
    "To first step", lambda row: row.figures.first_step_seconds if row.figures else None, seconds
)

SENT_COUNTED = Column("Sent, counted", lambda row: row.sent_bytes, size)
SENT_BY_FORMULA = Column("By formula", lambda row: row.predicted_bytes, size)
EXCESS = Column("Counted less formula", _excess, _signed)

SPEEDUP = Column("Speed-up", lambda row: row.speedup, ratio, _relative("over", "speedup"))
OVER_SLOWEST = Column("Over slowest", lambda row: row.over_slowest, ratio)
EFFICIENCY = Column(
    "Efficiency", lambda row: row.efficiency, percent, _relative("of", "efficiency")
)
SAVING = Column("Memory saved", lambda row: row.saving, percent, _relative("of", "saving"))

LAST_LOSS = Column("Last loss", last_loss, loss_text)
DIFFERENCE = Column("Largest difference", lambda row: row.difference, scientific)
TOLERANCE = Column("Tolerance", lambda row: row.tolerance, scientific)
VALIDATION = Column("Validation loss", _validation, _first_to_last)
PERPLEXITY = Column("Last perplexity", _perplexity, number)
NORM_DIFFERENCE = Column(
    "Largest relative difference of a norm", lambda row: row.norm_difference, scientific
)
BETWEEN_ROUNDS = Column("Between rounds", _between_rounds, scientific)

BUSIEST = Column("Busiest expert over mean", _of_layers("max_over_mean", max), ratio)
ENTROPY = Column("Entropy", _of_layers("entropy", fmean), lambda share: percent(share, 1))
DROPPED = Column("Dropped", _of_layers("dropped", fmean), lambda share: percent(share, 1))
MOST_DROPPED = Column(
    "Dropped in one layer", _of_layers("dropped", max), lambda share: percent(share, 1)
)

DIFFERENCES = (LAST_LOSS, DIFFERENCE, TOLERANCE, BETWEEN_ROUNDS)
"""How the losses of a cell compare with those of its reference."""
TRAINING = (VALIDATION, PERPLEXITY, NORM_DIFFERENCE)
"""The validation loss of a cell, and how its gradient norms compare with its reference's."""
SENT = (PROCESSES, SENT_COUNTED, SENT_BY_FORMULA, EXCESS)
"""Columns of the bytes that leave the rank that sends most in a step."""
ROUTING = (BUSIEST, ENTROPY, DROPPED, MOST_DROPPED)
"""How evenly routers gave tokens to experts: the mean or the largest number of all layers."""
RATIOS = (PROCESSES, SPEEDUP, OVER_SLOWEST, EFFICIENCY, SAVING)
"""How a cell compares with others of its group."""
FIGURES = (PROCESSES, SPEED, SPEED_RANGE, SAMPLES, STEP, PEAK, MFU, SENT_COUNTED, FIRST_STEP)
"""Columns of what was measured of a cell."""
MARKDOWN = (
    PROCESSES,
    SPEED,
    SPEED_RANGE,
    SPEEDUP,
    PEAK,
    SAVING,
    SENT_COUNTED,
    FIRST_STEP,
    VALIDATION,
    DIFFERENCE,
)
"""The numbers of the one table that a Markdown report has of a group."""
