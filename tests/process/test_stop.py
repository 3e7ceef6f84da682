"""A signal asks for a stop, and every rank stops after the same step."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from shardwise.base.process.stop import agreed_signal, on_signals
from shardwise.config import Data, Model, Parallel, RunConfig, Training
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks

CFG = RunConfig(Model("unused"), Data("unused"), Training("unused"), parallel=Parallel("ddp"))


def ask(rank: int, number: int) -> tuple[int, int]:
    """Return what all agree on before and after one of them has received a signal."""
    mesh = build_mesh(CFG, torch.device("cpu"))
    signals: list[int] = []
    with on_signals(signals.append):
        before = agreed_signal(signals, mesh)
        if dist.get_rank() == rank:
            os.kill(os.getpid(), number)
        return before, agreed_signal(signals, mesh)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_rank_that_is_asked_stops_all(number):
    assert run_ranks(2, ask, 1, number) == [(0, number)] * 2


def test_signals_are_noted_in_order_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    signals: list[int] = []
    with on_signals(signals.append):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGINT, signal.SIGTERM]
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
