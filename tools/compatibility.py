"""Write docs/reference/compatibility.md from the rulebook, and the table of `shardwise models` that
comes with the package: `python -m tools.compatibility`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from shardwise.base.layouts import shortened
from shardwise.commands.kept import LIBRARIES, version_of
from shardwise.commands.models import computed
from shardwise.config import presets
from shardwise.config.rules import RULES, offered_layouts
from shardwise.models.families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "compatibility.md"
HEAD = """\
# What may run together

*What may run together with what?*

This page lists which layouts there are, which family trains under which, and what is refused. A
layout is named by its parts: `pp` pipeline; `ddp`, `zero1`, `zero2`, `fsdp1`, `fsdp2`, `hsdp`
(fsdp2 with replicas) over the data; `cp` [context parallelism](../concepts/context.md); `ep`
[expert parallelism](../concepts/experts.md); `tp` tensor and `sp` sequence parallelism.

**Layouts.** Every listed family may run under these {num_offered} layouts (those with `ep`: where
it has routed experts). What stands in brackets may be left out, and `single` is left out where more
follows:

{offered}

The parity matrix proves each of those without `cp` and `ep` for each family, with LoRA and in full,
and some of the others for each ([how](../concepts/parity.md),
[results](../../results/parity.json)).

Listed families: {families}. A family that is not listed runs under the layouts without `pp`, `cp`,
`ep` and `tp`.

To prove a layout on your machine, in a checkout, for instance of `jamba` under `pp-tp` on four
processes:

    python -m tests.parity --out proof.json --only jamba-pp-tp-1f1b

**Rules.** `shardwise` refuses a run before it takes memory where one of these rules forbids it, in
one line with a way out. The rules stand in `src/shardwise/config/rules/`.
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
    offered = offered_layouts()
    head = HEAD.format(
        num_offered=len(offered),
        offered="\n".join(f"    {line}" for line in shortened(offered)),
        families=", ".join(f"`{name}`" for name in FAMILIES),
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


def families() -> str:
    """Return the content of `presets.FAMILIES`, a line for each family."""
    table = computed()
    sections = ",\n".join(json.dumps(section) for section in table.pop("sections"))
    head = json.dumps({"versions": {name: version_of(name) for name in LIBRARIES}, "table": table})
    return f'{head.removesuffix("}}")}, "sections": [\n{sections}\n]}}}}\n'


if __name__ == "__main__":
    presets.FAMILIES.write_text(families(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
