"""A stage tells its LoRA linears which half of a backward runs, so that no half does the other's
work."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.lora_linear import torch_backend
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config

PRODUCTS = ("products", "output_gradients", "input_gradient", "factor_gradient")


@contextmanager
def forget_the_half(self: BackwardHalf, half: str) -> Any:
    yield


def products(schedule: str, forgetful: bool) -> Counter[str]:
    """How often this rank computes each product of its LoRA linears in a step."""
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        function = getattr(torch_backend, name)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        setattr(torch_backend, name, counted)

    for name in PRODUCTS:
        count(name)
    if forgetful:
        BackwardHalf.running = forget_the_half
    cfg = run_config(Cell("llama", "pp", "lora", 2, schedule=schedule))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    return calls


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_no_product_is_computed_in_both_halves(schedule):
    for calls in run_ranks(2, products, schedule, False):
        assert calls["output_gradients"] == calls["products"] > 0  # once per node and micro-batch
        # Once per node; the first layer's input needs no gradient, except where backwards run in
        # halves.
        assert 0 < calls["input_gradient"] <= calls["factor_gradient"]


def test_a_stage_that_tells_nothing_computes_gradients_twice():
    for calls in run_ranks(2, products, "zbv", True):
        assert calls["output_gradients"] > calls["products"]
