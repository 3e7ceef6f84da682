"""The layout of an elastic run on the ranks that are left: only data axes differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.layouts import (
    Facts,
    axis_sizes,
    fitted,
    has_copies,
    num_data_ranks,
    num_microbatches,
)
from shardwise.config import Data, Launch, Model, Parallel, RunConfig, Training
from shardwise.config.rules import refusals


def config(
    data: str,
    nodes: int,
    processes: int,
    min_nodes: int | None = 1,
    rows: int = 64,
    **parallel: int,
) -> RunConfig:
    return RunConfig(
        Model("m"),
        Data("d"),
        Training("out", global_batch_size=rows),
        parallel=Parallel(data, **parallel),  # ty: ignore[invalid-argument-type]
        launch=Launch(nodes=nodes, processes=processes, min_nodes=min_nodes),
    )


SIZES = st.sampled_from((1, 2, 3, 4))


@given(
    data=st.sampled_from(("single", "ddp", "zero1", "zero2", "fsdp1", "fsdp2")),
    nodes=st.integers(1, 6),
    processes=SIZES,
    axes=st.fixed_dictionaries(dict.fromkeys(("pp", "cp", "tp", "ep", "dp_replicate"), SIZES)),
    rows=st.sampled_from((24, 48, 64)),
    left=st.integers(1, 6),
)
def test_what_is_left_computes_the_same_rows_on_the_same_axes(
    data, nodes, processes, axes, rows, left
):
    if data != "fsdp2":
        axes = {**axes, "dp_replicate": 1}
    cfg = config(data, nodes, processes, 1, rows, **axes)
    num_ranks = min(left, nodes) * processes
    now = fitted(cfg, num_ranks)
    for axis in ("pp", "cp", "tp", "ep"):
        assert getattr(now.parallel, axis) == axes[axis]
    training = replace(now.training, check_copies_every=cfg.training.check_copies_every)
    assert replace(now, parallel=cfg.parallel, training=training) == cfg
    if left >= nodes:
        assert now is cfg
    if list(refusals(now, Facts(num_ranks))):
        return
    sizes = axis_sizes(now, num_ranks)
    product = 1
    for size in sizes.values():
        product *= size
    assert product == num_ranks
    at_once = num_data_ranks(now, num_ranks) * now.training.micro_batch_size
    assert num_microbatches(now, num_ranks) * at_once == rows


def test_replicas_are_lost_before_shards():
    cfg = config("fsdp2", 4, 8, dp_replicate=4)
    sizes = axis_sizes(fitted(cfg, 24), 24)
    assert (sizes["dp_replicate"], sizes["dp_shard"]) == (3, 8)
    # Two replicas, each over two nodes: three nodes have room for one, whose ranks hold less.
    cfg = config("fsdp2", 4, 8, dp_replicate=2)
    sizes = axis_sizes(fitted(cfg, 24), 24)
    assert (sizes["dp_replicate"], sizes["dp_shard"]) == (1, 24)


def test_fsdp1_alone_is_one_process():
    now = fitted(config("fsdp1", 2, 1), 1)
    assert now.parallel.data == "single"
    assert not list(refusals(now, Facts(1)))


@pytest.mark.parametrize(("num_ranks", "every"), [(2, 5), (1, 0)])
def test_copies_are_compared_where_there_are_any(num_ranks, every):
    cfg = config("ddp", 3, 1)
    cfg = replace(cfg, training=replace(cfg.training, check_copies_every=5))
    assert fitted(cfg, num_ranks).training.check_copies_every == every
    assert has_copies(cfg, num_ranks) == (every > 0)


@pytest.mark.parametrize(
    ("cfg", "num_ranks", "key"),
    [
        (config("ddp", 2, 1, tp=2), 1, "parallel.tp is 2"),
        (config("ddp", 3, 2, tp=4), 2, "parallel.tp is 4"),
        (config("ddp", 4, 1), 3, "training.global_batch_size 64 is not a multiple of 3"),
    ],
)
def test_what_is_left_may_be_refused(cfg, num_ranks, key):
    (message, *_) = [text for _, text in refusals(fitted(cfg, num_ranks), Facts(num_ranks))]
    assert key in message


def test_a_run_that_is_not_elastic_stays_as_it_is():
    cfg = config("fsdp2", 2, 2, min_nodes=None, dp_replicate=2)
    assert fitted(cfg, 2) is cfg
