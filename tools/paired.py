"""Compare programs in pairs: named sides take turns, and a ratio is that of one round.

What else a machine does comes and goes, and falls on all sides of a round alike. So ratios are
taken round by round, and their median counts. The programs of tools/ and tests/gpu measure and
write with this module. It needs no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardwise.base.records.record import dumps
from shardwise.base.safety import write_atomically

T = TypeVar("T")
Side = Callable[[int], Mapping[str, float]]
"""Runs the round of a given number and returns its figures by name."""
CONFIDENCE = 0.95


def turns(sides: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield the number of a round and a side; every second round has the sides in reversed order.

    So each side is the first one in every second round.
    """
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            yield number, side


def take_turns(
    sides: Mapping[str, Side], rounds: int, warm_up: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Run the sides in rounds; return figure -> side -> its values, one per round.

    `warm_up` more rounds come first and are left out.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for number, name in turns(list(sides), warm_up + rounds):
        for figure, value in sides[name](number).items():
            of_side = values.setdefault(figure, {}).setdefault(name, [])
            if number >= warm_up:
                of_side.append(value)
    return values


def timed(work: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Return what `work` returns, and its seconds: `wall`, and `cpu` of all threads of the process.

    CPU time leaves out what a process waits for others, so other load changes it less.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the values of all rounds, their median, and an interval around it.

    The interval goes from one order statistic to another. In `interval_holds_median` of all such
    series it holds the true median, whatever the distribution: in 95 % or a little more, or in
    fewer where there are less than six rounds and it holds all values.
    """
    ordered, left_out = sorted(values), outside(len(values))
    return {
        "median": _rounded(statistics.median(ordered)),
        "interval": [_rounded(ordered[left_out]), _rounded(ordered[-1 - left_out])],
        "interval_holds_median": round(1 - 2 * _share_below(len(values), left_out), 4),
        "rounds": [_rounded(value) for value in values],
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Return the spread of the ratios of two sides, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def outside(number: int) -> int:
    """Return how many of `number` sorted values may be left out of the interval at each end."""
    left_out = 0
    while left_out + 1 < number / 2 and 2 * _share_below(number, left_out + 1) <= 1 - CONFIDENCE:
        left_out += 1
    return left_out


def _share_below(number: int, left_out: int) -> float:
    """Return the probability that at most `left_out` of `number` values lie below the median."""
    return sum(math.comb(number, below) for below in range(left_out + 1)) * 0.5**number


def _rounded(value: float) -> float:
    """Return a value with six significant digits."""
    return float(f"{value:.6g}")


class Results:
    """The JSON file of a program: what is equal in all rows, and a row per case.

    The file is complete JSON after every row. A program that was interrupted and starts again keeps
    the rows of its file if all that is equal, the environment included, is still the same. A
    complete file is measured from scratch.
    """

    def __init__(self, path: Path, equal: Mapping[str, Any]) -> None:
        assert not {"complete", "rows"} & equal.keys(), "these two keys of the file are taken"
        self.path = path
        self.equal: dict[str, Any] = json.loads(dumps(equal))
        self.rows: dict[str, Any] = {}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            rows = before.pop("rows", {})
            if before == {"complete": False, **self.equal}:
                self.rows = rows

    def add(self, case: str, measure: Callable[[], Any]) -> None:
        """Measure a case, print its row and write the file, unless the file has the case."""
        if case in self.rows:
            return
        self.rows[case] = measure()
        print(case, dumps(self.rows[case]), flush=True)
        self.write(complete=False)

    def write(self, complete: bool = True) -> None:
        """Write the file; `complete` says that no case is missing."""
        write_json(self.path, {"complete": complete, **self.equal, "rows": self.rows})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, and make its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dumps(content, indent=1) + "\n")


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. In a cell `|` becomes `/`."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def command_line(doc: str | None, out: Path) -> argparse.ArgumentParser:
    """Return the command line of a program: its docstring as help, and where its results go."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out)
    return parser
