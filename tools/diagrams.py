"""Draw the diagrams of docs/diagrams: what each rank holds and sends, pipelines, the code.

    python -m tools.diagrams

Bytes are those of shardwise.lab.planner, timelines those of shardwise.base.schedule, packages and
order those of the code: nothing here is a number by hand. tests/tools/test_diagrams.py draws them
all again and compares.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from tools.pictures.canvas import Canvas
from tools.pictures.house import draw_house, draw_stages
from tools.pictures.layers import PERIOD, cell_of, draw_grid, strip_of
from tools.pictures.placed import Placed, holding_of
from tools.pictures.ranks import Move, Ranks, draw
from tools.pictures.steps import Chart, Way, draw_attention, draw_pipelines, draw_ring, draw_scan

from shardwise.assembly.describe import Description, describe
from shardwise.assembly.order import AFTER_LOADING, BEFORE_LOADING, ON_THE_WHOLE
from shardwise.base.words import seconds, size
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.lab.planner.axes.cp import RankMixer, sent_by_layers
from shardwise.lab.planner.communication import bytes_leaving
from shardwise.lab.planner.messages import sizes_of
from shardwise.models.facts import context_facts
from shardwise.models.patches import PATCHES
from shardwise.training.step import forward_backward, training_step

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "diagrams"
LAYOUTS = Path(__file__).with_suffix(".yaml")
"""The layouts to draw, and in words what moves when."""
CALIBRATION = ROOT / "results" / "study" / "calibration.json"
"""Of a machine that ran a part of the study; the diagram of a ring has no times without it."""
MODELS = ROOT / "src" / "shardwise" / "config" / "presets" / "models"
ROWS, SEQUENCE = 8, 2048
LEAST_BYTES = 2**10
"""Smaller messages are the few numbers of a step, which every layout sends."""


@dataclass(frozen=True, eq=False)  # each is itself
class Subject:
    """A model to draw."""

    preset: str
    name: str
    title: str
    short: str
    lora: Lora | None
    dtype: Any = "float32"


DENSE = Subject(
    "llama-3.1-8b", "Llama 3.1 8B", "Llama 3.1 8B, dense, all weights trained", "dense", None
)
HYBRID = Subject(
    "qwen3_5-9b",
    "Qwen3.5 9B with LoRA",
    "Qwen3.5 9B, hybrid, LoRA on bfloat16 weights",
    "LoRA",
    Lora(r=16, alpha=32),
    "bfloat16",
)
HYBRID_FULL = replace(HYBRID, lora=None, dtype="float32")
MIXTURE = Subject(
    "granite-4.0-h-tiny",
    "Granite 4.0 H Tiny",
    "Granite 4.0 H Tiny, a hybrid with experts, all weights trained",
    "full",
    None,
)
MIXTURE_LORA = replace(
    MIXTURE,
    title="The same with LoRA on bfloat16 weights",
    short="LoRA",
    lora=Lora(r=16, alpha=32),
    dtype="bfloat16",
)
SUBJECTS = {"dense": DENSE, "hybrid": HYBRID, "mixture": MIXTURE, "mixture with LoRA": MIXTURE_LORA}


def config(subject: Subject, parallel: Parallel) -> RunConfig:
    """Return the run of a model under a layout."""
    return RunConfig(
        Model(str(MODELS / subject.preset), init="random", dtype=subject.dtype),
        Data("unused", sequence_length=SEQUENCE),
        Training(
            output_dir="unused",
            global_batch_size=ROWS,
            micro_batch_size=1,
            device="cpu",
            precision="bfloat16",
            checkpointing="full",
        ),
        subject.lora,
        parallel,
    )


@cache
def model_of(subject: Subject) -> Description:
    """Return a model on meta."""
    return describe(config(subject, Parallel()), 1)


@cache
def placed(subject: Subject, parallel: Parallel, num_ranks: int) -> Placed:
    """Return a model under a layout."""
    return Placed.of(config(subject, parallel), model_of(subject), num_ranks)


def timelines(subject: Subject, parallel: Parallel, names: Sequence[str]) -> list[Chart]:
    """Return a chart for each of these splits or schedules, at costs counted in FLOPs."""
    charts = []
    for name in names:
        key = "split" if name in ("uniform", "balanced") else "schedule"
        job = placed(subject, replace(parallel, **{key: name}), parallel.pp)
        assert job.split is not None
        heading = f"{subject.name}, {name} split" if key == "split" else name
        charts.append(Chart(heading, name, job.split.timeline, job.layers))
    return charts


def pipelines() -> Iterator[tuple[str, str, Canvas]]:
    """Yield the charts of schedules, and of splits."""
    base = Parallel(pp=4)
    sizes = f"{base.pp} ranks, {ROWS} micro-batches"
    title = f"The order of work: {sizes}, LoRA on a hybrid model"
    names = ("gpipe", "1f1b", "interleaved-1f1b")
    yield "schedules", title, draw_pipelines(title, [timelines(HYBRID, base, names)])
    title = f"Equal numbers of layers, and layers by cost: {base.schedule}, {sizes}"
    groups = [timelines(subject, base, ("uniform", "balanced")) for subject in (DENSE, HYBRID)]
    ways = ("uniform", "balanced")
    cuts = [(way, placed(HYBRID, replace(base, split=way), base.pp)) for way in ways]
    strip = strip_of(HYBRID.name, placed(HYBRID, Parallel(), 1), cuts)
    yield "splits", title, draw_pipelines(title, groups, strip)


def grid() -> Iterator[tuple[str, str, Canvas]]:
    """Yield what two ranks of DDP and of FSDP hold of the layers of three models."""
    subjects = {
        DENSE: "dense, all trained",
        HYBRID_FULL: "hybrid, all trained",
        HYBRID: "hybrid with LoRA",
    }
    columns = [
        [
            cell_of(placed(subject, Parallel(data=data), 2), placed(subject, Parallel(), 1), title)
            for data in ("ddp", "fsdp2")
        ]
        for subject, title in subjects.items()
    ]
    headings = (
        "DDP: all of every layer on both ranks; gradients are all-reduced",
        "FSDP: a half of every layer on each rank; weights are all-gathered, gradients "
        "reduce-scattered",
    )
    title = f"DDP and FSDP on two ranks: {PERIOD} layers, and what each rank holds and sends"
    note = f"{DENSE.name} and Qwen3.5 9B. "
    note += "Held: weights, gradients, optimizer states. Adapters are not to scale. " + note_on(
        config(DENSE, Parallel())
    )
    rows = [*zip(headings, zip(*columns, strict=True), strict=True)]
    yield "grid", title, draw_grid(title, rows, note)


def ring() -> Iterator[tuple[str, str, Canvas]]:
    """Yield an all-reduce around a ring."""
    title = "An all-reduce is a reduce-scatter, then an all-gather; broadcast and reduce"
    sizes = {"dp_shard": 4}
    kinds, others = ("reduce-scatter", "all-gather", "all-reduce"), ("broadcast", "reduce")
    sent = [size(bytes_leaving({(kind, "dp_shard"): (1, 2**30)}, sizes)) for kind in kinds]
    notes = (
        f"{sent[0]} of a tensor of 1 GiB leave each rank",
        f"{sent[1]} leave each rank",
        f"Together {sent[2]} of the 1 GiB leave each rank.{measured_messages((*kinds, *others))}",
        "what rank 0 has goes to all ranks",
        "the sum of all ranks goes to rank 0 only",
    )
    yield "collectives", title, draw_ring(title, 4, notes)


def measured_messages(kinds: Sequence[str], path: Path = CALIBRATION) -> str:
    """Return what the largest messages of these kinds took, and where."""
    if not path.is_file():
        return ""
    calibration = json.loads(path.read_text(encoding="utf-8"))
    rows, facts = calibration["collectives"], calibration["environment"]
    largest = {
        kind: max((row for row in rows if row["kind"] == kind), key=lambda row: row["num_bytes"])
        for kind in kinds
    }
    first = largest[kinds[0]]
    times = ", ".join(f"{kind} {seconds(row['seconds'])}" for kind, row in largest.items())
    amount = f"{size(first['num_bytes'])} among {first['num_ranks']} CPU processes over gloo"
    where = f"{facts['cpu_count']} cores of {facts['device']}"
    measured = f" Measured on {where}, {amount}: {times}."
    return f"{measured} gloo's reduce-scatter is an all-reduce inside."


def context() -> Iterator[tuple[str, str, Canvas]]:
    """Yield what context parallelism does in attention and in recurrent layers."""
    ways = []
    for subject, way, text in (
        (DENSE, "ring", "ring: keys go to the ranks whose queries see them"),
        (DENSE, "gather", "gather: every rank gets all keys"),
        (HYBRID, "ring", "ring in a hybrid model: a rank has one stretch of the row"),
        (HYBRID, "ulysses", "ulysses in a hybrid model: tokens for heads, and back"),
    ):
        job = placed(subject, Parallel(cp=4, cp_attention=way), 4)
        taken, cut = context_facts(job.run.hf, job.run.spec).way_and_cut(job.cfg.parallel)
        attention = next(m for m in job.shares[0].chunks[0].sending["cp"] if m.is_attention)
        sizes = f"sent by each rank, per layer and row: {_sizes(job, attention)}"
        sizes += f" ({subject.name})"
        ways.append(Way(text, cut, taken == "ulysses", taken == "gather", sizes))
    title = f"Attention over ranks with other tokens of a row ({SEQUENCE} tokens)"
    yield "context-attention", title, draw_attention(title, ways)
    job = placed(HYBRID, Parallel(cp=4), 4)
    mixer = next(m for m in job.shares[0].chunks[0].sending["cp"] if not m.is_attention)
    convolution, recurrence = (
        replace(mixer, carried=mixer.carried._replace(**{left_out: 0}))
        for left_out in ("state_numel", "channels")
    )
    each = SEQUENCE // 4
    texts = {
        "halo": f"The inputs of the {mixer.width - 1} tokens before a border go up, "
        f"their gradients down. Sent by each rank, per layer and row: {_sizes(job, convolution)}.",
        "scan": "Each rank turns its tokens into a map of the state. In each round it sends what "
        "it knows on: of all tokens of the ranks that are filled below.",
        "start": "Now every rank has the state in which its tokens begin: that after all ranks "
        "before it.",
        "back": "The backward does the same from the last rank. Sent by each rank, per layer and "
        f"row: {_sizes(job, recurrence)}, whatever the length of the row.",
    }
    tokens = [f"{rank * each}–{(rank + 1) * each - 1}" for rank in range(4)]
    title = "Recurrent layers over ranks that have other tokens of a row"
    yield "context-recurrent", title, draw_scan(title, tokens, texts)


def _sizes(job: Placed, mixer: RankMixer) -> str:
    """Return what each rank sends for a mixer, as text: one number if all send the same."""
    texts = [size(_sent(job, mixer, rank)) for rank in range(job.cfg.parallel.cp)]
    if len({*texts}) == 1:
        return texts[0]
    (unit,) = {text.split(" ")[1] for text in texts}
    return f"{' / '.join(text.split(' ')[0] for text in texts)} {unit}"


def _sent(job: Placed, mixer: RankMixer, rank: int) -> int:
    """Return the bytes that leave a rank for a mixer and micro-batch."""
    sent = sent_by_layers(job.cfg, job.run.hf, job.run.spec, [mixer], rank)
    sizes = sizes_of(job.cfg, job.run)
    return sum(
        bytes_leaving({(kind, "cp"): total}, sizes) for one in sent for kind, total in one.items()
    )


def code() -> Iterator[tuple[str, str, Canvas]]:
    """Yield the packages, and what is done to a model and in a step."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("ARROWS", "EVERYONE")
    }
    everyone = lists["EVERYONE"]
    arrows = {
        name: frozenset(to - everyone)
        for name, to in lists["ARROWS"].items()
        if name not in everyone
    }
    arrows["top"] = frozenset(arrows)
    title = "The packages: an arrow means “may import”, and all go down"
    ground = f"all may import: {', '.join(sorted(everyone))}"
    note = "Arrows that follow from others are left out."
    house = draw_house(title, arrows, "cli, commands, library", ground, note)
    yield "house", title, house
    patches = [name for name, _ in PATCHES]
    before = [entry.name for entry in BEFORE_LOADING]
    first = before.index(patches[0])
    before[first : first + len(patches)] = [f"{len(patches)} patches of forwards"]
    assert not set(before) & set(patches)
    sections = {
        "to the whole model, without memory": [entry.name for entry in ON_THE_WHOLE],
        "to this rank's parts of it": before,
        "then weights are loaded, and": [entry.name for entry in AFTER_LOADING],
    }
    source = inspect.getsource(forward_backward) + inspect.getsource(training_step)
    places = [source.index(f"{name}(" if name not in LOOPS else name) for name in STAGES]
    assert places == sorted(places), "STAGES are not in the order of training/step.py"
    title = "From a model to a step"
    built = "Built once, in this order, each if the run asks for it"
    repeated = "Every step, the same for every layout"
    stages = draw_stages(
        title, built, sections, repeated, STAGES, "Every rank has the same result."
    )
    yield "step", title, stages


STAGES = {
    "count_targets": "target tokens, or pairs, of the global batch, over all ranks",
    "pm.run": "forward and backward of each micro-batch",
    "pm.reduce_grads": "the gradients that nothing has summed yet",
    "sum_loss": "one number, over stages and data ranks",
    "clip_by_global_norm": "squares, summed over what shards a gradient",
    "optimizer.step": "on what the rank holds; zero1 and zero2 then gather",
    "lr_schedule.step": "the next learning rate",
    "optimizer.zero_grad": "no gradients are left",
}
"""The stages of a step by their names in training/step.py, and what each does."""
LOOPS = ("pm.reduce_grads",)
"""Of them, the lists of functions."""


def layouts() -> Iterator[tuple[str, str, Canvas]]:
    """Yield what each rank holds and sends under each layout of LAYOUTS."""
    content = yaml.safe_load(LAYOUTS.read_text(encoding="utf-8"))
    jobs: dict[tuple[str, Subject], Placed] = {}
    # Model by model: the planner remembers the last one.
    for subject in SUBJECTS.values():
        for name, layout in content.items():
            if subject in subjects_of(layout):
                parallel = Parallel(**layout["parallel"])
                jobs[name, subject] = placed(subject, parallel, layout["ranks"])
    for name, layout in content.items():
        subjects, title = subjects_of(layout), layout["title"]
        ones = [placed(subject, Parallel(), 1) for subject in subjects]
        of_layout = [jobs[name, subject] for subject in subjects]
        holdings = [
            holding_of(job, one, subject.title)
            for job, one, subject in zip(of_layout, ones, subjects, strict=True)
        ]
        moves = [*moves_of(layout["moves"], dict(zip(subjects, of_layout, strict=True)))]
        yield name, title, draw(Ranks(title, holdings, moves, note_on(of_layout[0].cfg)))


def note_on(cfg: RunConfig) -> str:
    """Return what a step is."""
    training, length = cfg.training, cfg.data.sequence_length
    return (
        f"A step: {training.global_batch_size} rows of {length} tokens, "
        f"{training.micro_batch_size} in a micro-batch; {training.precision} products, "
        f"{cfg.optimizer.name}, checkpointing {training.checkpointing}."
    )


def subjects_of(layout: Mapping[str, Any]) -> list[Subject]:
    """Return the models that a layout is drawn with."""
    return [SUBJECTS[name] for name in layout.get("models", ("dense", "hybrid"))]


def moves_of(moves: Mapping[str, Sequence[str]], jobs: Mapping[Subject, Placed]) -> Iterator[Move]:
    """Yield the messages of a layout, in the order and with the words of LAYOUTS."""
    sent: dict[str, dict[Subject, list[int]]] = {}
    for subject, job in jobs.items():
        for key in sorted({key for share in job.leaving for key in share}):
            numbers = [share.get(key, 0) for share in job.leaving]
            if max(numbers) >= LEAST_BYTES:
                sent.setdefault(" ".join(key), {})[subject] = numbers
    assert sent.keys() == moves.keys(), sent
    for key, (part, what) in moves.items():
        kind, axis = key.split(" ")
        texts = [f"{size(max(of))} ({subject.short})" for subject, of in sent[key].items()]
        groups = next(iter(jobs.values())).groups(axis)
        is_equal = all(len({*numbers}) == 1 for numbers in sent[key].values())
        which = "each rank" if is_equal else "the rank that sends most"
        text = f"leave {which}: {', '.join(texts)}"
        yield Move(kind, part, what, text, groups, is_chain=key == "send pp")


def diagrams() -> Iterator[tuple[str, str]]:
    """Yield the name of every diagram, and its SVG."""
    for name, title, canvas in chain(layouts(), grid(), pipelines(), ring(), context(), code()):
        yield name, canvas.svg(title)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, svg in diagrams():
        (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
