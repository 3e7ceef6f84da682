"""A signal asks for a stop; every rank stops after the same step."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from shardwise.config import Data, Model, Parallel, RunConfig, Training
from shardwise.parallel.mesh import build_mesh
from shardwise.process.stop import StopRequest
from tests.distributed import run_ranks

CFG = RunConfig(Model("unused"), Data("unused"), Training("unused"), parallel=Parallel("ddp"))


def ask(rank: int, number: int) -> tuple[int, int]:
    """What all agree on before and after one of them got a signal."""
    mesh = build_mesh(CFG, torch.device("cpu"))
    with StopRequest() as stop:
        before = stop.agreed(mesh)
        if dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        return before, stop.agreed(mesh)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_rank_that_is_asked_stops_all(number):
    assert run_ranks(2, ask, 1, number) == [(0, number)] * 2


def test_the_first_signal_counts_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGINT
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
