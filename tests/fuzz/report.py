"""What a fuzz came to, as text: how often what was drawn, why it was refused, how large the
differences were."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

from tests.fuzz.draws import Draw
from tests.fuzz.judge import Result
from tests.parity.harness import TOLERANCE

STATUSES = ("equal", "noise", "refused", "failed")


def report(results: Sequence[tuple[Draw, Result]]) -> str:
    """The tables, and a line for each failure."""
    parts = [_counts("family", results, lambda draw: [draw.family])]
    parts.append(_counts("layout", results, lambda draw: [draw.layout]))
    parts.append(_counts("option", results, Draw.options))
    reasons = Counter(
        _without_numbers(result.reason) for _, result in results if result.status == "refused"
    )
    parts.append(
        "\n".join(["refused", *(f"{count:6}  {reason}" for reason, count in reasons.most_common())])
    )
    for status, precision in product(("equal", "noise"), ("float32", "bfloat16")):
        errors = [
            result.errors
            for draw, result in results
            if result.status == status and draw.cfg.training.precision == precision
        ]
        if errors:
            largest = (f"{kind} {max(error[kind] for error in errors):.1e}" for kind in TOLERANCE)
            parts.append(f"largest differences ({status}, {precision}): {', '.join(largest)}")
    statuses = Counter(result.status for _, result in results)
    failed = [
        f"FAILED {draw.id}: {result.reason}"
        for draw, result in results
        if result.status == "failed"
    ]
    summary = ", ".join(f"{statuses[status]} {status}" for status in STATUSES)
    return "\n\n".join([*parts, "\n".join([*failed, f"{len(results)} drawn: {summary}"])])


def _counts(
    title: str, results: Sequence[tuple[Draw, Result]], names_of: Callable[[Draw], list[str]]
) -> str:
    table: dict[str, Counter[str]] = {}
    for draw, result in results:
        for name in names_of(draw):
            table.setdefault(name, Counter())[result.status] += 1
    width = max(map(len, [title, *table]))
    lines = [f"{title:{width}} {'drawn':>6}" + "".join(f"{status:>9}" for status in STATUSES)]
    for name, counts in sorted(table.items()):
        lines.append(
            f"{name:{width}} {counts.total():6}"
            + "".join(f"{counts[status] or '-':>9}" for status in STATUSES)
        )
    return "\n".join(lines)


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+", "N", re.sub(r"/\S+", "PATH", reason))[:110]
