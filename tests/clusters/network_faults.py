"""Do harm to the cable between two nodes, and see each run end as it should.

`python -m tests.clusters.network_faults` does it to every layout and writes
results/network-faults.json; a test does it to some. A run is under torchrun, with two ranks on each
node. Either it ends with the losses of an undisturbed run (see `_agree`), or it stops in time with
a line that says why, and the same command ends so once the cable is mended.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.metrics.hardware import environment
from tests.clusters.nodes import Nodes, why_not
from tests.clusters.runs import losses, prepare

RESULTS = Path(__file__).parents[2] / "results" / "network-faults.json"
STEPS, SAVE_EVERY = 12, 4
TIMEOUT_SECONDS = 60
"""`launch.timeout_seconds`. A rank that waits while others read files waits twice as long."""
END_SECONDS = 30
"""How much longer processes may take to end, on a busy machine."""
START_SECONDS = 600
SAME, RESUMED = "same losses", "stopped with one line; resumed to the same losses"
LAYOUTS = {
    "ddp": ("data=ddp",),
    "fsdp2": ("data=fsdp2",),
    "hsdp": ("data=fsdp2", "dp_replicate=2"),
    "ddp-tp": ("data=ddp", "tp=2"),
    "pp-tp": ("data=single", "pp=2", "tp=2"),
    "pp-fsdp2": ("data=fsdp2", "pp=2"),
    "ddp by launch": ("data=ddp",),
    "pp-tp by launch": ("data=single", "pp=2", "tp=2"),
}
"""The keys of `parallel`. Ranks are started by torchrun with `--master-addr`, or by `shardwise
launch`, whose agents meet by torch's c10d backend."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to the cable."""

    outcome: str
    change: Mapping[str, Any] = field(default_factory=lambda: {"is_cut": True})
    """Of the attributes of Cable."""
    after: str = ""
    """A file of the run that has to be there first; none: from the beginning on."""
    lines: int = 1
    """How many lines the file has then."""
    seconds: float | None = None
    """How long it lasts; None: to the end of the run."""


FAULTS = {
    "cut for 5 s in a step": Fault(SAME, after="metrics.jsonl", lines=6, seconds=5),
    "cut for 20 s in a step": Fault(SAME, after="metrics.jsonl", lines=6, seconds=20),
    "cut in a step": Fault(RESUMED, after="metrics.jsonl", lines=6),
    "cut before the first step": Fault(RESUMED, after=".lock", lines=0),
    "cut as a checkpoint is written": Fault(RESUMED, after="checkpoints/step-8.tmp", lines=0),
    "every packet takes 5 ms": Fault(SAME, {"seconds": 0.005}),
    "1 of 100 packets is lost": Fault(SAME, {"loss": 0.01}),
    "1 of 10 packets is overtaken": Fault(SAME, {"late": 0.1}),
}


def start(nodes: Nodes, layout: str, name: str, *overrides: str) -> None:
    """Start the run of a layout in the folder `runs/NAME`."""
    nodes.start(
        *(f"--parallel.{key}" for key in LAYOUTS[layout]),
        *("--training.micro_batch_size=1", "--training.eval_every=0", "--measure.memory=false"),
        *("--training.sample=null", "--data.validation=0", f"--training.steps={STEPS}"),
        *(f"--training.save_every={SAVE_EVERY}", f"--launch.timeout_seconds={TIMEOUT_SECONDS}"),
        *(f"--training.output_dir=runs/{name}", *overrides),
        by_launch=layout.endswith("launch"),
    )


def undisturbed(nodes: Nodes, layout: str) -> list[float]:
    """Return the losses of a run to which nothing is done."""
    name = f"{layout}-undisturbed".replace(" ", "-")
    if len(losses(nodes.folder, name)) < STEPS:
        start(nodes, layout, name)
        assert nodes.wait(START_SECONDS) == [0, 0], nodes.log(0) + nodes.log(1)
    return losses(nodes.folder, name)


def outcome_of(nodes: Nodes, layout: str, fault: str) -> str:
    """Return how a run ends to which the fault happens: SAME, RESUMED, or what is wrong."""
    expected = undisturbed(nodes, layout)
    name = f"{layout}-{fault}".replace(" ", "-")
    start(nodes, layout, name)
    try:
        codes = _disturb(nodes, nodes.folder / "runs" / name, FAULTS[fault])
    finally:
        nodes.cable.mend()
    if None in codes:
        where = [i for i, code in enumerate(codes) if code is None]
        nodes.end()
        return f"hangs on nodes {where}"
    logs = [nodes.log(0), nodes.log(1)]
    if codes == [0, 0]:
        return SAME if _agree(layout, losses(nodes.folder, name), expected) else "other losses"
    done = losses(nodes.folder, name)
    if not _agree(layout, done, expected[: len(done)]):
        return "other losses before it stopped"
    errors = [{x for x in log.splitlines() if x.startswith("error")} for log in logs]
    if not layout.endswith("launch"):  # an agent says what its own node has seen
        errors = [errors[0] | errors[1]]
    start(nodes, layout, name, "--training.resume=auto")
    if (again := nodes.wait(START_SECONDS)) != [0, 0]:
        return f"cannot resume: {again}"
    if not _agree(layout, losses(nodes.folder, name), expected):
        return "other losses after a resume"
    is_one_line = all(len(lines) <= 1 for lines in errors) and any(errors)
    return RESUMED if is_one_line else f"resumed, but said {[*map(sorted, errors)]}"


def _agree(layout: str, a: list[float], b: list[float]) -> bool:
    """Return whether losses are equal, bit for bit or, by launch, to rounding.

    torch's agents number the nodes as they come, so after a restart a sum may have another order.
    """
    if not layout.endswith("launch"):
        return a == b
    return len(a) == len(b) and all(map(partial(math.isclose, rel_tol=1e-6), a, b))


def _disturb(nodes: Nodes, run: Path, fault: Fault) -> list[int | None]:
    """Let the fault happen and return the exit codes, None of a node that does not end in time."""
    path, end = run / fault.after, time.monotonic() + START_SECONDS
    while fault.after and not _has(path, fault.lines):
        assert time.monotonic() < end, f"{path} did not come"
        if nodes.wait(0.01) != [None, None]:
            break
    for key, value in fault.change.items():
        setattr(nodes.cable, key, value)
    if fault.outcome == SAME:
        if fault.seconds is not None:
            nodes.wait(fault.seconds)
            nodes.cable.mend()
        return nodes.wait(START_SECONDS)
    return nodes.wait(2 * TIMEOUT_SECONDS + END_SECONDS)


def _has(path: Path, lines: int) -> bool:
    if not lines:
        return path.exists()
    return path.exists() and len(path.read_text().splitlines()) >= lines


def main() -> None:
    """Do everything to every layout and write the results."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    args = parser.parse_args()
    reason = why_not()
    assert reason is None, reason
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    rows = {(row["layout"], row["fault"]): row for row in old["rows"]}
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as nodes:
        prepare(Path(folder))
        for layout in args.layouts:
            for fault in args.faults:
                outcome = outcome_of(nodes, layout, fault)
                print(f"{layout}: {fault}: {outcome}", flush=True)
                rows[layout, fault] = {"layout": layout, "fault": fault, "outcome": outcome}
                content = {"environment": environment(), "rows": [*rows.values()]}
                RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
