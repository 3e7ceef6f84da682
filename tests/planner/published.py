"""Published runs beside their plans; tools/plan_published.py writes what this says."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.base.words import percent, seconds
from shardwise.config.presets import MODELS
from shardwise.config.run_file import parse_config
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.exact import Choice, explain

RUNS = Path(__file__).parents[2] / "results" / "plan" / "published.yaml"
KEYS = {
    "model": {"base": "none", "dtype": "bfloat16", "attention": "auto"},
    "training": {
        **{"micro_batch_size": 1, "checkpointing": "none", "compile": "none"},
        **{"matmul": "default", "loss": "auto"},
    },
}
"""Keys of the run file that a run may have, with what holds where it has none."""
KINDS = ("dense", "lora", "long", "experts", "hybrid")


class Compared(NamedTuple):
    """A published run beside its plan."""

    name: str
    run: Mapping[str, Any]
    choice: Choice
    num_devices: int

    @property
    def ratio(self) -> float:
        """Planned over published tokens per second."""
        tokens = self.run["rows"] * self.run["sequence_length"]
        per_device = tokens / self.choice.time.total / self.num_devices
        return per_device / self.run["per_device"]

    @property
    def is_alike(self) -> bool:
        """Whether the published program does nearly the same work."""
        return self.run.get("alike", True)


def published_runs() -> dict[str, dict[str, Any]]:
    """Return the published runs by name, each with what its program shares."""
    runs = {}
    for program, shared in yaml.safe_load(RUNS.read_text(encoding="utf-8")).items():
        own = shared.pop("runs")
        runs |= {name: {"program": program} | shared | keys for name, keys in own.items()}
    return runs


def compared(names: Collection[str] = ()) -> Iterator[Compared]:
    """Yield the published runs, or those of the names, beside their plans."""
    with tempfile.TemporaryDirectory() as folder:
        for name, run in published_runs().items():
            if not names or name in names:
                question = question_of(run, Path(folder) / name)
                yield Compared(name, run, explain(question)[0], question.num_ranks)


def question_of(run: Mapping[str, Any], folder: Path) -> Question:
    """Return what is asked of the planner; a model of another shape than its preset's lies in the
    folder then.
    """
    path = MODELS / run["preset"]
    if "shape" in run:
        config = json.loads((path / "config.json").read_text(encoding="utf-8")) | run["shape"]
        path = folder
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sections: dict[str, Any] = {
        section: {key: run.get(key, default) for key, default in keys.items()}
        for section, keys in KEYS.items()
    }
    sections["model"]["path"] = str(path)
    sections["data"] = {"train": "any", "sequence_length": run["sequence_length"]}
    sections["training"] |= {"output_dir": "any", "precision": "bfloat16"}
    sections["training"]["global_batch_size"] = run["rows"]
    cfg = parse_config(sections | {"parallel": run["parallel"], "lora": run.get("lora")}, "any")
    return Question(cfg, cluster_of(run["devices"], run.get("nodes", 1), run.get("link")))


def sums(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield the table of errors by kind of run, then of all and of those kept back."""
    yield "| runs | number | median ratio | median error | within 30% |"
    yield "|---|---:|---:|---:|---:|"
    alike = [row for row in rows if row.is_alike]
    groups = {kind: [row for row in alike if row.run["kind"] == kind] for kind in KINDS}
    groups["all of these"] = alike
    groups["kept back"] = [row for row in alike if row.run["use"] == "check"]
    groups["other programs"] = [row for row in rows if not row.is_alike]
    for name, of_group in groups.items():
        ratios = [row.ratio for row in of_group]
        errors = [abs(ratio - 1) for ratio in ratios]
        near = percent(sum(error <= 0.3 for error in errors) / len(errors))
        middle = percent(statistics.median(errors))
        cells = [name, str(len(ratios)), f"{statistics.median(ratios):.2f}", middle, near]
        yield f"| {' | '.join(cells)} |"


def each(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield the page of all runs."""
    yield "# Published runs beside their plans\n"
    yield "Written by `tools/plan_published.py`; sources and layouts are in `published.yaml`.\n"
    yield "| run | kind | devices | published | plan over it | step | use | unlike |"
    yield "|---|---|---|---:|---:|---:|---|---|"
    for row in rows:
        run = row.run
        nodes = f"{number} x " if (number := run.get("nodes", 1)) > 1 else ""
        cells = [
            *(row.name, run["kind"], nodes + run["devices"]),
            *(f"{run['per_device']:,.0f}", f"{row.ratio:.2f}", seconds(row.choice.time.total)),
            *(run["use"] if row.is_alike else "another program", run["unlike"]),
        ]
        yield f"| {' | '.join(cells)} |"
