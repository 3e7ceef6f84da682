"""A run under torchrun's agents loses a node, goes on, and takes it back, with an undisturbed run's
losses.

The nodes are two loopback addresses of this machine.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.clusters.agents import RUN, STEPS, Node, is_open, start
from tests.clusters.runs import losses, prepare, wait_for, wait_for_step
from tests.clusters.slurm import free_ports

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run file and the outcome of its undisturbed run on two processes of this machine."""
    return prepare(tmp_path_factory.mktemp("run"), *RUN, "--parallel.data=ddp")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def check_losses(folder: Path, name: str) -> None:
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [row["step"] for row in map(json.loads, rows) if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert losses(folder, name) == pytest.approx(losses(folder, "local"), rel=1e-6)


@pytest.mark.parametrize(
    ("data", "saves"), [("ddp", "disk"), ("fsdp2", "disk"), ("zero1", "memory")]
)
def test_a_run_goes_on_with_one_node_of_two_and_takes_the_other_back(folder, stack, data, saves):
    name, (port,) = f"elastic-{data}", free_ports(1)
    elastic = ["--launch.min_nodes=1", f"--parallel.data={data}"]
    if saves == "memory":  # nothing is on the disk when a node is lost
        elastic += ["--training.memory_checkpoint_every=1", "--training.save_every=0"]
    first = start(stack, folder, name, "127.0.0.1", port, *elastic)
    # The first one there is the meeting place.
    wait_for(lambda: is_open(port), "the meeting place")
    second = start(stack, folder, name, "127.0.0.2", port, *elastic)
    wait_for_step(folder, name, 15)
    alone, again = "note: 1 of 2 processes", "note: starting again"
    num_alone = first.log.read_text().count(alone)  # it may have begun alone
    second.kill()
    num_done = len(losses(folder, name))
    wait_for(lambda: first.says(alone, num_alone), "one node")
    wait_for_step(folder, name, 25)
    # The other node comes back; meanwhile this one's rank waits, however fast its steps are.
    (rank,) = first.ranks()
    rank.suspend()
    num_again = first.log.read_text().count(again)
    second = start(stack, folder, name, "127.0.0.2", port, *elastic)
    wait_for(lambda: first.says(again, num_again), "the node")
    rank.resume()
    assert first.agent.wait(300) == 0, first.log.read_text()
    assert second.agent.wait(60) == 0, second.log.read_text()
    both = first.log.read_text() + second.log.read_text()
    (stopped,) = set(re.findall(r"stopped by SIGTERM after step (\d+), saved", both))
    resumed = {int(step) for step in re.findall(r"resuming after step (\d+)", both)}
    assert len(resumed) == 2
    assert resumed >= {int(stopped)}
    # A step whose line is there may not be in memory yet.
    assert min(resumed) >= (10 if saves == "disk" else num_done - 1)
    assert not list(folder.glob("memory-*/shardwise-*"))
    check_losses(folder, name)
    record = json.loads((folder / "runs" / name / "record.json").read_text())
    assert record["status"] == "ok"


def test_a_node_that_the_rows_do_not_fit_waits_until_another_is_lost(folder, stack):
    """Of 4 nodes one is lost: 8 rows go on with 2 of 3. Then one of the 2, and the third helps."""
    name, (port,) = "spare", free_ports(1)
    elastic = ["--launch.min_nodes=1", "--launch.nodes=4", "--parallel.data=ddp"]
    elastic += ["--training.micro_batch_size=2"]
    first = start(stack, folder, name, "127.0.0.1", port, *elastic)
    wait_for(lambda: is_open(port), "the meeting place")
    others = [start(stack, folder, name, f"127.0.0.{i}", port, *elastic) for i in (2, 3, 4)]
    nodes = [first, *others]
    wait_for_step(folder, name, 15)
    others.pop().kill()
    wait_for(lambda: any(node.says("3 of 4 processes, and 1 wait: ddp") for node in nodes), "3")
    wait_for_step(folder, name, 25)
    (waits,) = filter(is_idle, others)
    next(node for node in others if node is not waits).kill()
    wait_for(lambda: any(node.says("2 of 4 processes: ddp") for node in nodes), "2")
    assert first.agent.wait(300) == 0, first.log.read_text()
    assert waits.agent.wait(60) == 0, waits.log.read_text()
    check_losses(folder, name)


def test_a_spare_node_ends_with_the_run(folder, stack):
    name, (port,) = "spared", free_ports(1)
    elastic = ["--launch.min_nodes=1", "--launch.nodes=4", "--parallel.data=ddp"]
    conf = json.dumps({"rdzv-endpoint": f"127.0.0.1:{port}", "rdzv-conf": "last_call_timeout=8"})
    elastic += ["--training.micro_batch_size=2", f"--launch.torchrun={conf}"]
    nodes = [start(stack, folder, name, "127.0.0.1", port, *elastic)]
    wait_for(lambda: is_open(port), "the meeting place")
    nodes += [start(stack, folder, name, f"127.0.0.{i}", port, *elastic) for i in (2, 3)]
    assert [node.agent.wait(300) for node in nodes] == [0, 0, 0]
    assert any(node.says("3 of 4 processes, and 1 wait: ddp") for node in nodes)
    check_losses(folder, name)


def is_idle(node: Node) -> bool:
    """Whether no rank of a node has imported torch."""
    files = [file.path for rank in node.ranks() for file in rank.memory_maps()]
    return bool(files) and not any("libtorch" in file for file in files)


def test_without_the_meeting_place_a_run_stops_and_resumes(folder, stack):
    name, (port,) = "meeting", free_ports(1)
    layout = ("--parallel.data=ddp", "--launch.min_nodes=1")
    first = start(stack, folder, name, "127.0.0.1", port, *layout)
    wait_for(lambda: is_open(port), "the meeting place")
    second = start(stack, folder, name, "127.0.0.2", port, *layout)
    wait_for_step(folder, name, 15)
    first.kill()
    assert second.agent.wait(120) == 1
    assert second.says("error: the nodes cannot meet at 127.0.0.1")
    alone = start(stack, folder, name, "127.0.0.2", port, *layout)
    assert alone.agent.wait(300) == 0
    check_losses(folder, name)


def test_one_node_listens_on_loopback_alone(folder, stack):
    layout = ("--parallel.data=ddp", "--launch.nodes=1", "--launch.processes=2")
    node = start(stack, folder, "one", "127.0.0.1", 1, *layout, "--launch.torchrun={}")
    wait_for_step(folder, "one", 5)
    listening = [
        connection.laddr.ip
        for process in (psutil.Process(node.agent.pid), *node.ranks())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    node.ranks()[1].kill()
    assert node.agent.wait(300) == 0
    check_losses(folder, "one")


def test_nodes_listen_where_they_were_told_to(folder, stack):
    (port,) = free_ports(1)
    nodes = [
        start(stack, folder, "where", f"127.0.0.{i}", port, "--parallel.data=ddp") for i in (1, 2)
    ]
    wait_for_step(folder, "where", 5)
    agents = [psutil.Process(node.agent.pid) for node in nodes]
    listening = {
        connection.laddr.ip
        for process in (*agents, *(rank for node in nodes for rank in node.ranks()))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "127.0.0.2"}, listening
    assert [node.agent.wait(300) for node in nodes] == [0, 0]
    check_losses(folder, "where")


def test_a_node_that_is_broken_leaves_the_others_alone(folder, stack):
    """It cannot train, such as without its GPU, and the run goes on without it."""
    name, (port,) = "broken", free_ports(1)
    elastic = ("--parallel.data=ddp", "--launch.min_nodes=1", "--launch.timeout_seconds=30")
    first = start(stack, folder, name, "127.0.0.1", port, *elastic)
    wait_for(lambda: is_open(port), "the meeting place")
    broken = start(stack, folder, name, "127.0.0.2", port, *elastic, "--training.device=cuda")
    assert broken.agent.wait(300) == 2
    assert broken.says("training.device is cuda but torch finds no GPU")
    assert first.agent.wait(300) == 0, first.log.read_text()
    check_losses(folder, name)


def test_a_signal_to_one_node_stops_a_run_that_needs_all(folder, stack):
    name, (port,) = "stopped", free_ports(1)
    nodes = [
        start(stack, folder, name, f"127.0.0.{i}", port, "--parallel.data=ddp") for i in (1, 2)
    ]
    wait_for_step(folder, name, 5)
    nodes[1].agent.send_signal(signal.SIGTERM)
    assert [node.agent.wait(120) for node in nodes] == [143, 143]
    nodes = [
        start(stack, folder, name, f"127.0.0.{i}", port, "--parallel.data=ddp") for i in (1, 2)
    ]
    assert [node.agent.wait(300) for node in nodes] == [0, 0]
    check_losses(folder, name)
