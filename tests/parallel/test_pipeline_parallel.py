"""Pipelines: what is refused and how, what a step does in which order, and what is not done, sent
or kept. test_pipeline_messages.py has how much is kept in a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.assembly import build
from shardwise.base.batches import IGNORED, Batch
from shardwise.base.schedule.orders import ORDERS, Pipeline
from shardwise.base.schedule.timeline import Event
from shardwise.base.schedules import HALVING
from shardwise.config import Lora, Parallel, RunConfig, UserError
from shardwise.metrics.live_tensors import live_tensors
from shardwise.models.stage import Stage
from shardwise.parallel.mesh import build_mesh
from shardwise.training.evaluate import evaluate
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.unproven import write_config
from tests.parity.harness import CONFIGS, Cell, DrawnStart, microbatches, run_config

RANKS = 2
BFLOAT16 = {"dtype": "bfloat16"}
TIED = {"path": str(CONFIGS / "tiny-qwen3_5-tied")}


def config(
    schedule: str = "1f1b",
    *,
    lora: Lora | None = None,
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **parallel: Any,
) -> RunConfig:
    """tiny-llama, of 4 layers, in full or with `lora`; 4 micro-batches of 2 rows."""
    cfg = run_config(Cell("llama", "single", "full"))
    return replace(
        cfg,
        lora=lora,
        training=replace(cfg.training, **(training or {})),
        model=replace(cfg.model, **(model or {})),
        parallel=Parallel(**{"pp": RANKS, "schedule": schedule, **parallel}),
    )


# ----------------------------------------------------------------------------------------- refusals

ONE, THREE = {"global_batch_size": 2}, {"global_batch_size": 6}  # micro-batches
REFUSED = {
    "too few for 1f1b": (
        config(training=ONE),
        "1f1b on 2 ranks needs 2 micro-batches or more, not 1; raise training.global_batch_size",
    ),
    "too few for dualpipe-v": (
        config("dualpipe-v", training=THREE),
        "dualpipe-v on 2 ranks needs 4 micro-batches or more, not 3; raise training",
    ),
    "rounds": (
        config("interleaved-1f1b", training={"global_batch_size": 10}),
        "equal rounds of micro-batches, and 5 micro-batches do not make equal rounds; change ",
    ),
    "two stages per rank": (
        config(virtual_stages=2),
        "1f1b has one stage per rank, not 2; set parallel.virtual_stages to 1",
    ),
    "three stages per rank": (
        config("zbv", virtual_stages=3),
        "zbv has 2 stages per rank, not 3; set parallel.virtual_stages to 2",
    ),
    "more stages than layers": (
        config("looped-bfs", virtual_stages=3),
        r"6 pipeline stages \(2 ranks x 3\) are more than the model's 4 layers; lower parallel.pp",
    ),
    "a split of another model": (
        config(split=[1, 2]),
        r"the split \[1, 2\] does not cover the model; give 2 numbers of layers that add up to 4",
    ),
    "an empty stage": (
        config("looped-bfs", split=[1, 0, 2, 1]),
        "has a stage with nothing in it; only the first .embedding. and the last .head.",
    ),
    "a limit no split meets": (
        config(memory_limit_gib=1e-5),
        r"no split over 2 ranks keeps each within 1e-05 GiB; set .* to 0\.\d+ or more",
    ),
    "a limit that uniform breaks": (
        config(memory_limit_gib=1e-5, split="uniform"),
        "the uniform split takes .* on a rank and the limit is 1e-05; .*balanced",
    ),
    **{
        layout: (config(data=layout), rf"pp-{layout} is not offered: {why}; use zero1, ddp or")
        for layout, why in (("zero2", "zero2 reduces .* in every backward, .*"), ("fsdp1", ".*"))
    },
    "halves and resharding": (
        config("zbv", data="fsdp2"),
        "zbv halves backwards, .* set parallel.reshard_after_forward to false, or use 1f1b",
    ),
    "halves and recomputation": (
        config("zbv", training={"checkpointing": "full"}),
        "zbv halves backwards, and torch recomputes .* set training.checkpointing to none",
    ),
    "halves and compiled code": (
        config("zbv", training={"compile": "aot_eager"}),
        "zbv halves backwards, which compiled code cannot; set training.compile to none",
    ),
    **{
        f"float32 sums, {name}": (
            config(**options, model=BFLOAT16, training={"accumulation": "float32"}),
            "training.accumulation is float32, but in a pipeline .* use 1f1b with ddp",
        )
        for name, options in {"fsdp2": {"data": "fsdp2"}, "halves": {"schedule": "zbv"}}.items()
    },
    "float16 products of bfloat16": (
        config(model=BFLOAT16, training={"precision": "float16"}),
        "hidden states change their dtype on the way; use bfloat16 or float32 for both",
    ),
    "two shards of a tied weight": (
        config("zbv", data="fsdp2", reshard_after_forward=False, model=TIED),
        "two stages that fsdp2 shards cannot share one; use interleaved-zero-bubble",
    ),
    "layers of no such kind": (
        config(training={"checkpointing": ["mamba2"]}),
        "names mamba2, but this model's layers are of the kinds full_attention; choose",
    ),
}


class MemoryTakenError(Exception):
    """A rank began to allocate weights."""


def _take_memory(*_: object) -> None:
    raise MemoryTakenError


def _answers(cfgs: list[RunConfig]) -> list[str]:
    """What this rank says of each."""
    build.materialise = _take_memory  # this process ends with the answers
    answers = []
    for cfg in cfgs:
        try:
            build.build(cfg, build_mesh(cfg, torch.device("cpu")))
        except (UserError, MemoryTakenError) as error:
            answers.append(str(error) or "memory is taken")
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, list[str]]:
    """What each rank says: of every config that is refused, of one that is not, and of an unlisted
    family."""
    path = write_config("ministral", tmp_path_factory.mktemp("ministral"))
    cfgs = {name: cfg for name, (cfg, _) in REFUSED.items()}
    cfgs |= {"none": config(), "unlisted": config(model={"path": str(path)})}
    cfgs["float32 factors"] = config(
        "zbv", model=BFLOAT16, training={"accumulation": "float32"}, lora=Lora()
    )
    return dict(zip(cfgs, zip(*run_ranks(RANKS, _answers, list(cfgs.values()))), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line_with_a_way_out_before_memory_is_taken(name, answers):
    said, also = answers[name]
    assert said == also  # every rank finds it, so none waits for another
    assert re.search(REFUSED[name][1], said), said


def test_a_family_that_is_not_listed_is_refused(answers):
    said, _ = answers["unlisted"]
    assert said.startswith("pp is not offered for ministral")


def test_what_is_not_refused_takes_memory(answers):
    assert answers["none"] == answers["float32 factors"] == ("memory is taken",) * RANKS


# -------------------------------------------------------------------------------------------- steps

WHOLE = [name for name in ORDERS if name not in HALVING]
CASES = [*((schedule, "full") for schedule in ORDERS), *((schedule, "upper") for schedule in WHOLE)]
LATER = (
    *((schedule, "full") for schedule in ("looped-bfs", "interleaved-zero-bubble")),
    *((schedule, "upper") for schedule in ("gpipe", "looped-bfs")),
)
"""Of these `make test` has the steps only (tests/parity)."""
NOW = [case for case in CASES if case not in LATER]
MICROBATCHES = 4
UPPER = Lora(r=4, targets=["layers.2.self_attn.q_proj", "layers.3.mlp.down_proj"])
"""What lies below, the lower of two stages or the lower two of four, has nothing to train."""


@dataclass(frozen=True)
class Seen:
    """One rank in some steps and evaluations."""

    losses: list[float]
    norms: list[float]
    lrs: list[float]
    tokens: list[int]  # the most likely ones after rows of two lengths
    trained: int  # parameters that this rank's optimizer has
    events: list[Event]  # of the first step
    sent: int  # messages to the other rank in it, hidden states or their gradients
    kept: int  # bytes of hidden states after the evaluations


def run_config_of(schedule: str | None, mode: str) -> RunConfig:
    lora = UPPER if mode == "upper" else None
    if schedule is None:
        return config(pp=1, lora=lora)
    return config(schedule, lora=lora, split="uniform")


def look(schedule: str | None, mode: str) -> Seen:
    """Two steps; between them evaluations, and a step in which all is of another shape."""
    cfg = run_config_of(schedule, mode)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build.build(cfg, mesh, DrawnStart())
    shorter = replace(cfg, training=replace(cfg.training, micro_batch_size=1))

    def rows(step: int, of: RunConfig = cfg) -> list[Batch]:
        return [cut(batch) if of is shorter else batch for batch in microbatches(of, mesh, step)]

    def train(batches: list[Batch]) -> float:
        result = training_step(job, batches, mesh, cfg.optimizer.max_grad_norm)
        norms.append(result.grad_norm)
        lrs.extend(group["lr"] for group in job.optimizer.param_groups[:1])
        return result.loss

    norms, lrs = [], []
    with counted_messages() as sent:
        losses = [train(rows(1))]
    events = list(job.pm.events())
    for of in (cfg, shorter):
        losses.append(evaluate(job.pm, [rows(7, of)], mesh, 1).loss)
    kept = sum(t.untyped_storage().nbytes() for t in live_tensors() if t.ndim == 3)
    losses += [train(rows(2, shorter)), train(rows(3))]
    tokens = [job.pm.next_token(job.pm, first_tokens(rows(1)[0], length)) for length in (7, 12)]
    return Seen(losses, norms, lrs, tokens, len(job.trainable()), events, len(sent), kept)


def cut(batch: Batch, length: int = 16) -> Batch:
    fields = ("input_ids", "labels", "document_ids")
    return replace(batch, **{name: getattr(batch, name)[:, :length] for name in fields})


def first_tokens(batch: Batch, length: int) -> Batch:
    row = batch.input_ids[:1, :length]
    return Batch(row, torch.full_like(row, IGNORED), torch.zeros_like(row), slots=(0,), step=0)


@contextmanager
def counted_messages() -> Iterator[list[None]]:
    sent: list[None] = []
    made = dist.P2POp

    def counting(op: Any, *args: Any, **kwargs: Any) -> dist.P2POp:
        sent.extend([None] * (op is dist.isend))
        return made(op, *args, **kwargs)

    dist.P2POp = counting
    yield sent
    dist.P2POp = made


def _look_at_all(cases: Iterable[tuple[str | None, str]]) -> list[Seen]:
    return [look(*case) for case in cases]


@cache
def _seen_in(cases: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], tuple[Seen, ...]]:
    return dict(zip(cases, zip(*run_ranks(RANKS, _look_at_all, cases)), strict=True))


def seen_in(*case: str) -> tuple[Seen, ...]:
    """Return what each rank has seen in a case; those of `make test` share their processes."""
    return _seen_in(LATER if case in LATER else tuple(NOW))[case]


@pytest.fixture(scope="module")
def alone() -> dict[str, Seen]:
    modes = ["full", "upper"]
    (found,) = run_ranks(1, _look_at_all, [(None, mode) for mode in modes])
    return dict(zip(modes, found, strict=True))


@pytest.mark.parametrize(("schedule", "mode"), some_now(CASES, NOW))
def test_steps_evaluations_and_tokens_are_those_of_one_process(schedule, mode, alone):
    one = alone[mode]
    for rank in seen_in(schedule, mode):
        assert rank.losses == pytest.approx(one.losses, rel=1e-6)
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        assert rank.lrs == one.lrs  # also where there is nothing to train
        assert rank.tokens == one.tokens
    assert sum(rank.trained for rank in seen_in(schedule, mode)) == one.trained


@pytest.mark.parametrize(("schedule", "mode"), some_now(CASES, NOW))
def test_no_hidden_states_are_kept_after_an_evaluation(schedule, mode):
    assert [rank.kept for rank in seen_in(schedule, mode)] == [0] * RANKS


@pytest.mark.parametrize(("schedule", "mode"), some_now(CASES, NOW))
def test_what_a_rank_does_is_what_the_schedule_says(schedule, mode):
    pipeline = Pipeline(
        schedule, RANKS, MICROBATCHES, Parallel(pp=RANKS, schedule=schedule).num_virtual
    )
    below = 0 if mode == "full" else pipeline.num_chunks // 2  # chunks that run no backward
    for rank, found in enumerate(seen_in(schedule, mode)):
        order = [
            action[:3]
            for action in pipeline.order(rank)
            if action.kind == "F" or action.chunk >= below
        ]
        events = sorted(found.events, key=lambda event: event.start)
        assert [(event.chunk, event.kind, event.microbatch) for event in events] == order
        assert all(event.rank == rank and 0 <= event.start < event.end for event in events)
        assert all(before.end <= after.start for before, after in pairwise(events))


@pytest.mark.parametrize("schedule", some_now(WHOLE, ("1f1b", "interleaved-1f1b")))
def test_no_gradient_is_sent_to_what_has_nothing_to_train(schedule):
    for mode in ("full", "upper"):
        virtual = Parallel(pp=RANKS, schedule=schedule).num_virtual
        cuts = range(RANKS * virtual - 1)  # between chunk c and the next, which the other rank has
        for rank, found in enumerate(seen_in(schedule, mode)):
            up = [c for c in cuts if c % RANKS == rank]
            down = [
                c
                for c in cuts
                if (c + 1) % RANKS == rank and (mode == "full" or c >= RANKS * virtual // 2)
            ]
            assert found.sent == MICROBATCHES * (len(up) + len(down))
    if virtual == 1:
        assert [rank.trained > 0 for rank in seen_in(schedule, "upper")] == [False, True]


def _fail() -> str:
    """Each rank in a forward of its own: rank 1 in its first, and rank 0, which has sent for that,
    in its next."""
    cfg = config("interleaved-1f1b")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build.build(cfg, mesh)
    forward, rank = Stage.forward, dist.get_rank()

    def failing(stage: Stage, carried: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
        if int(microbatch) == 1 - rank:
            raise MemoryError(f"on rank {rank}")
        return forward(stage, carried, microbatch)

    Stage.forward = failing
    with pytest.raises(MemoryError) as caught:
        job.pm.run(job.pm, microbatches(cfg, mesh, 1), 1.0, True)
    return str(caught.value)


def test_what_a_stage_raises_is_told_as_it_is(capfd):
    assert run_ranks(RANKS, _fail) == ["on rank 0", "on rank 1"]
    assert "pipeline" not in capfd.readouterr().err.lower()  # torch would log its whole schedule


def next_tokens(cell: Cell) -> list[int]:
    cfg = run_config(cell)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build.build(cfg, mesh, DrawnStart())
    ids = (torch.arange(12) * 37 % 256)[None]
    row = Batch(ids, ids, torch.zeros_like(ids), slots=(0,), step=1)
    with torch.no_grad():
        for part in job.pm.parts:
            part.eval()
        return [job.pm.next_token(job.pm, first_tokens(row, length)) for length in range(5, 13)]


@pytest.mark.slow  # the tests above have tokens of stages, parity shards of them
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_sample_where_stages_are_sharded(schedule):
    cell = Cell("qwen3_5_text", "pp-fsdp2", "lora", 4, schedule=schedule)
    (alone,) = run_ranks(1, next_tokens, cell.reference())
    assert run_ranks(4, next_tokens, cell) == [alone] * 4
    assert len(set(alone)) > 1
