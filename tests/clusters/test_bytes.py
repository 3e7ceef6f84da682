"""What crosses the cable between two nodes in a training step is what the formulas say."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shardwise import cli
from shardwise.assembly.describe import describe
from shardwise.planner.between_nodes import bytes_between_nodes
from shardwise.planner.share import boundaries_of
from shardwise.run_file import load_config
from tests.clusters.cable import PREAMBLE_BYTES
from tests.clusters.nodes import ADDRESSES, RANKS_PER_NODE, Nodes, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
NUM_RANKS = RANKS_PER_NODE * len(ADDRESSES)
SHORT, LONG = 3, 6
"""Steps of the two runs of a layout: what they send before and after their steps is the same."""
RUN = (
    *("--training.micro_batch_size=1", "--training.eval_every=0", "--measure.memory=false"),
    *("--training.sample=null", "--data.validation=0"),
)
LAYOUTS = {
    "ddp": ("data=ddp",),
    "zero1": ("data=zero1",),
    "fsdp2": ("data=fsdp2",),
    "hsdp": ("data=fsdp2", "dp_replicate=2"),
    "ddp-tp": ("data=ddp", "tp=2"),
    "pp-tp": ("data=single", "pp=2", "tp=2"),
    "pp-fsdp2": ("data=fsdp2", "pp=2"),
    "tp": ("data=single", "tp=4"),
}
SIGNAL_BYTES = 8
"""Besides the formulas: in each step all ranks agree on whether a signal has come."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert cli.main(["init"]) == 0
    finally:
        os.chdir(before)
    with Nodes(folder) as both:
        yield both


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_to_the_other_node_what_the_formulas_say(nodes, layout):
    keys = [f"--parallel.{key}" for key in LAYOUTS[layout]]
    runs = {
        steps: nodes.train(
            *(*RUN, *keys, f"--training.steps={steps}"),
            f"--training.output_dir=runs/{layout}-{steps}",
        )
        for steps in (SHORT, LONG)
    }
    sent = {
        part: (getattr(runs[LONG], part) - getattr(runs[SHORT], part)) / (LONG - SHORT)
        for part in vars(runs[LONG])
    }
    path = nodes.folder / "run.yaml"
    cfg = load_config(path, [*RUN, *keys, f"--model.path={nodes.folder / 'tiny-qwen3_5'}"])
    run = describe(cfg, NUM_RANKS)
    kinds = bytes_between_nodes(cfg, run, RANKS_PER_NODE, boundaries_of(cfg, run))
    print(layout, sent, kinds)
