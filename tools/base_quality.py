"""What forms of `model.base` cost in quality: `python -m tools.base_quality`.

    shardwise train configs/demo/base.yaml --nproc=2 --training.steps=60
    shardwise bench configs/bases-cpu.yaml --out runs/bases

It runs the plain cell of each seed once more with weights that differ by rounding (the noise
control), and writes results/bases/quality.json: validation losses by form and seed. A figure beside
it draws how far each form lies from `none`. Without runs, `--draw` draws the committed numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools.paired import write_json

from shardwise.lab.drawing.svg import colour, drawing, svg_file

ROOT = Path(__file__).parents[1]
BENCH, OUT = Path("runs/bases"), ROOT / "results" / "bases" / "quality.json"


def main() -> None:
    """Run the controls, read all records, write the result and its figure."""
    if sys.argv[1:] != ["--draw"]:
        measure()
    losses = json.loads(OUT.read_text())["validation_loss"]
    OUT.with_suffix(".svg").write_text(figure_of(losses))


def measure() -> None:
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


def figure_of(losses: dict[str, dict[str, float]]) -> str:
    """Return the figure as SVG: a row per form, a point per seed, a band for the noise control."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.8, 2.8), layout="constrained")
        axes = figure.subplots()
        plain = losses["none"]
        differences = {
            form: [by_seed[seed] - plain[seed] for seed in sorted(plain)]
            for form, by_seed in losses.items()
        }
        noise = max(map(abs, differences["nudged"]))
        axes.axvspan(-noise, noise, color=colour("line"), label="rounding alone (noise control)")
        axes.axvline(0, color=colour("faint"), linewidth=0.8)
        forms = [form for form in ("nf4", "int8", "fp8") if form in losses]
        for height, form in enumerate(forms):
            axes.plot(differences[form], [height] * len(plain), "o", color=colour("c1"))
        axes.set_yticks(range(len(forms)), forms)
        axes.set_ylim(-0.6, len(forms) - 0.4)
        axes.set(title="Validation loss minus that in bfloat16, a point a seed", xlabel="nats")
        figure.legend(loc="outside lower right")
        return svg_file(figure, "quality")


if __name__ == "__main__":
    main()
