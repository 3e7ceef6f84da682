"""What a soak says of its runs: what each process held after each checkpoint, and the curves."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SAVE_EVERY = 50
KEPT = 2
"""Checkpoints: `training.keep_last`."""
SIDES = ("undisturbed", "killed")
MOST_BYTES_PER_STEP = 1024
"""By how much the resident memory of a process may grow. Of each step a run keeps its loss, norm,
tokens and seconds, and `metrics.jsonl` a line, of which a checkpoint has a copy."""
EVERY = 50
"""Steps whose mean loss is a point of the curve that is kept."""
COUNTS = ("tensor_bytes", "file_handles", "threads", "children")
"""What may not grow in a process's life. The range of all samples is there too: a small tensor may
just be in use, and a rank whose peer was killed has fewer files."""


def losses(output_dir: Path) -> dict[int, float]:
    """The loss of every step in `metrics.jsonl`, whose last line may be half written."""
    *lines, _ = (output_dir / "metrics.jsonl").read_text().split("\n")
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def thinned(curve: Mapping[int, float]) -> list[float]:
    """The mean loss of each EVERY steps, in nats per token."""
    steps = range(1, max(curve, default=0) - EVERY + 2, EVERY)
    return [round(statistics.fmean(curve[i] for i in range(j, j + EVERY)), 6) for j in steps]


def trained(output_dir: Path) -> tuple[dict[int, float], bytes]:
    """Every loss, and what a run leaves."""
    return losses(output_dir), (output_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Every whole line, in the order in which they were written."""
    found = []
    for line in (folder / "samples.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # cut by a kill; the next line begins behind it
            continue
    return found


def by_process(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The samples of each rank and of the command."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in samples:
        found.setdefault(line["process"], []).append(dict(line))
        if (
            "command" in line and line["command"]["pid"] != 1
        ):  # of an orphan: its command was killed
            found.setdefault("command", []).append({"step": line["step"], **line["command"]})
    return dict(sorted(found.items()))


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one process in all its lives: the range of what is counted, and how its memory grew.

    Memory is that of the longest life, from its second fifth on: before it, caches fill.
    """
    lives: dict[int, list[Mapping[str, Any]]] = {}
    for line in samples:
        lives.setdefault(line["pid"], []).append(line)
    longest = max(lives.values(), key=len)
    settled = longest[len(longest) // 5 :]
    counted = {
        key: [min(line[key] for line in samples), max(line[key] for line in samples)]
        for key in COUNTS
        if key in samples[0]
    }
    slope = None
    if len(settled) > 1:
        points = [line["step"] for line in settled], [line["resident_bytes"] for line in settled]
        slope = round(statistics.linear_regression(*points).slope, 1)
    return {
        "lives": len(lives),
        "samples": len(samples),
        **counted,
        "grown": sorted(key for key in counted if any(grows(life, key) for life in lives.values())),
        "longest_life": {
            "steps": [longest[0]["step"], longest[-1]["step"]],
            "resident_bytes": [longest[0]["resident_bytes"], longest[-1]["resident_bytes"]],
            "resident_bytes_per_step": slope,
        },
    }


def grows(life: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether the median of a process's later samples is above that of the earlier ones.

    What leaks stays. What is just in use, or gone with a peer that was killed, is in one sample.
    """
    half = len(life) // 2
    later = statistics.median(line[key] for line in life[half:])
    return half > 0 and later > statistics.median(line[key] for line in life[:half])


def problems(
    samples: Sequence[Mapping[str, Any]], processes: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What has changed that may not, in the processes or among the checkpoints that are kept."""
    found = []
    for name, row in processes.items():
        found += [f"{name}: {key} {row[key]}" for key in row["grown"]]
    for line in samples:
        newest = f"step-{line['step']}"
        kept = line.get("checkpoints", [newest])
        if newest not in kept or len(kept) > KEPT:  # after a stop the older one is of any step
            found.append(f"after step {line['step']}: {kept}")
    return found


def growth(processes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The processes whose resident memory grows by more than MOST_BYTES_PER_STEP."""
    slopes = {
        name: row["longest_life"]["resident_bytes_per_step"] for name, row in processes.items()
    }
    return [
        f"{name}: {slope} bytes a step"
        for name, slope in slopes.items()
        if slope is None or slope > MOST_BYTES_PER_STEP
    ]


def outcome(folder: Path, layout: str, steps: int) -> dict[str, Any]:
    """The row of a layout; `ok` where both runs have ended and nothing is wrong.

    Of a run that has not ended, the steps are compared that both have done.
    """
    sides = {}
    wrong = []
    for side in SIDES:
        samples = read_samples(folder / side)
        sides[side] = {name: summary(rows) for name, rows in by_process(samples).items()}
        wrong += [f"{side}: {text}" for text in problems(samples, sides[side])]
    # The lives between two kills are too short to tell a slope from what caches take at first.
    wrong += [f"undisturbed: {text}" for text in growth(sides["undisturbed"])]
    curves = {side: losses(folder / side / "run") for side in sides}
    done = {side: max(curve, default=0) for side, curve in curves.items()}
    compared = range(1, min(done.values()) + 1)
    is_equal = all(len({curve.get(step) for curve in curves.values()}) == 1 for step in compared)
    if not is_equal:
        wrong.append("losses are not those of the undisturbed run")
    if min(done.values()) == steps:
        if len({trained(folder / side / "run")[1] for side in sides}) > 1:
            wrong.append("the adapter is not that of the undisturbed run")
    else:
        wrong.append(f"not at the end: {done}")
    lines = (folder / "killed" / "kills.jsonl").read_text().splitlines()
    kills = [json.loads(line) for line in lines]
    return {
        "layout": layout,
        "steps": done,
        "kills": len(kills),
        "victims": Counter(kill["victim"] for kill in kills),
        "moments": Counter(kill["moment"] for kill in kills),
        "compared_steps": len(compared),
        "curve_is_equal": is_equal,
        "mean_losses": {"steps": EVERY} | {side: thinned(curve) for side, curve in curves.items()},
        "killed_after_steps": [kill["step"] for kill in kills],
        **sides,
        # A command that was killed cannot remove its folder.
        "temporary_files_left": [len(list((folder / side / "tmp").iterdir())) for side in sides],
        "ok": not wrong,
        "wrong": wrong,
    }


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the curves of both runs of each layout that has them, and the steps of the kills."""
    from shardwise.lab.drawing.svg import colour, drawing, svg_file
    from shardwise.lab.report.panels import grid

    with drawing():
        figure, panels = grid(1, len(rows), [2.2])
        figure.set_figwidth(5.0)
        for panel, row in zip(panels[0], rows, strict=True):
            curves, kills = row["mean_losses"], row["killed_after_steps"]
            for side, tint, width in zip(SIDES, ("c7", "bad"), (5.0, 1.2), strict=True):
                steps = [curves["steps"] * (place + 1) for place in range(len(curves[side]))]
                panel.plot(steps, curves[side], color=colour(tint), linewidth=width, label=side)
            lowest = min(min(curves[side]) for side in SIDES) - 0.1
            ticks = {"color": colour("ink"), "label": f"{len(kills)} kills"}
            panel.plot(kills, [lowest] * len(kills), "|", **ticks)
            panel.set_title(f"{row['layout']}: loss, nats per token")
            panel.set_xlabel("step")
            panel.legend()
        path.write_text(svg_file(figure, "soak", "A long run under kills and an undisturbed one"))
