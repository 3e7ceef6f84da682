"""What crosses the cable between two nodes in a training step is what the formulas say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tools.between_nodes import bytes_between_nodes

from shardwise.assembly.describe import describe
from shardwise.config.run_file import load_config
from shardwise.lab.planner.share import boundaries_of
from tests.clusters.cable import MTU, PREAMBLE_BYTES
from tests.clusters.nodes import ADDRESSES, RANKS_PER_NODE, Nodes, why_not
from tests.clusters.runs import prepare

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
NUM_RANKS = RANKS_PER_NODE * len(ADDRESSES)
SHORT, LONG = 5, 8
"""Steps of the two runs of a layout: what they send before and after their steps is the same.

At the end of a run all ranks send how far they have read, pickled. The tokens that a slot has
filled take two bytes there from 256 on, so both runs fill more: 5 x 64 and 8 x 64.
"""
RUN = (
    *("--training.micro_batch_size=1", "--training.eval_every=0", "--measure.memory=false"),
    *("--training.sample=null", "--data.validation=0"),
    # At the end of a pipeline's run, ranks exchange the times of all steps after these.
    f"--measure.warmup_steps={LONG}",
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
HEADER_BYTES = 52
SIGNAL_BYTES = 8
"""Besides the formulas: in each step all ranks agree on whether a signal has come."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Nodes]:
    with Nodes(prepare(tmp_path_factory.mktemp("nodes"))) as both:
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
    per_step = "crosses per step: " + ", ".join(f"{part} {sent[part]:,.0f}" for part in sent)
    path = nodes.folder / "run.yaml"
    cfg = load_config(path, [*RUN, *keys, f"--model.path={nodes.folder / 'tiny-qwen3_5'}"])
    run = describe(cfg, NUM_RANKS)
    kinds = bytes_between_nodes(cfg, run, RANKS_PER_NODE, boundaries_of(cfg, run))
    assert kinds is not None
    formula = sum(kinds.values()) + 4 * (NUM_RANKS - 1) / NUM_RANKS * SIGNAL_BYTES
    # gloo's reduce-scatter is an all-reduce inside, which sends twice as much.
    assert sent["tensors"] == formula + kinds.get("reduce-scatter", 0), per_step
    # Each piece of a tensor has three frames; nobody connects anew.
    assert sent["preambles"] % (3 * PREAMBLE_BYTES) == 0
    assert sent["greetings"] == 0
    # A packet has at most so much beside its headers, of 52 bytes with TCP's clock. How many only
    # say what has come depends on time, so this holds of a run and not of a difference.
    for of_run in runs.values():
        packets = (of_run.tensors + of_run.preambles) / (MTU - HEADER_BYTES)
        assert of_run.headers >= HEADER_BYTES * packets
