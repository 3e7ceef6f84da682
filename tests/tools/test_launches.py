"""Launches of layers are what is committed: who adds one sees it here (`make launches`)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from tools.launches import MODELS, OUT, PAGE, SIDES, TUNINGS, counts, launches_of, ready, table_of

from shardwise.models.activations import unit_moves
from tests.left_out import some_now
from tests.models.fake_layers import passes

COMMITTED = json.loads(OUT.read_text())
NOW = [
    *((name, "lora", "shardwise") for name in ("nemotron-3-nano-30b-a3b", "kimi-linear-48b-a3b")),
    *((name, "lora", "shardwise") for name in ("lfm2-1.2b", "llama-3.1-8b", "qwen3_5_moe_text")),
    *product(["qwen3_5-0.8b"], TUNINGS, SIDES),
]


@pytest.mark.parametrize(("name", "tuning", "side"), some_now(product(MODELS, TUNINGS, SIDES), NOW))
def test_layers_launch_and_move_what_is_committed(name, tuning, side):
    rows = {kind: row[tuning][side] for kind, row in COMMITTED["layers"][name].items()}
    assert counts(name, tuning, side) == rows, "run make launches"


@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_walk_that_a_plan_takes_moves_as_much(tuning):
    with ready("qwen3_5-0.8b", tuning, "shardwise") as (cfg, hf, spec, layers):
        on_gpu = replace(cfg, training=replace(cfg.training, device="cuda"))
        for layer in layers.values():
            walk = unit_moves(on_gpu, hf, spec, layer.place + 1)
            counted = passes(layer.module, layer.leaf, layer.forward)
            for moves, launches in zip((walk.forward, walk.backward), counted, strict=True):
                assert sum(moves) == pytest.approx(sum(launches.moves), rel=0.005)
                assert len(moves) == pytest.approx(len(launches.moves), abs=5)


def test_the_page_shows_what_is_committed():
    assert table_of(COMMITTED) in PAGE.read_text(), "run python -m tools.launches --draw"


def test_linears_launch_what_peft_and_our_kernels_do():
    """A layer of llama has seven linears, four of which share two inputs, and one attention."""
    names = {}
    for side in SIDES:
        with ready("llama-3.1-8b", "lora", side) as (*_, layers):
            (layer,) = layers.values()
            names[side] = [Counter(x.name for x in each) for each in launches_of(layer)]
    attention = "scaled_dot_product_attention"
    forward, backward = names["transformers"]
    # The frozen one, A and B; back to the inputs of all three and to A and B.
    assert (forward["mm"], backward["mm"]) == (7 * 3, 7 * 5)
    assert forward[attention] == backward[f"{attention} backward"] == 1
    forward, backward = names["shardwise"]
    assert (forward["project_kernel"], forward["expand_kernel"], forward["addmm_"]) == (4, 4, 7)
    kernels = ("output_gradients_kernel", "combine_kernel", "factor_gradient_kernel")
    assert [backward[name] for name in (*kernels, "addmm_")] == [4, 4, 4, 7]
    assert backward["sum_kernel"] == 4 + 4  # of the gradients of outputs; of the A's of an input
    assert forward[attention] == backward[f"{attention} backward"] == 1
