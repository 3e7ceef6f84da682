"""Pipelines: what is refused and how, what a step does in which order, and what is not done, sent or kept."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.config import Lora, Parallel, RunConfig, UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.training import build
from tests.distributed import run_ranks
from tests.models.unproven import write_config
from tests.parity.harness import CONFIGS, Cell, run_config

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


# ------------------------------------------------------------------------------------------------------------- refusals

ONE, THREE = {"global_batch_size": 2}, {"global_batch_size": 6}  # micro-batches
REFUSED = {
    "too few for 1f1b": (
        config(training=ONE),
        "1f1b on 2 ranks needs 2 micro-batches or more, not 1; raise the global batch size",
    ),
    "too few for dualpipe-v": (
        config("dualpipe-v", training=THREE),
        "dualpipe-v on 2 ranks needs 4 micro-batches or more, not 3; raise the global batch size",
    ),
    "rounds": (
        config("interleaved-1f1b", training={"global_batch_size": 10}),
        "makes 2 equal rounds of 5 micro-batches, which does not work out; give 4 by the global batch size",
    ),
    "two stages per rank": (config(virtual_stages=2), "1f1b has one stage per rank, not 2; set virtual_stages to 1"),
    "three stages per rank": (
        config("zbv", virtual_stages=3),
        "zbv has two stages per rank, not 3; set virtual_stages to 2",
    ),
    "more stages than layers": (
        config("looped-bfs", virtual_stages=3),
        r"6 pipeline stages \(2 ranks x 3\) are more than the model's 4 layers; use fewer",
    ),
    "a split of another model": (
        config(split=[1, 2]),
        r"the split \[1, 2\] does not cover the model; give 2 numbers of layers that add up to 4",
    ),
    "an empty stage": (
        config("looped-bfs", split=[1, 0, 2, 1]),
        "has a stage with nothing in it; only the first .embedding. and the last .head. can be without a layer",
    ),
    "a limit no split meets": (
        config(memory_limit_gib=1e-5),
        r"no split over 2 ranks keeps each within 10738 bytes .*; \d+ bytes \(0.00 GiB\) per rank would do",
    ),
    "a limit that uniform breaks": (
        config(memory_limit_gib=1e-5, split="uniform"),
        "the uniform split takes .* on a rank and the limit is 10738 .*; raise it, or let the split be balanced",
    ),
    **{
        layout: (config(data=layout), rf"pp-{layout} is not proven for llama; use one of .*pp-ddp, pp-fsdp2")
        for layout in ("zero1", "zero2", "fsdp1")
    },
    "offload": (config(data="fsdp2", offload="all"), "parallel.offload is not proven in a pipeline; leave it at none"),
    "halves and resharding": (
        config("zbv", data="fsdp2"),
        "zbv halves backwards, .* set parallel.reshard_after_forward to false, or use 1f1b",
    ),
    "halves and compiled code": (
        config("zbv", training={"compile": "aot_eager"}),
        "zbv halves backwards, which compiled code cannot; set training.compile to none, or use 1f1b",
    ),
    **{
        f"float32 sums, {name}": (
            config(**options, model=BFLOAT16, training={"accumulation": "float32"}),
            "training.accumulation is float32, but in a pipeline .* use 1f1b with ddp, or set model.dtype to float32",
        )
        for name, options in {"fsdp2": {"data": "fsdp2"}, "halves": {"schedule": "zbv"}}.items()
    },
    "float16 products of bfloat16": (
        config(model=BFLOAT16, training={"precision": "float16"}),
        "hidden states of llama change their dtype on the way; use bfloat16 or float32 for both",
    ),
    "two shards of a tied weight": (
        config("zbv", data="fsdp2", reshard_after_forward=False, model=TIED),
        "two stages that fsdp2 shards cannot share one; use interleaved-zero-bubble or 1f1b, or ddp",
    ),
    "layers of no such kind": (
        config(training={"checkpointing": ["mamba2"]}),
        "names mamba2, but this model's layers are of the kinds full_attention; choose among these, or full",
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
    """What each rank says: of every config that is refused, of one that is not, and of an unlisted family."""
    path = write_config("mistral", tmp_path_factory.mktemp("mistral"))
    cfgs = {name: cfg for name, (cfg, _) in REFUSED.items()}
    cfgs |= {"none": config(), "unlisted": config(model={"path": str(path)})}
    cfgs["float32 factors"] = config("zbv", model=BFLOAT16, training={"accumulation": "float32"}, lora=Lora())
    return dict(zip(cfgs, zip(*run_ranks(RANKS, _answers, list(cfgs.values()))), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line_with_a_way_out_before_memory_is_taken(name, answers):
    said, also = answers[name]
    assert said == also  # every rank finds it, so none waits for another
    assert re.search(REFUSED[name][1], said), said


def test_a_family_that_is_not_listed_is_refused(answers):
    said, _ = answers["unlisted"]
    assert said == "pp is not proven for mistral; use one of ddp, fsdp1, fsdp2, hsdp, single, zero1, zero2"


def test_what_is_not_refused_takes_memory(answers):
    assert answers["none"] == answers["float32 factors"] == ("memory is taken",) * RANKS


@pytest.mark.parametrize(
    "parallel", [{"schedule": "zbv"}, {"virtual_stages": 2}, {"split": "uniform"}, {"memory_limit_gib": 1.0}]
)
def test_keys_of_a_pipeline_need_one(parallel):
    with pytest.raises(UserError, match=r"for a pipeline; set parallel.pp to 2 or more"):
        Parallel(**parallel)
