"""What the programs of this folder share: how they start, stages with limits, tests and steps.

Nothing here imports torch before the sources are on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.paired import write_json

from tests.gpu.processes import Deadline, Worker, run_limited
from tests.gpu.timing import CHECKPOINTING, time_sides
from tests.gpu.workload import Workload, workload_of

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "results" / "gpu"
TOTAL_SECONDS = 600
DTYPE = "weights bfloat16, adapters float32, autocast bfloat16"
Rows = list[dict[str, Any]]


def python(module: str, *arguments: str, **variables: str) -> list[str]:
    """Return the command that runs a module with our sources on the path and without network."""
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables |= {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *settings, sys.executable, "-m", module, *arguments]


def fla_or_torch() -> str:
    """Return what computes the gated delta rule here."""
    return "fla" if find_spec("fla") else "torch"


def processes() -> int:
    """Return how many processes may compute on this CPU at a time."""
    return max(1, (os.cpu_count() or 1) - 2)


class Suite:
    """One call of a program: the device, where results go, and the time that is left."""

    def __init__(
        self,
        device: str,
        folder: Path,
        scratch: Path,
        limits: Mapping[str, float],
        workload: str = "qwen3_5",
    ) -> None:
        self.device, self.folder, self.scratch, self.limits = device, folder, scratch, limits
        self.workload_name = workload
        self.workload: Workload = workload_of(workload, device)
        self.deadline = Deadline(TOTAL_SECONDS)
        self.facts: dict[str, Any] = {}

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace a JSON file of the results."""
        write_json(self.folder / f"{name}.json", content)

    def limit(self, stage: str) -> float:
        """Return the seconds of a stage that begins now: its limit, if as much is left."""
        print(f"--- {stage} ({self.deadline.left():.0f} s left)", flush=True)
        return self.deadline.left(self.limits[stage])

    def run(self, stage: str, command: Sequence[str]) -> dict[str, str]:
        """Run a command to its end or its limit; print the end of its log; return its status."""
        log = self.scratch / f"{stage.replace(' ', '-')}.log"
        outcome = run_limited(command, log, self.limit(stage))
        print(log.read_text(errors="replace")[-4000:], flush=True)
        return outcome

    def draw(self) -> bool:
        """Draw the model at random and read the facts of device and work; return if it worked."""
        drawn = self.scratch / "model"
        drawn.mkdir()
        arguments = (str(drawn), self.device, self.workload_name)
        outcome = self.run("draw", python("tests.gpu.draw", *arguments))
        if outcome["status"] != "ok":
            print(f"error: the model was not drawn: {outcome['reason']}", file=sys.stderr)
            return False
        self.facts = json.loads((drawn / "facts.json").read_text(encoding="utf-8"))
        return True

    def warm(self) -> None:
        """Compile the forms of fla's kernels on all cores, if it is to be used."""
        if self.device != "cuda" or not find_spec("fla"):
            return
        shares, limit = processes(), self.limit("warm")

        def compile_share(share: int) -> str:
            command = python("tests.gpu.warm", str(share), str(shares), str(self.scratch))
            log = self.scratch / f"warm-{share}.log"
            outcome = run_limited(command, log, limit)
            return f"{outcome['status']} {outcome['reason']}".strip()

        with ThreadPoolExecutor(shares) as pool:
            print(*pool.map(compile_share, range(shares)), sep="\n", flush=True)

    def tests(self, gdn: str, only: str = "") -> dict[str, Any]:
        """Run the tests with one choice of kernels; return each test with what it measured.

        A run that is stopped has the tests until then. `only` selects those of a family.
        """
        report = self.scratch / f"tests-{gdn}.jsonl"
        report.touch()
        marked = "gpu" if self.device == "cuda" else "not gpu"
        # Other versions of the libraries than the pinned ones have other warnings.
        options = ["-p", "no:cacheprovider", "--tb=short", "-W", "default", "-m", marked]
        # Their references run on the CPU. Where kernels are tuned, one process has the device.
        if self.device == "cuda" and gdn == "torch" and find_spec("xdist"):
            options += ["-n", str(min(6, processes()))]
        command = python(
            *("pytest", "tests/gpu/test_strategies.py", *options, "-k", only),
            SHARDWISE_GDN=gdn,
            SHARDWISE_GPU_REPORT=str(report),
        )
        started = time.monotonic()
        outcome = self.run(f"tests {gdn}", command)
        tests = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        return {**outcome, "seconds": time.monotonic() - started, "tests": tests}

    def time_steps(
        self,
        gdn: str,
        sides: Sequence[str],
        keep: Callable[[Rows], None],
        modes: Sequence[str] = CHECKPOINTING,
    ) -> None:
        """Time LoRA steps of the sides by turns; `keep` gets all rows whenever one is new."""
        stage = Deadline(self.limit(f"timing {gdn}"))
        time_sides(gdn, self.workload, self._start_side, stage, keep, sides, modes)

    def _start_side(self, side: str, gdn: str) -> Worker:
        arguments = (side, gdn, str(self.scratch / "model"), self.device, self.workload_name)
        log = self.scratch / f"{side}-{gdn}.log"
        return Worker(python("tests.gpu.worker", *arguments), log)


def main(program: str, doc: str | None, body: Callable[[str, Path, Path], int]) -> int:
    """Run a program: `body(device, folder of the results, scratch)`, and return its exit code.

    It is 2, with a line on stderr, without a device, or for a rehearsal into results/gpu.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=doc)
    text = "the same code on the CPU, on toys; writes to DIR"
    parser.add_argument("--rehearse", metavar="DIR", type=Path, help=text)
    rehearse: Path | None = parser.parse_args().rehearse
    if rehearse is None and not _has_device():
        text = f"error: {sys.executable} finds no CUDA device; give PYTHON= one whose torch does"
        print(text, file=sys.stderr)
        return 2
    folder = (rehearse or MEASURED).resolve()
    if rehearse is not None and folder.is_relative_to(MEASURED.resolve()):
        text = "error: results/gpu/ is for what a GPU did; rehearse into another folder"
        print(text, file=sys.stderr)
        return 2
    os.chdir(ROOT)
    # An exit runs the `finally` clauses that end the processes started here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="shardwise-gpu-") as scratch:
        return body("cpu" if rehearse else "cuda", folder, Path(scratch))


def _has_device() -> bool:
    with suppress(ImportError):
        import torch

        return torch.cuda.is_available()
    return False
