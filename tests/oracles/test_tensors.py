"""Which tensors of a simulation have values, and what the host reads of the others."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.config import UserError
from tests.oracles.allocations import StorageRecorder
from tests.oracles.tensors import MOST_VALUES, SimulatedTensors


@pytest.fixture
def recorder():
    recorder = StorageRecorder()
    with SimulatedTensors(recorder, copies_whole=False):
        yield recorder


def fake(*shape: int) -> torch.Tensor:
    """A weight: made on meta, and then given memory."""
    return torch.empty_like(torch.empty(shape, device="meta"), device="cpu")


def test_whole_numbers_have_values_and_what_comes_of_weights_has_none(recorder):
    ids = torch.arange(6).view(2, 3)
    assert ids.sum().item() == 15
    assert (ids > 3).nonzero().tolist() == [[1, 1], [1, 2]]
    hidden = fake(8, 4)[ids]
    assert isinstance(hidden, FakeTensor)
    assert hidden.device.type == "cpu"
    assert hidden.shape == (2, 3, 4)


def test_large_tensors_have_no_memory(recorder):
    before = recorder.stop().exit_bytes
    large = torch.zeros(MOST_VALUES + 1, dtype=torch.int64)
    assert isinstance(large, FakeTensor)
    assert isinstance(torch.zeros(10**12), FakeTensor)
    assert recorder.stop().exit_bytes - before == 8 * (MOST_VALUES + 1)


def test_the_host_reads_one_for_a_loss_and_nothing_for_a_choice(recorder):
    weight = fake(4)
    assert torch.stack([weight.sum(), weight.norm()]).tolist() == [1.0, 1.0]
    for read in (lambda: weight.argmax().item(), lambda: bool((weight > 0).all())):
        with pytest.raises(UserError, match="cannot be simulated"):
            read()


def test_routers_choose_evenly(recorder):
    _, chosen = fake(6, 4).topk(2, dim=-1)
    assert chosen.flatten().bincount().tolist() == [3, 3, 3, 3]
    assert all(len({*row}) == 2 for row in chosen.tolist())


def test_a_number_keeps_its_value_where_one_without_is_added(recorder):
    total = torch.zeros(())
    total += fake(3).sum()
    assert total.item() == 0.0


def test_gradients_flow(recorder):
    weight = torch.nn.Parameter(fake(3, 4))
    (fake(2, 4) @ weight.mT).sum().backward()
    assert isinstance(weight.grad, FakeTensor)
    assert weight.grad.shape == (3, 4)
