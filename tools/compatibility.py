"""Write docs/reference/compatibility.md from what is offered and what proves it: `python tools/compatibility.py`."""

from __future__ import annotations

from pathlib import Path

from shardwise.assembly.order import COMPATIBLE, LAYOUTS, REFUSED, UNPROVEN, proofs

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "compatibility.md"
HEAD = """\
# Which layout trains which family

A layout is named by its parts: `pp` pipeline; `ddp`, `zero1`, `zero2`, `fsdp1`, `fsdp2`, `hsdp` (fsdp2 with replicas)
over the data; `tp` tensor and `sp` sequence parallelism. A family may run under a layout if two tests prove that it
computes what one process computes, with LoRA and in full: losses, gradients, gradient norm, weights after three steps
and what is left on disk ([how](../concepts/parity.md)). Everything else is refused before memory is taken.

The table names the two tests: the family's name comes first, the number of processes last. They run on CPUs; of `jamba`
under `pp-tp`:

    python -m tests.parity --out proof.json --only jamba-pp-tp-1f1b-{lora,full}-4p

A test's last outcome is the row of its name in [`results/parity.json`](../../results/parity.json). That has more rows:
other numbers of processes, each of a pipeline's schedules, and variants such as checkpointing. Each axis has two ranks
or more, but for `hsdp` in a pipeline, where two replicas have one shard each (llama's `pp-hsdp` has two).

The tests of one family are printed in full by `shardwise models FAMILY`.

This page is written by `tools/compatibility.py`.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| layout | proven by FAMILY-... | families |", "|---|---|---|"]
    for layout in LAYOUTS:
        tests = {name: proofs(name)[layout].removeprefix(f"{name}-") for name in COMPATIBLE if layout in proofs(name)}
        for test in dict.fromkeys(filter(None, tests.values())):
            families = [name for name in tests if tests[name] == test]
            lines.append(
                f"| {layout} | `{test}` | {', '.join(families) if set(COMPATIBLE) - set(families) else 'all'} |"
            )
    others = ", ".join(layout for layout in LAYOUTS if layout in UNPROVEN)
    lines += [
        "",
        f"All: {', '.join(COMPATIBLE)}.",
        "",
        f"Other families run under what asks nothing of a model's inside: {others}.",
    ]
    lines += ["", "## Not offered", "", "| layout | why, and what to use |", "|---|---|"]
    lines += [f"| {layout} | {why} |" for layout, why in REFUSED.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
