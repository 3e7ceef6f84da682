"""Layers that move between the ranks of a running pipeline: it trains as one process does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from shardwise.assembly.build import Job, build
from shardwise.assembly.moved import MovedState
from shardwise.assembly.state import portable_tensors
from shardwise.base.interfaces import Mesh
from shardwise.config import Parallel, RunConfig
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.parallel.reduce import from_every_rank
from shardwise.training.step import forward_backward, training_step
from tests import compiling  # noqa: F401  (what forked processes then need not import)
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config

STEPS = 3
FORTH, BACK = [[1, 3], [3, 1]], [[1, 1, 1, 1], [0, 1, 2, 1], [1, 2, 1, 0]]
"""The layers of two stages, and of four, before the first steps: then they stay."""


class Case(NamedTuple):
    family: str
    mode: str
    num_ranks: int
    splits: list[list[int]]
    parallel: dict[str, Any]
    variant: str = ""

    def config(self, **parallel: Any) -> RunConfig:
        """AdamW, in which states that are lost show, with the harness's eps for it. Without a
        clipped norm, whose last digit depends on the order of ranks, nothing rounds otherwise."""
        cfg = run_config(Cell(self.family, "single", self.mode, variant=self.variant), "adamw")
        optimizer = cfg.optimizer
        if optimizer.name == "adamw":
            optimizer = replace(optimizer, lr=0.01, eps=0.01)
        return replace(cfg, optimizer=optimizer, parallel=Parallel(**parallel))


TIED = Case("qwen3_5_text", "full", 2, [*FORTH, [0, 4]], {}, "tied")
SHARDED = Case("llama", "lora", 4, FORTH, {"data": "fsdp2"})
REST = {
    "lora": Case("llama", "lora", 2, FORTH, {}),
    "four ranks": Case("llama", "lora", 4, BACK, {"pp": 4}),
    "interleaved": Case("qwen3_5_text", "lora", 2, BACK, {"schedule": "interleaved-1f1b"}),
    "v-shaped, tied": Case("qwen3_5_text", "full", 2, BACK, {"schedule": "zbv"}, "tied"),
    "sharded hybrid": Case("qwen3_next", "lora", 4, FORTH, {"data": "fsdp2"}),
    "replicas": Case("llama", "full", 4, FORTH, {"data": "ddp"}),
    "sharded": Case("qwen3_moe", "full", 4, FORTH, {"data": "fsdp2"}),
    "tensor": Case("qwen3_next", "full", 4, FORTH, {"tp": 2}),
    "adapters of sharded experts": Case("qwen3_moe", "lora", 4, FORTH, {"tp": 2}, "experts"),
    "context": Case("qwen3_next", "full", 4, FORTH, {"cp": 2}),
    "offloaded": Case("llama", "full", 2, FORTH, {"offload": "optimizer"}),
    "router biases": Case("glm4_moe", "full", 2, FORTH, {}, "balanced"),
    "recomputed": Case("llama", "full", 2, FORTH, {}, "checkpointing"),
    "nf4": Case("qwen3_5_text", "lora", 2, FORTH, {}, "nf4"),
    "dropout": Case("llama", "lora", 2, FORTH, {}, "dropout"),
}


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]
    """Weights, buffers and optimizer states of the whole model, and its gradients in one more
    step."""


def moved(job: Job, cfg: RunConfig, mesh: Mesh, step: int, layers: Sequence[int]) -> Job:
    """Return the job with these numbers of layers in its stages."""
    edges = [0, *(1 + sum(layers[:chunk]) for chunk in range(1, len(layers))), sum(layers) + 2]
    state = MovedState(job, cfg, step)
    state.move(job, mesh, edges)
    cfg = replace(cfg, parallel=replace(cfg.parallel, split=list(layers)))
    return replace(job.rebuild(cfg, state), routing=job.routing)


def trained(
    cfg: RunConfig, splits: Sequence[Sequence[int]] = (), plant: Callable[[], None] | None = None
) -> Trained:
    """Train some steps, each under the next of `splits`; the last one holds to the end."""
    if plant:
        plant()
    mesh = build_mesh(cfg, torch.device("cpu"))
    if splits:
        cfg = replace(cfg, parallel=replace(cfg.parallel, split=list(splits[0])))
    job = build(cfg, mesh, DrawnStart(), STEPS)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        result = training_step(job, microbatches(cfg, mesh, step), mesh, None)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step < len(splits):
            old = [weakref.ref(parameter) for _, parameter in job.pm.named_parameters()]
            job = moved(job, cfg, mesh, step, splits[step])
            gc.collect()
            assert not any(ref() is not None for ref in old), "the old stages take memory still"
    pairs = portable_tensors(job.pm, job.optimizer, trained_only=False)
    mine = {key: full_tensor(tensor).clone() for key, tensor in pairs}
    forward_backward(job.pm, microbatches(cfg, mesh, STEPS + 1), mesh)
    for group in job.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            mine[f"gradient/{name}"] = full_tensor(job.pm.to_portable(name, parameter.grad)).clone()
    return Trained(losses, norms, {k: t for held in from_every_rank(mine) for k, t in held.items()})


@cache
def single(family: str, mode: str, variant: str) -> Trained:
    (on_one,) = run_ranks(1, trained, Case(family, mode, 1, [], {}, variant).config())
    return on_one


def check(case: Case, plant: Callable[[], None] | None = None) -> None:
    """Compare a pipeline whose layers move with one process: bit for bit, where neither another
    axis nor a tied weight adds numbers up in another order."""
    expected = single(case.family, case.mode, case.variant)
    parallel = {"pp": 2, **case.parallel}
    is_exact = parallel.keys() <= {"pp", "schedule", "offload"} and case.variant != "tied"
    for rank in run_ranks(case.num_ranks, trained, case.config(**parallel), case.splits, plant):
        assert rank.losses == pytest.approx(expected.losses, rel=0 if is_exact else 5e-7)
        assert rank.norms == pytest.approx(expected.norms, rel=1e-6)
        assert rank.tensors.keys() == expected.tensors.keys()
        for key, values in expected.tensors.items():
            atol = 0.0 if is_exact else 1e-5 * float(values.abs().max())
            torch.testing.assert_close(rank.tensors[key], values, rtol=0, atol=atol, msg=key)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(TIED, id="tied"),
        pytest.param(SHARDED, marks=pytest.mark.slow, id="sharded adapters"),
    ],
)
def test_layers_move_with_their_states_and_nothing_else_changes(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_layers_move_under_every_layout(name):
    check(REST[name])


def states_stay_behind() -> None:
    move = MovedState.move

    def forgetful(state: MovedState, job: Job, mesh: Mesh, boundaries: Sequence[int]) -> None:
        before = {*state._tensors}
        move(state, job, mesh, boundaries)
        for key in state._tensors.keys() - before:
            if key.startswith("optimizer/"):
                del state._tensors[key]
        state._keys = frozenset(state._tensors)

    MovedState.move = forgetful


def adapters_come_twice() -> None:
    read = MovedState.read

    def adding(state: MovedState, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        target = read(state, key, portable)
        return target.mul_(2) if key.startswith("weights/") and "lora_B" in key else target

    MovedState.read = adding


@pytest.mark.parametrize(
    "plant", [states_stay_behind, pytest.param(adapters_come_twice, marks=pytest.mark.slow)]
)
def test_a_planted_bug_shows(plant):
    with pytest.raises(AssertionError):
        check(REST["lora"], plant)
