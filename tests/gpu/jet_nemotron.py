"""`make gpu-jet-nemotron`: LoRA steps of Jet-Nemotron-2B's shape on one CUDA device, with and
without checkpointing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tests.gpu.__main__ import Files, begin, child_environment, run_tests  # noqa: E402
from tests.gpu.timing import Deadline, run_limited, start_side, time_pair, with_figures  # noqa: E402
from tests.gpu.workload import workload_of  # noqa: E402

NAME = "jet_nemotron"
TOTAL_SECONDS = 460
LIMITS = {"draw": 120, "timing": 300, "tests": 120}
"""Seconds each stage may take, as far as the total has them left; fla's first step compiles and
tunes its kernels.
"""
PUBLISHED = {
    "tokens_per_second": 28275,
    "device": "one H100",
    "sequence_length": 4096,
    "differs": "only device and length are known of it; model code, rows in a step, LoRA and software may differ",
}
"""What a study of others has published of fine-tuning Jet-Nemotron-2B with LoRA."""


def main() -> int:
    begun = begin("tests.gpu.jet_nemotron", __doc__)
    if begun is None:
        return 2
    device, files = begun
    with tempfile.TemporaryDirectory(prefix="gpu-jet-nemotron-") as scratch:
        return run(device, files, Path(scratch))


def run(device: str, files: Files, scratch: Path) -> int:
    """Draw, time, and test last: fla's kernels are tuned by then."""
    deadline, workload, env = (
        Deadline(TOTAL_SECONDS),
        workload_of(NAME, device),
        child_environment(),
    )
    gdn = "fla" if device == "cuda" and importlib.util.find_spec("fla") else "torch"
    drawn = scratch / "model"
    drawn.mkdir()
    command = [sys.executable, "-m", "tests.gpu.draw", str(drawn), device, NAME]
    status, reason = run_limited(command, env, scratch / "draw.log", deadline.left(LIMITS["draw"]))
    if status != "ok":
        print(f"error: the model was not drawn: {reason}", file=sys.stderr)
        return 1
    facts = json.loads((drawn / "facts.json").read_text())
    del facts["differences"]  # of two sides
    result: dict[str, Any] = {
        "complete": False,
        **facts,
        "workload": vars(workload),
        "dtype": "weights bfloat16, adapters float32, autocast bfloat16",
        "gated_delta_rule": gdn,
        "published": PUBLISHED,
        "tests": {"status": "skipped", "reason": "not reached"},
        "rows": [],
    }

    def keep(rows: list[dict[str, Any]]) -> None:
        result["rows"] = [with_figures(row, workload, facts) for row in rows]
        files.write(f"{NAME}.json", result)

    time_pair(
        gdn,
        workload,
        lambda side, gdn: start_side(side, gdn, drawn, device, env, NAME),
        deadline,
        LIMITS["timing"],
        keep,
        sides=("shardwise",),
    )
    result["tests"] = run_tests(gdn, device, scratch, deadline.left(LIMITS["tests"]), only=NAME)
    result["complete"] = True
    files.write(f"{NAME}.json", result)
    return summary(result, files.folder / f"{NAME}.json")


def summary(result: dict[str, Any], path: Path) -> int:
    """Print what came out; 0 if nothing failed. No speed is told of kernels that were not right."""
    green = result["tests"]["status"] == "ok"
    print(
        f"tests with {result['gated_delta_rule']}: {result['tests']['status']} {result['tests']['reason']}".rstrip()
    )
    for row in result["rows"]:
        name = f"checkpointing {row['checkpointing']:5}"
        if row["status"] != "ok" or not green:
            print(
                f"{name} {row['status']}: {row['reason'][-200:] or 'no speed is told while tests fail'}"
            )
            continue
        print(
            f"{name} {1e3 * row['step_seconds']['median']:8.1f} ms a step {row['tokens_per_second']:9,.0f} tokens/s "
            f"MFU {row['mfu']['published']:.1%} peak {row['memory']['peak_bytes'] / 2**30:.2f} GiB"
        )
    print(f"written: {path}")
    return 0 if green and {row["status"] for row in result["rows"]} == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
