"""Read what the lines of `metrics.jsonl` say of the steps that are done. Needs no torch."""

import functools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Required

from shardwise.checkpoint.index import DamagedError, parse, regular
from shardwise.config.preference import PAIR_METRICS

ROUTING = ("router_max_over_mean", "router_entropy", "router_dropped", "router_dropped_most")
"""The numbers of a step with routed experts, `assembly.routing.STATISTICS`."""
EVALUATED = tuple(f"eval_{name}" for name in PAIR_METRICS)
"""The numbers of an evaluation on pairs of answers."""
_PART_BYTES = 2**16  # of lines that are parsed at once: memory does not grow with the file


@dataclass
class History:
    """The history of a run, eight bytes for each number of a step."""

    losses: "array[float]" = field(default_factory=lambda: array("d"))
    grad_norms: "array[float]" = field(default_factory=lambda: array("d"))
    routing: "dict[str, array[float]]" = field(default_factory=dict)
    pairs: "dict[str, array[float]]" = field(default_factory=dict)
    skipped_steps: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """The step, loss, tokens, and perplexity or, of pairs, metrics of each one."""
    resplits: list[dict[str, Any]] = field(default_factory=list)
    """How layers moved between the ranks of the pipeline."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add what a line tells; KeyError where it lacks a number."""
        if "loss" in line:
            self.losses.append(float(line["loss"]))  # "nan" and "inf" are strings in a file
            self.grad_norms.append(float(line["grad_norm"]))
            self.skipped_steps = line["skipped_steps"]
            for name in ROUTING if ROUTING[0] in line else ():
                self.routing.setdefault(name, array("d")).append(float(line[name]))
            for name in PAIR_METRICS:
                if name in line:
                    self.pairs.setdefault(name, array("d")).append(float(line[name]))
        if "resplit" in line:
            self.resplits.append(line["resplit"])
        if "eval_loss" in line:
            evaluation = {"step": line["step"], "loss": float(line["eval_loss"])}
            if EVALUATED[0] in line:
                given = [pair for pair in zip(PAIR_METRICS, EVALUATED) if pair[1] in line]
                metrics = {name: float(line[key]) for name, key in given}
                evaluation |= {"perplexity": None, "metrics": metrics}
            else:
                evaluation["perplexity"] = float(line["eval_perplexity"])
            self.evaluations.append(evaluation | {"tokens": line["eval_tokens"]})


@functools.lru_cache(maxsize=1)
def read_history(path: Path, sha256: str) -> History:
    """Read the `metrics.jsonl` of this checksum, to check and to continue it; or DamagedError."""
    history = History()
    try:
        with regular(path).open("rb") as file:
            while lines := file.readlines(_PART_BYTES):
                parsed = parse(path, b"[" + b",".join(lines) + b"]", _type_of_lines())
                if len(parsed) != len(lines):
                    raise DamagedError(f"{path} is altered: a line has several objects")
                for line in parsed:
                    history.add(line)
    except KeyError as error:
        raise DamagedError(f"{path} is altered: a line lacks {error}") from None
    return history


@functools.cache
def _type_of_lines() -> Any:
    from typing_extensions import TypedDict  # pydantic cannot check typing's before Python 3.12

    number = float | Literal["nan", "inf", "-inf"]
    losses = ("loss", "grad_norm", "eval_loss", "eval_perplexity")
    numbers = dict.fromkeys((*losses, *ROUTING, *PAIR_METRICS, *EVALUATED), number)
    counts = {"step": Required[int], "skipped_steps": int, "eval_tokens": int}
    fields: Any = {**counts, **numbers, "resplit": dict[str, Any]}
    make: Any = TypedDict
    return list.__class_getitem__(make("Line", fields, total=False))
