"""What is computed of the first of like layers is what each of them gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, Parallel, Recomputation, RunConfig, Training
from shardwise.lab.planner.axes.cp import mixers_of
from shardwise.lab.planner.axes.tp import blocks_of
from shardwise.lab.planner.share import share_of
from shardwise.lab.planner.weights import shapes_of
from shardwise.models.alike import counts_of, first_alike, same_structure

MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "jamba", "kimi_linear", "gpt2"])
def test_blocks_and_mixers_of_like_layers(family):
    parallel = Parallel(tp=2, cp=2) if family != "kimi_linear" else Parallel(tp=2)
    cfg = run_file(family, parallel)
    run = describe(cfg, parallel.ranks_of_a_model)
    counts = counts_of(run.hf, run.spec)
    parts: dict[object, Any] = {}
    first = dict.fromkeys(run.sizes, 0)
    for _ in range(2):  # without and with what was computed before
        (chunk,) = share_of(cfg, run, first, None, parts).chunks
        blocks, mixers = [], []
        for layer, unit in zip(run.spec.layers, counts.units[1:-1], strict=True):
            weights = chunk.by_layer[layer.name]
            blocks += blocks_of(cfg, run, layer, unit, weights)
            if cfg.parallel.cp > 1:
                mixers += mixers_of(cfg, run, layer, unit, weights)
        assert [*chunk.sending["tp"]] == blocks
        assert [*chunk.sending["cp"]] == mixers
        assert {w.name: w.shape for w in chunk.weights} == shapes_of(cfg, run)
        assert [w.name for w in chunk.weights] == [n for n, _ in run.hf.named_parameters()]
        assert len(chunk.weights) == len(set(chunk.weights))


def test_layers_that_differ_are_not_alike():
    run = describe(run_file("qwen3_5", Parallel()), 1)
    alike = first_alike(run.hf, run.spec, "none")
    kinds = [layer.kind for layer in run.spec.layers]
    assert [kinds[place] for place in alike.values()] == kinds
    # Nothing below the adapters of the first layer has a gradient.
    assert list(alike.values()) == [0, 1, 1, 3]
    assert [*first_alike(run.hf, run.spec, Recomputation(full=(2, 3))).values()] == [0, 1, 2, 3]
    assert [*first_alike(run.hf, run.spec, Recomputation(full=(1, 2))).values()] == [0, 1, 1, 3]
    # Of two layers that were alike, one is frozen.
    for parameter in run.hf.get_submodule(run.spec.layers[2].name).parameters():
        parameter.requires_grad_(False)
    counts_of.cache_clear()
    counts = counts_of(run.hf, run.spec)
    assert list(same_structure(run.hf, run.spec, counts).values()) == [0, 1, 2, 3]


def run_file(family: str, parallel: Parallel) -> RunConfig:
    return RunConfig(
        model=Model(str(MODELS / f"tiny-{family}"), init="random"),
        lora=Lora(r=8),
        data=Data(train="unused", sequence_length=256),
        parallel=parallel,
        training=Training("unused", global_batch_size=16, micro_batch_size=2, device="cpu"),
    )
