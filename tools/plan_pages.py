"""Write the tables of the planner's guides: `python -m tools.plan_pages [--check]`.

docs/guides/what-do-i-need.md has the best layout of models on devices, and what states and
activations take; docs/guides/published-layouts.md has the arithmetic of published layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.base.words import percent, seconds, size
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training, UserError
from shardwise.config.presets import MODELS, published_runs
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.divisions import layout_name
from shardwise.lab.planner.estimate import Estimates
from shardwise.lab.planner.exact import Choice, explain
from shardwise.lab.planner.plan_page import OVERHEADS, time_parts
from shardwise.lab.planner.search import search

DOCS = Path(__file__).parents[1] / "docs" / "guides"
START, END = "<!-- tools/plan_pages.py {} -->", "<!-- end -->"
FAST, SLOW, OLDER = "8xH100-80GB", "8xRTX4090", "8xA100-40GB"
CASES = (
    ("qwen3_5-0.8b", "1xRTX4090", 1, None),
    ("qwen3_5-0.8b", FAST, 1, None),
    ("qwen3_5-0.8b", SLOW, 1, None),
    ("qwen3_5-0.8b", FAST, 4, "400Gbps"),
    ("qwen3_5-0.8b", SLOW, 4, "25Gbps"),
    ("qwen3_5-9b", FAST, 1, None),
    ("qwen3_5-9b", FAST, 1, "PCIe4"),
    ("qwen3_5-9b", SLOW, 1, None),
    ("llama-3.1-70b", FAST, 1, None),
    ("llama-3.1-70b", FAST, 1, "PCIe4"),
    ("llama-3.1-70b", FAST, 4, "400Gbps"),
    ("llama-3.1-70b", FAST, 4, "25Gbps"),
    ("llama-3.1-405b", OLDER, 1, None),
    ("llama-3.1-405b", SLOW, 1, None),
    ("llama-3.1-405b", OLDER, 64, "400Gbps"),
    ("llama-3.1-405b", FAST, 64, "400Gbps"),
    ("deepseek-v3", SLOW, 1, None),
    ("deepseek-v3", SLOW, 64, "100Gbps"),
    ("deepseek-v3", FAST, 64, "400Gbps"),
)
"""Preset, devices of a node, nodes, and the link between them, or that of one node's devices where
it is not the usual one."""
ROWS, LENGTH = 512, 8_192
RECOMPUTED = {"none": "", "operators": "operators", "full": "all layers"}


def question(
    preset: str, devices: str, nodes: int, link: str | None, lora: bool, **changes: Any
) -> Question:
    """Return what is asked of the planner: LoRA on bfloat16 weights, or all float32 weights."""
    cfg = RunConfig(
        Model(str(MODELS / preset), dtype="bfloat16" if lora else "float32"),
        Data("any", sequence_length=LENGTH),
        Training("any", global_batch_size=ROWS, precision="bfloat16"),
        lora=Lora(r=16, alpha=32) if lora else None,
    )
    return Question(replace(cfg, **changes), cluster_of(devices, nodes, link))


def needs(lora: bool) -> Iterator[str]:
    """Yield the table of the best layouts, with LoRA or in full."""
    yield (
        "| model | devices | enough | best layout | micro-batch | recomputed | offloaded "
        "| memory | step | MFU |"
    )
    yield "|---|---|---|---|---:|---|---|---:|---:|---:|"
    for preset, devices, nodes, link in CASES:
        where = ", ".join(filter(None, [f"{nodes} x {devices}" if nodes > 1 else devices, link]))
        cells = _best(question(preset, devices, nodes, link, lora))
        yield f"| {preset} | {where} | {' | '.join(cells)} |"


def _best(asked: Question) -> Iterator[str]:
    """Yield the cells of a row: what is enough, then the fastest layout that fits, or the least."""
    answer = search(asked)
    simple = [answer.simpler[name] for name in ("single", "ddp", "fsdp2") if name in answer.simpler]
    fitting = [*answer.choices, *(choice for choice in simple if choice.fits)]
    kinds = {layout_name(choice.candidate.division) for choice in fitting}
    enough = (("one device", {"single", "ddp"}), ("fsdp2", {"fsdp2", "hsdp"}), ("more axes", kinds))
    yield next((words for words, names in enough if kinds & names), "nothing fits")
    best = answer.explained
    assert best is not None
    candidate = best.candidate
    yield f"`{best.title}`" + (f", {candidate.schedule}" if candidate.division.pp > 1 else "")
    yield str(candidate.micro_batch_size)
    yield RECOMPUTED.get(str(candidate.recomputation), "some layers")
    on_host = size(best.memory.host * asked.cluster.per_node)
    yield "" if candidate.offload == "none" else f"{candidate.offload}, {on_host} a node"
    yield size(best.memory.total)
    yield seconds(best.time.total)
    yield percent(best.mfu)


def sizes() -> Iterator[str]:
    """Yield the table of states and activations on one device that has room for all of them."""
    yield (
        "| model | LoRA: states | activations of a row | operators recomputed | all recomputed | "
        "in full: states | activations of a row | all recomputed |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for preset in dict.fromkeys(preset for preset, *_ in CASES):
        cells = [preset]
        for lora, ways in ((True, ("none", "operators", "full")), (False, ("none", "full"))):
            asked = question(preset, "1xH100-80GB", 1, None, lora)
            choice, subject = explain(asked)
            weights, optimizer = choice.memory.weights, choice.memory.optimizer
            gradients = optimizer // 2  # AdamW has two numbers of each element that has a gradient
            cells += [size(weights + gradients + optimizer)]
            estimates = Estimates(asked, subject)
            cells += [size(round(estimates.kept(way, 1)[0].of(1))) for way in ways]
        yield f"| {' | '.join(cells)} |"


def _largest_loss(choice: Choice) -> str:
    """Return the part of a step that loses most time, if any loses a twentieth."""
    parts = time_parts(choice.time)
    lost = max(OVERHEADS, key=lambda part: parts[part])
    share = parts[lost] / choice.time.total
    return f"{percent(share)} {lost}" if share >= 0.05 else "computation binds"


def published(names: Container[str] | None = None) -> Iterator[str]:
    """Yield the table of published layouts, by default of all, then where each comes from."""
    runs = {name: run for name, run in published_runs().items() if names is None or name in names}
    yield "| run | layout | devices | memory | step | tokens/s each | MFU | most lost | published |"
    yield "|---|---|---|---:|---:|---:|---:|---|---|"
    for name, run in runs.items():
        yield from _rows_of(name, run)
    yield ""
    for name, run in runs.items():
        yield f"- **{name}**: {run['why']}."
        for key in ("source", "chosen", "unlike"):
            if key in run:
                yield f"  *{key.capitalize()}:* {run[key]}."


def _rows_of(name: str, run: dict[str, Any]) -> Iterator[str]:
    """Yield the row of a published run, and where it does not fit that with recomputation."""
    nodes, published = run.get("nodes", 1), run.get("throughput", "")
    devices = f"{nodes} x {run['devices']}" if nodes > 1 else run["devices"]
    if "preset" not in run:
        yield f"| {name} | {run['layout']} | {devices} | in words | | | | | {published} |"
        return
    for checkpointing in dict.fromkeys((run.get("checkpointing", "none"), "full")):
        title = name if checkpointing == "none" else f"{name}, layers recomputed"
        try:
            choice, _ = explain(asked := _question_of(run, checkpointing))
        except UserError as error:
            yield f"| {title} | refused: {error} | {devices} | | | | | | {published} |"
            return
        fits = "" if choice.fits else ", does not fit"
        yield (
            f"| {title} | `{choice.title}` | {devices} | {size(choice.memory.total)}{fits} | "
            f"{seconds(choice.time.total)} | {choice.tokens_per_second / asked.num_ranks:,.0f} | "
            f"{_mfu(choice)} | {_largest_loss(choice)} | {published} |"
        )
        if choice.fits:
            return


def _mfu(choice: Choice) -> str:
    """Return the MFU from that where no message hides behind computation to the predicted one."""
    lowest = choice.mfu / (1 + choice.time.hidden_communication / choice.time.total)
    return " to ".join(dict.fromkeys((percent(lowest), percent(choice.mfu))))


def _question_of(run: dict[str, Any], checkpointing: str) -> Question:
    return question(
        run["preset"],
        run["devices"],
        run["nodes"],
        run.get("link"),
        lora=False,
        model=Model(str(MODELS / run["preset"]), dtype=run.get("dtype", "bfloat16")),
        data=Data("any", sequence_length=run["sequence_length"]),
        training=Training(
            "any",
            global_batch_size=run["rows"],
            precision=run.get("precision", "bfloat16"),
            micro_batch_size=run.get("micro_batch_size", 1),
            checkpointing=checkpointing,
        ),
        parallel=Parallel(**run["parallel"]),
    )


def with_table(text: str, lines: Iterable[str], start: str) -> str:
    """Return a page with other lines between its two marks."""
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(END)
    return "\n".join([before + start, *lines, END + after])


TABLES: dict[str, dict[str, Callable[[], Iterable[str]]]] = {
    "what-do-i-need.md": {
        "lora": partial(needs, lora=True),
        "full": partial(needs, lora=False),
        "sizes": sizes,
    },
    "published-layouts.md": {"published": published},
}
"""The tables of each page, by the name in the comment before it."""


def main() -> int:
    """Write the pages, or with --check return 1 where one is not what the planner says."""
    stale = []
    for name, tables in TABLES.items():
        path = DOCS / name
        text = new = path.read_text(encoding="utf-8")
        for kind, table in tables.items():
            new = with_table(new, table(), START.format(kind))
        if new != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"changed: {', '.join(stale)}")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
