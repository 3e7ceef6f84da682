"""The table and the figure of `peers.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.paired import table

from shardwise.lab.drawing.svg import colour, drawing, svg_file

RIGHT = {"losses": 1e-6, "norms": 1e-4}
"""Relative differences that rounding may make."""
KINDS = {"checks": ", checks", "collator": ", rows of `DataCollatorWithFlattening` with `seq_idx`"}
NAMES = {"lora": "LoRA", "full": "all weights"}
HEAD = ("side", "tokens/s", "ours over it", "peak MiB", "weights held", "losses differ by")
HEAD += ("unequal targets", "packed documents")


def write_page(folder: Path) -> None:
    """Write `peers.md` and `peers.svg` into the folder of `peers.json`."""
    result = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
    (folder / "peers.md").write_text(page(result), encoding="utf-8")
    (folder / "peers.svg").write_text(figure(result))


def page(result: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    sides, rows = result["sides"], result["rows"]
    modes = [mode for mode in NAMES if f"round-0/{mode}/single" in rows]
    lines = []
    for mode in modes:
        lines.append([f"**{NAMES[mode]}**", *[""] * (len(HEAD) - 1)])
        lines += [[side["title"], *cells(result, mode, name)] for name, side in sides.items()]
    work, steps = result["work"]["global_batch"], result["work"]["steps"]
    loads = [row["load_average"] for name, row in rows.items() if name.startswith("round-")]
    environment = result["environment"]
    text = f"""# Beside its peers

`make peers` trains the same work by shardwise and by its peers, and writes this page from
`peers.json`. What each column is, and what it means: [Peers](../../docs/concepts/peers.md).

Commit {environment["commit"]}, {environment["device"]}, {environment["cpu_count"]} cores; \
{", ".join(f"{name} {number}" for name, number in result["versions"].items())}. A step:
{work["micro_batches"]} micro-batches of {work["rows"]} rows of {work["tokens"]} tokens, \
{result["work"]["precision"]}; two processes of one thread, or one. Rounds: {result["rounds"]},
of {steps["timed"]} timed steps each; medians, and in brackets the smallest and the largest of the \
rounds. Load average
before a round: {statistics.median(loads):.1f} (median), at most {max(loads):.1f}.

{table(HEAD, lines)}

![Tokens per second and peak memory of each side](peers.svg)

Bars are medians; a line reaches over all rounds.

{slower(result, modes)}

## What does not run

{refusals(result, modes)}

## Layers without adapters

{adapters(rows)}
"""
    return text


def cells(result: dict[str, Any], mode: str, name: str) -> list[str]:
    """Return what stands in a side's line of the table, after its name."""
    rows = result["rows"]
    taken, checks = rounds(result, mode, name), rows[f"checks/{mode}/{name}"]
    found = ["–", "–"]
    if "error" not in checks:
        found = verdicts(checks, rows[f"checks/{mode}/single"])
    if not taken:
        is_missing = f"round-0/{mode}/{name}" not in rows
        return ["not measured" if is_missing else "does not run", *["–"] * 4, *found]
    reference = rounds(result, mode, "single")[0]
    share = max(taken[0]["weight_bytes"]) / reference["weight_bytes"][0]
    pairs = zip(taken[0]["losses"], reference["losses"], strict=True)
    speeds, ratio = speeds_of(result, mode, name), ratios(result, mode, name)
    return [
        spread(speeds, ".0f") if speeds else "not timed",
        spread(ratio, ".2f") if ratio else "–",
        f"{max(taken[0]['peak_bytes']) / 2**20:.1f}",
        f"{share:.0%}",
        "–" if name == "single" else f"{max(abs(ours - theirs) for ours, theirs in pairs):.1e}",
        *found,
    ]


def verdicts(checks: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return what the first step says of unequal targets, and the others of packed documents.

    `reference` are the checks of one process of ours, whose loss is the mean over all targets.
    """
    weighting, packing = [], "apart"
    for what, key in (("loss", "losses"), ("gradient norm", "norms")):
        difference = checks[key][0] / reference[key][0] - 1
        if abs(difference) > RIGHT[key]:
            weighting.append(f"{what} {difference:+.2%}")
    _, first, second = checks["losses"]
    if abs(second / first - 1) > RIGHT["losses"]:
        packing = f"leak: loss {second - first:+.4f}"
    return [", ".join(weighting) or "by token", packing]


def rounds(result: dict[str, Any], mode: str, name: str) -> list[dict[str, Any]]:
    """Return the rows of a side's rounds; empty where one is missing or has an error."""
    cases = [f"round-{number}/{mode}/{name}" for number in range(result["rounds"])]
    rows = [result["rows"].get(case, {"error": "missing"}) for case in cases]
    return [] if any("error" in row for row in rows) else rows


def speeds_of(result: dict[str, Any], mode: str, name: str) -> list[float]:
    """Return the tokens per second of each timed round: those of its median step."""
    batch, steps = result["work"]["global_batch"], result["work"]["steps"]
    tokens = batch["micro_batches"] * batch["rows"] * batch["tokens"]
    timed = [
        row["seconds"][steps["warm_up"] :] for row in rounds(result, mode, name) if row["seconds"]
    ]
    return [tokens / statistics.median(seconds[: steps["timed"]]) for seconds in timed]


def ratios(result: dict[str, Any], mode: str, name: str) -> list[float]:
    """Return, for a peer, the speed of the side of ours beside it over its own, in each round."""
    beside = result["sides"][name]["beside"]
    if beside is None:
        return []
    ours, theirs = speeds_of(result, mode, beside), speeds_of(result, mode, name)
    return [a / b for a, b in zip(ours, theirs)]


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, and the smallest and largest value."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:{form}} ({low:{form}}–{high:{form}})"


def slower(result: dict[str, Any], modes: Sequence[str]) -> str:
    """Return the sentence on the rows in which ours is slower."""
    lines = []
    for mode in modes:
        for name, side in result["sides"].items():
            if (ratio := ratios(result, mode, name)) and statistics.median(ratio) < 1:
                always = ", in all rounds" if max(ratio) < 1 else ""
                lines.append(f"- {side['title']}, {NAMES[mode]}: {spread(ratio, '.3f')}{always}")
    if result["untimed"]:
        return "Not timed: the machine was busy."
    if not lines:
        return "Ours is at least as fast in every row."
    why = "[Peers](../../docs/concepts/peers.md#where-ours-is-slower)"
    head = f"Ours has a lower median in these rows; what is known of why: {why}.\n\n"
    return head + "\n".join(lines)


def refusals(result: dict[str, Any], modes: Sequence[str]) -> str:
    """Return the errors, each once."""
    found: dict[str, list[str]] = {}
    for case, row in result["rows"].items():
        if "error" in row:
            kind, mode, name = case.split("/")
            place = f"{result['sides'][name]['title']}, {NAMES[mode]}"
            found.setdefault(row["error"], []).append(place + KINDS.get(kind, ""))
    lines = [
        f"- {'; '.join(dict.fromkeys(who))}: `{error.replace('`', '')}`"
        for error, who in found.items()
    ]
    return "\n".join(lines) or "Every side runs."


def adapters(rows: dict[str, Any]) -> str:
    """Return which matrices are left without an adapter."""
    lines = []
    for case, ways in rows.items():
        if case.startswith("adapters/"):
            for way, row in ways.items():
                said = row.get("error")
                if said is None:
                    kinds = {".".join(name.split(".")[-2:]) for name in row["without"]}
                    said = f"{len(row['without'])} of {row['matrices']} matrices have none"
                    said += f": {', '.join(sorted(kinds))}" if kinds else ""
                lines.append([case.partition("/")[2], way, said])
    return table(["model", "targets", "found"], lines)


def figure(result: dict[str, Any]) -> str:
    """Return the figure as SVG: tokens per second and peak memory, by what is trained."""
    modes = [mode for mode in NAMES if f"round-0/{mode}/single" in result["rows"]]
    with drawing():
        from matplotlib.figure import Figure

        # One below the other, and so narrow that a phone need not shrink the text.
        chart = Figure(figsize=(5, 6.6 * len(modes)), layout="constrained")
        panels = chart.subplots(2 * len(modes))
        for times, peaks, mode in zip(panels[::2], panels[1::2], modes, strict=True):
            names = list(result["sides"])[::-1]
            for place, name in enumerate(names):
                taken, speeds = rounds(result, mode, name), speeds_of(result, mode, name)
                mine = result["sides"][name]["beside"] is None
                look = {"color": colour("c1" if mine else "c2"), "hatch": "" if mine else "////"}
                beside: dict[str, Any] = {"va": "center", "color": colour("muted")}
                if speeds:
                    middle = statistics.median(speeds)
                    times.barh(place, middle, **look)
                    times.plot([min(speeds), max(speeds)], [place, place], color=colour("ink"))
                    times.text(max(speeds), place, f"  {middle:,.0f}", **beside)
                if taken:
                    peak = max(taken[0]["peak_bytes"]) / 2**20
                    peaks.barh(place, peak, **look)
                    peaks.text(peak, place, f"  {peak:.0f}", **beside)
                else:
                    for panel in (times, peaks):
                        panel.text(0, place, f" {cells(result, mode, name)[0]}", **beside)
            titles = [result["sides"][name]["title"].replace("`", "") for name in names]
            for panel in (times, peaks):
                panel.set_yticks(range(len(names)), titles)
                panel.set_ylim(-0.7, len(names) - 0.3)
                panel.margins(x=0.14)  # for the numbers
            if result["untimed"]:
                times.set_xticks([])
            unit = "not timed" if result["untimed"] else "tokens/s"
            times.set(title=f"{NAMES[mode]}: {unit}")
            peaks.set(title=f"{NAMES[mode]}: peak of a rank, MiB")
        return svg_file(chart, "peers")
