"""The result of `make gpu-kernels` as a page for people."""

from __future__ import annotations

from statistics import median
from typing import Any

from tools.paired import table

from tests.gpu.timing import in_words

LORA_COLUMNS = (
    *("model, linears", "K", "N", "r", "dropout", "side"),
    *("forward us", "backward us", "floor us", "x floor", "faster than PEFT"),
)
LOSS_COLUMNS = ("model", "V", "head", "side", "ms", "peak GiB", "x faster", "x less memory")
STEP_COLUMNS = ("side", "GDN", "ms", "tokens/s", "MFU", "peak GiB")


def page(device: str, common: dict[str, Any], content: dict[str, dict[str, Any]]) -> str:
    """Return the whole page."""
    where, method = common["environment"] or {}, common["method"]
    names = ("device", "driver", "torch", "triton", "peft", "commit")
    note = " (a rehearsal on a CPU: nothing here is a speed of the kernels)"
    parts = [f"# LoRA kernels and the loss{'' if device == 'cuda' else note}"]
    parts.append(", ".join(f"{name} {where.get(name)}" for name in names) + ".")
    if method:
        parts.append(method)
    parts += lora_parts(content["lora"])
    aims = content["loss"]["aims"]
    parts.append(
        f"## The loss with its head\n\nAims, frozen head: {aims['times_less_memory']} x less "
        f"memory, {aims['times_faster']} x faster than all logits and torch's cross entropy."
    )
    parts.append(table(LOSS_COLUMNS, map(loss_cells, content["loss"]["rows"])))
    step = content["step"]
    parts.append(
        "## A LoRA step\n\nBeside Hugging Face Trainer with PEFT, by turns, a process each."
    )
    parts.append(table(STEP_COLUMNS, map(step_cells, step["rows"])))
    parts += [f"{entry['side']}: {in_words(entry)}." for entry in step["comparisons"]]
    for name, stage in content.items():
        if stage["status"] != "ok":
            parts.append(f"Stage {name}: {stage['status']} ({stage['reason']}).")
    return "\n\n".join(parts) + "\n"


def lora_parts(lora: dict[str, Any]) -> list[str]:
    """Return the paragraphs about the LoRA linears."""
    parts, aims = [], lora["aims"]
    if rates := lora["ceilings"]:
        parts.append(
            f"Measured: a copy moves {rates['bytes_per_second'] / 1e12:.2f} TB/s (read and "
            f"written), a product does {rates['flops_per_second'] / 1e12:.0f} TFLOP/s. The floor "
            "is the larger of FLOPs and bytes at those."
        )
    parts.append(
        f"## LoRA linears\n\n{lora['tokens']} tokens, bfloat16. Aims: at most "
        f"{aims['times_floor']:.2f} x the floor, at least {aims['times_faster_than_peft']:.2f} x "
        "faster than PEFT, forward and backward together."
    )
    parts.append(table(LORA_COLUMNS, map(lora_cells, lora["rows"])))
    by_side: dict[str, list[dict[str, Any]]] = {}
    for row in lora["rows"]:
        if row["side"] in ("torch", "triton") and "times_faster_than_peft" in row:
            by_side.setdefault(row["side"], []).append(row)
    for side, rows in by_side.items():
        floor = median(row["times_floor"] for row in rows)
        faster = median(row["times_faster_than_peft"] for row in rows)
        text = f"{side}: median {floor:.2f} x the floor, {faster:.2f} x faster than PEFT"
        parts.append(f"{text}, over {len(rows)} settings.")
    return parts


def lora_cells(row: dict[str, Any]) -> list[object]:
    setting, floor = row["setting"], f"{1e6 * sum(row['floor'].values()):.0f}"
    widths = " + ".join(map(str, setting["n"]))
    cells = [f"{setting['model']}, {setting['name']}", setting["k"], widths]
    cells += [setting["r"], setting["p"], row["side"]]
    if row["status"] != "ok":
        return [*cells, reason(row), "", floor, "", ""]
    times = [f"{1e6 * row[way]['median']:.0f}" for way in ("forward", "backward")]
    return [*cells, *times, floor, ratio(row, "times_floor"), ratio(row, "times_faster_than_peft")]


def loss_cells(row: dict[str, Any]) -> list[object]:
    head = row["head"]
    trained = "trained" if head["trained"] else "frozen"
    cells = [head["model"], head["vocabulary"], trained, row["side"]]
    if row["status"] != "ok":
        return [*cells, reason(row), "", "", ""]
    figures = [f"{1e3 * row['seconds']['median']:.2f}", f"{row['peak_bytes'] / 2**30:.3f}"]
    return [*cells, *figures, ratio(row, "times_faster"), ratio(row, "times_less_memory")]


def step_cells(row: dict[str, Any]) -> list[object]:
    if row["status"] != "ok":
        return [row["side"], row["gdn"], reason(row), "", "", ""]
    figures = [f"{1e3 * row['step_seconds']['median']:.1f}", f"{row['tokens_per_second']:,.0f}"]
    figures += [f"{row['mfu']['published']:.1%}", f"{row['memory']['peak_bytes'] / 2**30:.2f}"]
    return [row["side"], row["gdn"], *figures]


def ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if name in row else ""


def reason(row: dict[str, Any]) -> str:
    return f"{row['status']}: {row['reason'][:60]}"
