"""Write docs/reference/compatibility.md from the rulebook: `python tools/compatibility.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from shardwise.layouts import NAMES
from shardwise.models.families import FAMILIES
from shardwise.rules import RULES, offered_layouts

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "compatibility.md"
HEAD = """\
# What may run together

A layout is named by its parts: `pp` pipeline; `ddp`, `zero1`, `zero2`, `fsdp1`, `fsdp2`, `hsdp`
(fsdp2 with replicas) over the data; `cp` context parallelism; `tp` tensor and `sp` sequence
parallelism.

**Layouts.** Every listed family may run under each of these {num_offered} layouts, and the parity
matrix proves each of them for each family, with LoRA and in full ([how](../concepts/parity.md),
[results](../../results/parity.json)):

{offered}

Each of them is offered with `cp` too, as `cp` and `fsdp2-cp-tp` ([context
parallelism](../concepts/context.md)): the matrix has cells of some of these for every family.

Listed families: {families}. A family that is not listed runs under the layouts without `pp`, `cp`
and `tp`. Not offered: {others}.

To prove a layout on your machine, in a checkout, for instance of `jamba` under `pp-tp` on four
processes:

    python -m tests.parity --out proof.json --only jamba-pp-tp-1f1b

**Rules.** `shardwise` refuses a run before it takes memory where one of these rules forbids it, in
one line with a way out. The rules stand in `src/shardwise/rules/`.
"""
TITLES = {
    "run file": "On the run file alone",
    "grid": "On the number of processes",
    "step": "On the micro-batches of a step",
    "adapters": "On adapters",
    "model": "On the model",
}


def page() -> str:
    """Return the whole page."""
    without = [name for name in NAMES if "cp" not in name.split("-")]
    offered = [name for name in offered_layouts() if name in without]
    head = HEAD.format(
        num_offered=len(offered),
        offered=", ".join(f"`{name}`" for name in offered),
        families=", ".join(f"`{name}`" for name in FAMILIES),
        others=", ".join(f"`{name}`" for name in without if name not in offered),
    )
    paragraphs = head.strip().split("\n\n")
    lines = [
        "\n\n".join(
            part if part.startswith(" ") else textwrap.fill(part, 100, break_on_hyphens=False)
            for part in paragraphs
        ),
        "",
    ]
    for group, rules in RULES.items():
        lines += [f"## {TITLES[group]}", "", "| rule | why |", "|---|---|"]
        lines += [f"| {rule.name} | {_linked(rule.why)} |" for rule in rules]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _linked(why: str) -> str:
    """Return a reason with its test in code quotes."""
    return " ".join(f"`{word}`" if word.startswith("tests/") else word for word in why.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
