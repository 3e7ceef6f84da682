"""What forms of `model.base` cost in quality: `python tools/base_quality.py`.

    shardwise train configs/demo/base.yaml --nproc=2
    shardwise bench configs/bases-cpu.yaml --out runs/bases

It runs the plain cell of each seed once more with weights that differ by rounding (the noise
control), and writes results/bases/quality.json: validation losses by form and seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shardwise.benchmark.paired import write_json

ROOT = Path(__file__).parents[1]
BENCH, OUT = Path("runs/bases"), ROOT / "results" / "bases" / "quality.json"


def main() -> None:
    """Run the controls, read all records, write the result."""
    for run in sorted(BENCH.glob("single-none-*/run.yaml")):
        folder = BENCH / run.parent.name.replace("none", "nudged")
        if not (folder / "record.json").exists():
            options = ["--measure.nudge_weights=true", f"--training.output_dir={folder}"]
            command = [sys.executable, "-m", "shardwise", "train", str(run), *options]
            subprocess.run(command, check=True)
    losses: dict[str, dict[str, float]] = {}
    for file in sorted(BENCH.glob("single-*/record.json")):
        _, form, seed = file.parent.name.split("-")
        losses.setdefault(form, {})[seed] = json.loads(file.read_text())["eval"][-1]["loss"]
    plain = losses["none"]
    most = {
        form: max((by_seed[seed] - plain[seed] for seed in plain), key=abs)
        for form, by_seed in losses.items()
    }
    write_json(OUT, {"validation_loss": losses, "largest_difference_to_none": most})


if __name__ == "__main__":
    main()
