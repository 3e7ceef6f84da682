"""What `make gpu-kernels` found, as a page for people."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any


def page(device: str, common: dict[str, Any], content: dict[str, dict[str, Any]]) -> str:
    """What came out, for people."""
    where = common["environment"] or {}
    versions = ", ".join(
        f"{key} {where.get(key)}"
        for key in ("device", "driver", "torch", "triton", "peft", "commit")
    )
    rehearsal = (
        ""
        if device == "cuda"
        else " (a rehearsal on a CPU: nothing here is a speed of the kernels)"
    )
    parts = [
        f"# LoRA kernels and the loss{rehearsal}",
        versions + ".",
        *([common["method"]] * bool(common["method"])),
    ]
    ceilings = content["lora"]["ceilings"]
    if ceilings:
        parts.append(
            f"Measured: a copy moves {ceilings['bytes_per_second'] / 1e12:.2f} TB/s (read and written), a product does "
            f"{ceilings['flops_per_second'] / 1e12:.0f} TFLOP/s. The floor is the larger of FLOPs and bytes at those."
        )
    aims = content["lora"]["aims"]
    parts.append(
        f"## LoRA linears\n\n{content['lora']['tokens']} tokens, bfloat16. Aims: at most {aims['times_floor']:.2f} x "
        f"the floor, at least {aims['times_faster_than_peft']:.2f} x faster than PEFT, forward and backward together."
    )
    rows = content["lora"]["rows"]
    parts.append(
        _table(
            [
                "model, linears",
                "K",
                "N",
                "r",
                "dropout",
                "side",
                "forward us",
                "backward us",
                "floor us",
                "x floor",
                "faster than PEFT",
            ],
            (_lora_cells(row) for row in rows),
        )
    )
    reached = [row for row in rows if row["status"] == "ok" and "times_faster_than_peft" in row]
    for side in dict.fromkeys(
        row["side"] for row in reached if not row["side"].startswith(("frozen", "peft"))
    ):
        own = [row for row in reached if row["side"] == side]
        parts.append(
            f"{side}: median {median(row['times_floor'] for row in own):.2f} x the floor, "
            f"{median(row['times_faster_than_peft'] for row in own):.2f} x faster than PEFT, over {len(own)} settings."
        )
    aims = content["loss"]["aims"]
    parts.append(
        f"## The loss with its head\n\nAims, frozen head: {aims['times_less_memory']} x less memory, "
        f"{aims['times_faster']} x faster than all logits and torch's cross entropy."
    )
    parts.append(
        _table(
            ["model", "V", "head", "side", "ms", "peak GiB", "x faster", "x less memory"],
            (_loss_cells(row) for row in content["loss"]["rows"]),
        )
    )
    parts.append(
        "## A LoRA step\n\nAgainst Hugging Face Trainer with PEFT, in turns, one process each."
    )
    parts.append(
        _table(
            ["side", "GDN", "ms", "tokens/s", "MFU", "peak GiB"],
            (_step_cells(row) for row in content["step"]["rows"]),
        )
    )
    for entry in content["step"]["comparisons"]:
        unequal = [key for key, same in entry.get("equal", {}).items() if not same]
        text = f"{entry['side']}: gate {entry['gate']}"
        if "time" in entry:
            time, memory = entry["time"]["median"], entry["peak_memory"]
            text += f", Trainer takes {time:.2f} x the time and {memory:.2f} x the peak memory"
        parts.append(text + (f"; unequal: {', '.join(unequal)}" if unequal else "") + ".")
    cut = [(name, what) for name, what in content.items() if what.get("status", "ok") != "ok"]
    parts += [f"Stage {name}: {what['status']} ({what['reason']})." for name, what in cut]
    return "\n\n".join(parts) + "\n"


def _lora_cells(row: dict[str, Any]) -> list[str]:
    setting = row["setting"]
    cells = [
        f"{setting['model']}, {setting['name']}",
        str(setting["k"]),
        " + ".join(map(str, setting["n"])),
    ]
    cells += [str(setting["r"]), str(setting["p"]), row["side"]]
    floor = f"{1e6 * sum(row['floor'].values()):.0f}"
    if row["status"] != "ok":
        return [*cells, f"{row['status']}: {row['reason'][:60]}", "", floor, "", ""]
    times = [f"{1e6 * row[way]['median']:.0f}" for way in ("forward", "backward")]
    faster = row.get("times_faster_than_peft")
    return [
        *cells,
        *times,
        floor,
        f"{row['times_floor']:.2f}",
        "" if faster is None else f"{faster:.2f}",
    ]


def _loss_cells(row: dict[str, Any]) -> list[str]:
    head = row["head"]
    cells = [
        head["model"],
        str(head["vocabulary"]),
        "trained" if head["trained"] else "frozen",
        row["side"],
    ]
    if row["status"] != "ok":
        return [*cells, f"{row['status']}: {row['reason'][:60]}", "", "", ""]
    gains = [
        f"{row[key]:.2f}" if key in row else "" for key in ("times_faster", "times_less_memory")
    ]
    return [
        *cells,
        f"{1e3 * row['seconds']['median']:.2f}",
        f"{row['peak_bytes'] / 2**30:.3f}",
        *gains,
    ]


def _step_cells(row: dict[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [row["side"], row["gdn"], f"{row['status']}: {row['reason'][-60:]}", "", "", ""]
    figures = [f"{1e3 * row['step_seconds']['median']:.1f}", f"{row['tokens_per_second']:,.0f}"]
    figures += [f"{row['mfu']['published']:.1%}", f"{row['memory']['peak_bytes'] / 2**30:.2f}"]
    return [row["side"], row["gdn"], *figures]


def _table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
