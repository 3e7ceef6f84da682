"""The ranks of an elastic run on the nodes that are left, and the wait of spare ones."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.process.ending import RunError
from shardwise.base.process.world import World, find_world
from shardwise.base.records.record import RunRecord
from shardwise.commands.library import LOOP
from shardwise.config import Data, Launch, Model, Parallel, RunConfig, Training, UserError
from shardwise.launch import elastic, local


@pytest.fixture(autouse=True)
def a_quick_look(monkeypatch):
    monkeypatch.setattr(elastic, "LOOK_SECONDS", 0.1)


def config(folder: object = "out", rows: int = 8, processes: int = 1, **parallel: int) -> RunConfig:
    return RunConfig(
        Model("m"),
        Data("d"),
        Training(str(folder), global_batch_size=rows),
        parallel=Parallel("ddp", **parallel),
        launch=Launch(nodes=4, processes=processes, min_nodes=1, timeout_seconds=1.5),
    )


@given(
    rows=st.integers(1, 48),
    processes=st.integers(1, 4),
    axes=st.fixed_dictionaries(dict.fromkeys(("pp", "tp"), st.integers(1, 3))),
    nodes=st.integers(1, 4),
)
def test_a_run_goes_on_with_the_most_whole_nodes_that_fit(rows, processes, axes, nodes):
    cfg = config(rows=rows, processes=processes, **axes)
    most = elastic.most_ranks(cfg, nodes * processes)
    assert most % processes == 0
    fit = [n for n in range(1, nodes + 1) if not elastic.problems(cfg, n * processes)]
    assert most == max(fit, default=0) * processes


@pytest.mark.parametrize(("left", "size", "note"), [(3, 2, ", and 1 wait: ddp"), (2, 2, ": ddp")])
def test_what_is_left_is_said(left, size, note, capsys):
    worlds = [World(rank, left, 0, "env://") for rank in range(left)]
    fitted = [elastic.fit(config(), world) for world in worlds]
    assert {world.size for _, world in fitted} == {size}
    assert [world.is_spare for _, world in fitted] == [rank >= size for rank in range(left)]
    said = capsys.readouterr().err
    assert said == f"note: {left} of 4 processes{note}, 4 micro-batches a step\n"


def test_the_only_task_that_is_left_under_slurm_is_fitted(tmp_path, monkeypatch, capsys):
    """srun gives a single task no place among others: it is a process of its own."""
    cfg = config(tmp_path, dp_replicate=2)
    cfg = replace(cfg, parallel=replace(cfg.parallel, data="fsdp2"))
    for name in ("SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")
    seen: list[tuple[RunConfig, World]] = []
    monkeypatch.setattr(local, "run_rank", lambda cfg, world, *_: seen.append((cfg, world)))
    assert local.launch(cfg, None, LOOP) == 0
    ((fitted, world),) = seen
    assert (fitted.parallel.dp_replicate, world.size) == (1, 1)
    assert "note: 1 of 4 processes: " in capsys.readouterr().err


def test_without_a_loss_nothing_is_said(capsys):
    cfg, world = config(), World(3, 4, 0, "env://")
    assert elastic.fit(cfg, world) == (cfg, world)
    assert not capsys.readouterr().err


def test_where_no_number_of_nodes_is_enough_the_run_ends():
    with pytest.raises(UserError, match=r"3 of 4 processes are left.*parallel.tp is 4.*start all"):
        elastic.fit(config(tp=4), World(0, 3, 0, "env://"))


@pytest.fixture(params=["env://", "tcp://127.0.0.1:{port}"])
def first_rank(request, monkeypatch):
    """Where the ranks meet, and the socket of the first of them, which does not listen yet."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield server, World(2, 2, 0, request.param.format(port=port))


def after(seconds: float, what) -> threading.Timer:
    timer = threading.Timer(seconds, what)
    timer.start()
    return timer


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1), (None, 1)])
def test_a_spare_rank_ends_as_the_others_do(first_rank, tmp_path, status, code):
    server, world = first_rank

    def run() -> None:
        server.listen()
        connection, _ = server.accept()
        time.sleep(2 * elastic.LOOK_SECONDS)
        if status is not None:
            RunRecord(status, {}).write(tmp_path / "record.json")
        connection.close()

    first = after(0.3, run)
    assert elastic.wait(patient(config(tmp_path)), world) == code
    first.join()


def test_a_spare_rank_does_not_wait_for_ever(first_rank, tmp_path):
    with pytest.raises(RunError, match=r"the first rank does not come to 127\.0\.0\.1:\d+"):
        elastic.wait(config(tmp_path), first_rank[1])


@pytest.mark.parametrize("has_agent", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_signal_ends_the_wait_under_an_agent_and_under_slurm_with_the_others(
    first_rank, tmp_path, is_there, has_agent, monkeypatch
):
    server, world = first_rank
    if is_there:
        server.listen()
    if has_agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    waits = is_there and not has_agent
    before = signal.getsignal(signal.SIGUSR1)  # it would end this process

    def send() -> None:
        while signal.getsignal(signal.SIGUSR1) is before:
            time.sleep(0.01)
        time.sleep(3 * elastic.LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGUSR1)

    sent = after(0.0, send)
    ended = threading.Event()

    def end() -> None:
        sent.join()
        time.sleep(5 * elastic.LOOK_SECONDS)
        ended.set()
        server.accept()[0].close()

    others = after(0.0 if waits else 600.0, end)
    code = elastic.wait(patient(config(tmp_path)), world)
    assert code == 128 + signal.SIGUSR1
    assert ended.is_set() == waits
    others.cancel()


def patient(cfg: RunConfig) -> RunConfig:
    return replace(cfg, launch=replace(cfg.launch, timeout_seconds=60))


def test_a_rank_beyond_the_others_is_a_mistake():
    env = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(UserError, match="RANK is 2 of WORLD_SIZE 2"):
        find_world({**env, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
