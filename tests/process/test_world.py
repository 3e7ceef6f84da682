"""Where a process stands: among those that a launcher started, and on which device."""

from __future__ import annotations

import socket

import pytest
import torch

from shardwise.base.process.world import ALONE, World, find_world, first_host, listener, pick_device
from shardwise.config import Data, Model, RunConfig, Training, UserError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "2000",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "gpu[07,09]",
}
SRUN = {**BATCH_SCRIPT, "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def on(device: str) -> RunConfig:
    training = Training("unused", device=device)  # ty: ignore[invalid-argument-type]
    return RunConfig(Model("unused"), Data("unused"), training)


def test_a_torchrun_environment_is_joined():
    assert find_world(TORCHRUN) == World(rank=3, size=4, local_rank=1, init_method="env://")


def test_half_a_torchrun_environment_is_the_users_mistake():
    with pytest.raises(UserError, match=r"RANK is set but not LOCAL_RANK nor MASTER_PORT"):
        find_world({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"})


def test_an_srun_environment_is_joined():
    # Port: 15000 + (16 * 2000 + 1) mod 15000 = 15000 + 2001.
    assert find_world(SRUN) == World(rank=3, size=4, local_rank=1, init_method="tcp://gpu07:17001")
    assert find_world({**SRUN, "SLURM_STEP_NODELIST": "gpu09"}).init_method == "tcp://gpu09:17001"
    assert (
        find_world({**SRUN, "MASTER_ADDR": "h", "MASTER_PORT": "1234"}).init_method
        == "tcp://h:1234"
    )
    on_one_node = find_world({**SRUN, "SLURM_STEP_NUM_NODES": "1"})
    assert on_one_node.init_method == "tcp://127.0.0.1:17001"
    assert on_one_node.meets_at == ("127.0.0.1", 17001)
    assert find_world({**SRUN, "SLURM_STEP_NUM_NODES": "2"}).meets_at == ("gpu07", 17001)


@pytest.mark.parametrize(
    ("host", "address", "listens_on"),
    [
        ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("node1", "127.0.1.1", None),  # Debian's own name
        ("node1", "203.0.113.9", OSError),  # none of this machine
        ("no such name.invalid", None, None),
        ("::1", "::1", "::1"),
    ],
)
def test_a_store_listens_where_its_name_says(monkeypatch, host, address, listens_on):
    def look_up(*_: object) -> list[object]:
        if address is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    if listens_on is OSError:
        with pytest.raises(OSError, match="Cannot assign"):
            listener(host, 0)
        return
    server = listener(host, 0)
    assert (server and server.getsockname()[0]) == listens_on
    if server is not None:
        server.close()


@pytest.mark.parametrize(
    ("visible", "index"), [("0,1", 1), ("1", 0)], ids=["all GPUs of the node", "its own GPU"]
)
def test_a_slurm_task_takes_the_gpu_that_it_sees(visible, index):
    assert find_world({**SRUN, "CUDA_VISIBLE_DEVICES": visible}).local_rank == index


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH_SCRIPT,
        {**BATCH_SCRIPT, "SLURM_STEP_ID": str(2**32 - 6), "SLURM_STEP_NUM_TASKS": "1"},
        {**BATCH_SCRIPT, "SLURM_STEP_ID": str(2**32 - 5)},
        {name: value for name, value in SRUN.items() if name != "SLURM_NTASKS"},
        {**SRUN, "SLURM_NTASKS": "1"},
    ],
    ids=[
        "none",
        "batch script",
        "interactive shell",
        "batch step",
        "no number of tasks",
        "one task",
    ],
)
def test_without_other_tasks_there_is_nobody_to_wait_for(env):
    assert find_world(env) is None


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node01", "node01"),
        ("node[01-03,07]", "node01"),
        ("node[7,9-11],gpu5", "node7"),
        ("login,node[1-2]", "login"),
        ("rack[2-3]n[04,06]", "rack2n04"),
        ("n[1-2]-ib.cluster", "n1-ib.cluster"),
    ],
)
def test_first_host_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"rank 3 would take GPU 1 of 1; start fewer processes"):
        pick_device(on("cuda"), find_world(TORCHRUN))
    assert pick_device(on("auto"), ALONE) == torch.device("cuda", 0)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"training\.device is cuda but torch finds no GPU"):
        pick_device(on("cuda"), ALONE)
    assert pick_device(on("auto"), ALONE) == torch.device("cpu")
