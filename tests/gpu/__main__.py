"""`make gpu`: tests on a CUDA device, then LoRA steps timed against Hugging Face Trainer + PEFT.
See README.md here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from shardwise.records.record import dumps  # noqa: E402
from tests.gpu.timing import Deadline, comparisons, run_limited, start_side, time_pair, with_figures  # noqa: E402
from tests.gpu.workload import LORA_STEP, REHEARSAL  # noqa: E402

TOTAL_SECONDS = 460
LIMITS = {"draw": 90, "tests torch": 140, "tests fla": 60, "timing fla": 220, "timing torch": 140}
"""Seconds each stage may take, as far as the total has them left; fla's first step compiles and
tunes its kernels.
"""


class Files:
    """The JSON files of a run, whole after every write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace one file."""
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / name)


def child_environment() -> dict[str, str]:
    """For every process started here: our sources on the path, and no network."""
    path = os.pathsep.join(
        filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])
    )
    quiet = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **quiet}


def run_tests(gdn: str, device: str, scratch: Path, limit: float, only: str = "") -> dict[str, Any]:
    """The tests of one choice of kernels, each with what it measured, also if time runs out between
    them.

    `only`: those of one family.
    """
    report, log = scratch / f"tests-{gdn}.jsonl", scratch / f"tests-{gdn}.log"
    report.touch()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu/test_strategies.py",
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    # Other versions of the libraries than the pinned ones warn of other things: here warnings are
    # shown, not errors.
    command += ["-W", "default", "-m", "gpu" if device == "cuda" else "not gpu", "-k", only]
    env = {**child_environment(), "SHARDWISE_GDN": gdn, "SHARDWISE_GPU_REPORT": str(report)}
    started = time.monotonic()
    status, reason = run_limited(command, env, log, limit)
    tests = [json.loads(line) for line in report.read_text().splitlines()]
    print(log.read_text(errors="replace")[-4000:], flush=True)
    return {
        "status": status,
        "reason": reason,
        "seconds": time.monotonic() - started,
        "tests": tests,
    }


def finds_device() -> bool:
    """Whether this interpreter's torch has a CUDA device; if not, that is said in a line."""
    found = False
    with contextlib.suppress(ImportError):
        import torch

        found = torch.cuda.is_available()
    if not found:
        what = f"error: {sys.executable} finds no CUDA device; give PYTHON= an interpreter whose torch does"
        print(what, file=sys.stderr)
    return found


def begin(program: str, doc: str | None) -> tuple[str, Files] | None:
    """What a command line asks for: cuda or cpu, and where the results go; None where it cannot be,
    as a line says.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=doc)
    parser.add_argument(
        "--rehearse",
        metavar="DIR",
        type=Path,
        help="the same code on the CPU, on toys; writes to DIR",
    )
    rehearse: Path | None = parser.parse_args().rehearse
    measured = (ROOT / "results" / "gpu").resolve()
    if rehearse is None and not finds_device():
        return None
    if rehearse is not None and rehearse.resolve().is_relative_to(measured):
        print(
            "error: results/gpu/ is for what a GPU did; rehearse into another folder",
            file=sys.stderr,
        )
        return None
    files = Files((rehearse or measured).resolve())
    os.chdir(ROOT)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # and so end what was started
    return "cuda" if rehearse is None else "cpu", files


def main() -> int:
    begun = begin("tests.gpu", __doc__)
    if begun is None:
        return 2
    device, files = begun
    workload = LORA_STEP if device == "cuda" else REHEARSAL
    deadline = Deadline(TOTAL_SECONDS)
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as scratch:
        return run(device, workload, files, deadline, Path(scratch))


def run(device: str, workload: Any, files: Files, deadline: Deadline, scratch: Path) -> int:
    """All stages, in the order of what is worth most should time run out."""
    env = child_environment()
    fla = importlib.util.find_spec("fla") is not None
    missing = {
        "status": "skipped",
        "reason": "fla is not installed (wheels: see tests/gpu/README.md)",
    }

    def stage(name: str) -> float:
        print(f"--- {name} ({deadline.left():.0f} s left)", flush=True)
        return deadline.left(LIMITS[name])

    drawn = scratch / "model"
    drawn.mkdir()
    command = [sys.executable, "-m", "tests.gpu.draw", str(drawn), device]
    status, reason = run_limited(command, env, scratch / "draw.log", stage("draw"))
    if status != "ok":
        print(f"error: the model was not drawn: {reason}", file=sys.stderr)
        return 1
    facts = json.loads((drawn / "facts.json").read_text())

    tests: dict[str, Any] = {"fla": missing}
    rows: dict[str, list[dict[str, Any]]] = {"fla": [{**missing, "gdn": "fla"}], "torch": []}

    def gate(gdn: str) -> str:
        return "green" if tests.get(gdn, {}).get("status") == "ok" else "red"

    def save(final: bool = False) -> None:
        files.write(
            "strategies.json",
            {"environment": facts["environment"], "complete": final, "tests": tests},
        )
        timed = [row for gdn in rows for row in rows[gdn] if "side" in row]
        files.write(
            "lora_step.json",
            {
                "complete": final,
                **facts,
                "workload": vars(workload),
                "dtype": "weights bfloat16, adapters float32, autocast bfloat16",
                "rows": [with_figures(row, workload, facts) for gdn in rows for row in rows[gdn]],
                "comparisons": [
                    c
                    for gdn in rows
                    for c in comparisons([r for r in timed if r["gdn"] == gdn], gate(gdn))
                ],
            },
        )

    def timing(gdn: str) -> None:
        def keep(new: list[dict[str, Any]]) -> None:
            rows[gdn] = new
            save()

        time_pair(
            gdn,
            workload,
            lambda side, gdn: start_side(side, gdn, drawn, device, env),
            deadline,
            stage(f"timing {gdn}"),
            keep,
        )

    tests["torch"] = run_tests("torch", device, scratch, stage("tests torch"))
    save()
    if fla:
        timing(
            "fla"
        )  # before the tests with fla, which then find its kernels tuned, for the shape that matters
        tests["fla"] = run_tests("fla", device, scratch, stage("tests fla"))
        save()
    timing("torch")
    save(final=True)
    return summary(files)


def summary(files: Files) -> int:
    """Print what came out; 0 if nothing failed."""
    tests = json.loads((files.folder / "strategies.json").read_text())["tests"]
    timed = json.loads((files.folder / "lora_step.json").read_text())
    print(
        f"{'GDN':7}{'checkpointing':15}{'side':14}{'ms/step':>10}{'tokens/s':>12}{'MFU':>8}{'peak GiB':>10}"
    )
    for row in timed["rows"]:
        name = f"{row['gdn']:7}{row.get('checkpointing', '-'):15}{row.get('side', '-'):14}"
        if row["status"] != "ok":
            print(f"{name} {row['status']}: {row['reason'][-100:]}")
            continue
        print(
            f"{name}{1e3 * row['step_seconds']['median']:10.1f}{row['tokens_per_second']:12,.0f}"
            f"{row['mfu']['published']:8.1%}{row['memory']['peak_bytes'] / 2**30:10.2f}"
        )
    for entry in timed["comparisons"]:
        ratio = "no ratio"
        if "time" in entry:
            ratio = f"shardwise takes 1/{entry['time']['median']:.2f} of the time, 1/{entry['peak_memory']:.2f} of the peak"
        unequal = [f"unequal: {key}" for key, same in entry.get("equal", {}).items() if not same]
        name = f"{entry['gdn']}, checkpointing {entry['checkpointing']}"
        print("; ".join([f"{name}: gate {entry['gate']}, {ratio}", *unequal]))
    statuses = [run["status"] for run in tests.values()] + [row["status"] for row in timed["rows"]]
    print(f"written: {files.folder}/strategies.json, {files.folder}/lora_step.json")
    return 0 if set(statuses) <= {"ok", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
