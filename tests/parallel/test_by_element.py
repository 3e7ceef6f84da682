"""Optimizers that update shards as plain tensors give what torch's give on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.parallel.by_element import SGD, AdamW
from shardwise.parallel.place import full_tensor
from tests.distributed import run_ranks

CASES = [
    (torch.optim.AdamW, AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.SGD, SGD, {"lr": 1e-2}),
]


class CountOfDTensors(TorchDispatchMode):
    """Counts operations that are given a DTensor."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.number += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        return func(*args, **kwargs)


def trained(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], is_sharded: bool
) -> tuple[list[torch.Tensor], int, set[type]]:
    """Return parameters after three steps, operations on DTensors in the last, types of states."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    values = [torch.randn(6, 3), torch.randn(5)]

    def part(whole: torch.Tensor, number: int) -> torch.Tensor:
        if not is_sharded or number:
            return whole
        shard = whole.chunk(2)[mesh.get_local_rank()].clone()
        return DTensor.from_local(shard, mesh, [Shard(0)])

    parameters = [nn.Parameter(part(value, number)) for number, value in enumerate(values)]
    optimizer = make(parameters, **options)
    for _ in range(3):
        for number, parameter in enumerate(parameters):
            parameter.grad = part(torch.randn(values[number].shape), number)
        with CountOfDTensors() as counter:
            optimizer.step()
    states = {type(state) for state in optimizer.state[parameters[0]].values()}
    return [full_tensor(p.detach()) for p in parameters], counter.number, states


def compare(number: int) -> None:
    torchs, ours, options = CASES[number]
    plain, no_dtensors, _ = trained(torchs, options, is_sharded=False)
    by_torch, of_torch, of_torch_states = trained(torchs, options, is_sharded=True)
    sharded, of_ours, of_our_states = trained(ours, options, is_sharded=True)
    if ours is SGD:
        assert all(map(torch.equal, by_torch, sharded))
    else:  # the fused kernel rounds otherwise, and takes no DTensors beside tensors
        torch.testing.assert_close(sharded, by_torch)
    torch.testing.assert_close(sharded, plain)  # a kernel may round the end of a tensor otherwise
    assert (no_dtensors, of_ours) == (0, 0)
    assert of_torch > 0, "torch has learned it: by_element.py can go"
    assert of_our_states == of_torch_states


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_step_is_that_of_one_process_and_runs_no_operation_on_dtensors(number):
    run_ranks(2, compare, number)


def updated(make: Callable[..., torch.optim.Optimizer], is_view: bool) -> torch.Tensor:
    """Return a matrix of which some columns were updated, as a view into it or by themselves."""
    torch.manual_seed(0)
    whole = torch.randn(4, 8)
    part = whole[:, 2:5]
    parameter = nn.Parameter(part if is_view else part.clone())
    optimizer = make([parameter], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        parameter.grad = torch.randn(4, 3)
        optimizer.step()
    whole[:, 2:5] = parameter.detach()
    return whole


def test_a_view_along_another_dim_than_the_first_is_updated_alone():
    """As zero's shards are, where the first dim does not divide or belongs to tp."""
    assert torch.equal(updated(AdamW, is_view=True), updated(AdamW, is_view=False))


def test_torchs_fused_kernel_updates_what_follows_in_memory():
    def fused(*args: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(*args, fused=True, **options)

    assert not torch.equal(updated(fused, is_view=True), updated(fused, is_view=False)), (
        "torch has learned it: the copies in by_element.py can go"
    )
