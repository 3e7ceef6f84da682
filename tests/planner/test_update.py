"""What an optimizer needs while it updates, beside what its update really takes."""

from __future__ import annotations

import gc
from dataclasses import replace
from math import prod

import pytest
import torch

from shardwise.assembly.optimizer import make_optimizer
from shardwise.config import Data, Model, Optimizer, RunConfig, Training
from shardwise.lab.planner.update import summed_bytes
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.optimizers import OPTIMIZERS
from shardwise.parallel.reduce import BUCKET_ELEMENTS
from shardwise.parallel.weights import Weight

# Of torch's own context that turns oneDNN off.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
SMALL = 2**18
"""Bytes that no formula counts: of vectors, tables of codes, and a norm's partial sums."""


def _run(name: str, precision: str = "float32", accumulation: str = "model") -> RunConfig:
    training = Training(
        output_dir="unused",
        steps=1,
        global_batch_size=1,
        precision=precision,  # ty: ignore[invalid-argument-type]
        accumulation=accumulation,  # ty: ignore[invalid-argument-type]
    )
    model, data = Model("unused"), Data(train="unused", sequence_length=8)
    optimizer = Optimizer(name=name, weight_decay=0.1)
    return RunConfig(model=model, data=data, optimizer=optimizer, training=training)


def _taken(cfg: RunConfig, weights: list[Weight], dtype: torch.dtype) -> int:
    """Return the most bytes that the second step of an optimizer allocates at once."""
    named = [(w.name, torch.nn.Parameter(torch.randn(w.shape).to(dtype))) for w in weights]
    selected = {weight.name for weight in weights if weight.is_selected}
    names, precision = {name for name, _ in named}, cfg.training.precision
    optimizer = make_optimizer(cfg.optimizer, named, names, selected, precision)
    for _ in range(2):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape).to(dtype)
        gc.collect()
        # On some CPUs oneDNN copies an operand of a product in bfloat16, which a GPU does not.
        is_plain = torch.backends.mkldnn.flags(enabled=False)
        with is_plain, PeakMemory(torch.device("cpu")) as memory:
            optimizer.step()
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    return memory.peak_bytes - memory.entry_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "precision", "shape"),
    [
        ("sgd", "float32", (1024, 512)),
        ("adamw", "float32", (1024, 512)),
        ("adamw8bit", "float32", (1024, 512)),
        ("adamw8bit", "float32", (8192, 1024)),  # more than one chunk of rows
        ("muon", "float32", (1024, 512)),
        ("muon", "bfloat16", (1024, 512)),
        ("muon", "bfloat16", (512, 512)),
        ("muon", "bfloat16", (8, 128, 512)),
    ],
)
def test_an_update_takes_what_is_planned(name, precision, shape, dtype):
    cfg, is_selected = _run(name, precision), OPTIMIZERS[name].selects
    weights = [
        Weight("matrix", shape, dtype.itemsize, True, 1, is_selected=is_selected),
        Weight("vector", (64,), dtype.itemsize, True, 1),
    ]
    numels = {weight: prod(weight.shape) for weight in weights}
    for decay in (cfg.optimizer.weight_decay, 0.0):
        cfg = replace(cfg, optimizer=replace(cfg.optimizer, weight_decay=decay))
        planned = OPTIMIZERS[name].update_bytes(cfg, numels, is_gloo=True)
        assert planned == pytest.approx(_taken(cfg, weights, dtype), abs=SMALL)


def test_gradients_in_16_bits_are_copied_before_they_are_summed():
    weight = Weight("matrix", (BUCKET_ELEMENTS,), 2, True, 1)
    assert summed_bytes(_run("sgd"), [weight]) == 8 * BUCKET_ELEMENTS
    assert summed_bytes(_run("sgd", accumulation="float32"), [weight]) == 4 * BUCKET_ELEMENTS
    wide = replace(weight, itemsize=4)
    assert summed_bytes(_run("sgd"), [wide, wide]) == 4 * BUCKET_ELEMENTS
