"""Processes that are started or joined, and their one ending, whatever goes wrong in which."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shardwise.base.interfaces import Mesh
from shardwise.base.process.ending import Ending, Stopped
from shardwise.base.process.stop import agreed_signal, on_signals
from shardwise.base.process.world import ALONE, SOCKET_INTERFACES, World, loopback, on_loopback
from shardwise.base.records.record import RunRecord
from shardwise.commands.library import LOOP
from shardwise.config import Data, Launch, Measure, Model, Parallel, RunConfig, Training, UserError
from shardwise.launch import group
from shardwise.launch.group import Group, can_fork
from shardwise.launch.local import launch
from tests.command import Forked
from tests.distributed import PATIENCE
from tests.process.test_world import SRUN, TORCHRUN

TINY_LLAMA = Path(__file__).parents[2] / "configs" / "models" / "tiny-llama"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in [*TORCHRUN, *SRUN, "SLURM_STEP_NUM_TASKS"]:
        monkeypatch.delenv(name, raising=False)


def config(folder: Path, data: str = "ddp", **training: Any) -> RunConfig:
    return RunConfig(
        model=Model("unused"),
        data=Data("unused"),
        parallel=Parallel(data),
        training=Training(str(folder), **{"global_batch_size": 2, "device": "cpu", **training}),
    )


# What the fake runs do on a rank.


def report_place(cfg: RunConfig, mesh: Mesh) -> None:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    place = {
        "sum": total.item(),
        "data_size": mesh.data_size,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    Path(cfg.training.output_dir, f"place-{dist.get_rank()}.json").write_text(json.dumps(place))


def report_sockets(cfg: RunConfig, mesh: Mesh) -> None:
    """Report the addresses that this rank and, on rank 0, the launcher listen on.

    Every kind of group that a run makes is up meanwhile.
    """
    dist.new_group(backend="gloo")
    mesh.dense["dp_replicate"].get_group()
    dist.barrier()
    processes = {"rank": psutil.Process()}
    if dist.get_rank() == 0:
        processes["launcher"] = psutil.Process(os.getppid())
    listening = {
        name: [
            s.laddr.ip for s in process.net_connections("inet") if s.status == psutil.CONN_LISTEN
        ]
        for name, process in processes.items()
    }
    Path(cfg.training.output_dir, f"sockets-{dist.get_rank()}.json").write_text(
        json.dumps(listening)
    )
    dist.barrier()


def user_error_on_all(cfg: RunConfig, mesh: Mesh) -> None:
    raise UserError("the file is\nempty; fill it")


def out_of_memory_on_last(cfg: RunConfig, mesh: Mesh) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.empty(2**50, dtype=torch.uint8)
    dist.barrier()


def bug_on_last(cfg: RunConfig, mesh: Mesh) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise KeyError("a bug of ours")
    dist.barrier()


def killed_on_last(cfg: RunConfig, mesh: Mesh) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def left_on_last(cfg: RunConfig, mesh: Mesh) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(0)  # as a library may
    dist.barrier()


def hang_on_last(cfg: RunConfig, mesh: Mesh) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(600)
    dist.barrier()


def stopped(cfg: RunConfig, mesh: Mesh) -> None:
    raise Stopped(signal.SIGTERM, 3, "checkpoints/step-3")


def finish_a_step(cfg: RunConfig, mesh: Mesh) -> None:
    raise Stopped(wait_for_signal(cfg, mesh), 3, "checkpoints/step-3")


def finish_the_run(cfg: RunConfig, mesh: Mesh) -> None:
    wait_for_signal(cfg, mesh)


def wait_for_signal(cfg: RunConfig, mesh: Mesh) -> int:
    signals: list[int] = []
    with on_signals(signals.append):
        Path(cfg.training.output_dir, f"pid-{os.getpid()}").touch()
        while not (number := agreed_signal(signals, mesh)):
            time.sleep(0.01)
    return number


def sleep(cfg: RunConfig, mesh: Mesh) -> None:
    Path(cfg.training.output_dir, f"pid-{os.getpid()}").touch()
    time.sleep(600)


# What is refused before a start.


def test_nproc_is_refused_where_a_launcher_has_started_processes(monkeypatch, tmp_path, capfd):
    for name, value in {**TORCHRUN, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert launch(config(tmp_path), 2, report_place) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "has started 4 processes already" in line


def test_nproc_0_is_refused(tmp_path, capfd):
    assert launch(config(tmp_path), 0, report_place) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--nproc is 0" in line


def test_a_tracker_that_is_not_installed_is_refused_before_the_folder_is_touched(tmp_path, capfd):
    cfg = config(tmp_path / "run")
    asked = RunConfig(cfg.model, cfg.data, cfg.training, measure=Measure(trackers=["mlflow"]))
    assert launch(asked, 2, report_place) == 2
    assert "pip install mlflow" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_more_processes_than_gpus_are_refused(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert launch(config(tmp_path, device="auto"), 2, report_place) == 2
    assert capfd.readouterr().err.startswith(
        "error: --nproc is 2 but there are 1 GPUs here; lower it"
    )


@pytest.mark.parametrize(
    ("parallel", "nproc", "fragment"),
    [
        (Parallel(tp=3), 3, "parallel.tp is 3"),
        (Parallel("fsdp2", dp_replicate=3), 2, "parallel.dp_replicate is 3"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_a_process_starts(
    parallel, nproc, fragment, monkeypatch, tmp_path, capfd
):
    monkeypatch.setattr(Group, "run", None)
    cfg = replace(config(tmp_path), model=Model(str(TINY_LLAMA), "random"), parallel=parallel)
    assert launch(cfg, nproc, LOOP) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert fragment in line
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "unsupported"


@pytest.mark.parametrize(
    ("device", "thread", "num_torch_threads", "forked"),
    [
        ("cpu", False, 1, True),
        ("cuda", False, 1, False),
        ("cpu", True, 1, False),
        ("cpu", False, 2, False),
    ],
)
def test_only_a_process_without_threads_or_cuda_forks(
    device, thread, num_torch_threads, forked, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_torch_threads)
    monkeypatch.setattr(threading, "active_count", lambda: 1 + thread)
    assert can_fork(device, torch_was_imported=True) == (forked and sys.platform == "linux")


# One process.


def test_one_process_runs_here_and_leaves_no_group(tmp_path):
    assert launch(config(tmp_path, "single"), None, report_place) == 0
    assert json.loads((tmp_path / "place-0.json").read_text())["sum"] == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("train", "exit_code", "status", "first"),
    [
        (user_error_on_all, 2, "unsupported", "error: the file is empty; fill it\n"),
        (
            out_of_memory_on_last,
            3,
            "oom",
            f"error: out of memory: tried to allocate {2**50} bytes; lower training.mi",
        ),
        (bug_on_last, 1, "failed", "error: KeyError: 'a bug of ours'\nTraceback (most recent"),
    ],
)
def test_one_process_that_fails(train, exit_code, status, first, tmp_path, capfd):
    assert launch(config(tmp_path, "single"), 1, train) == exit_code
    assert capfd.readouterr().err.startswith(first)
    assert json.loads((tmp_path / "record.json").read_text())["status"] == status
    assert not dist.is_initialized()


# Two processes.


def test_two_processes_share_the_cores_and_leave_this_process_as_it_was(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6), raising=False)
    before = (
        dict(os.environ),
        signal.getsignal(signal.SIGTERM),
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )
    assert launch(config(tmp_path), 2, report_place) == 0
    for rank in (0, 1):
        place = json.loads((tmp_path / f"place-{rank}.json").read_text())
        assert place == {"sum": 1 + 2, "data_size": 2, "threads": "3"}  # 6 cores for 2 processes
    assert before == (
        dict(os.environ),
        signal.getsignal(signal.SIGTERM),
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_no_process_of_a_run_on_one_machine_listens_beyond_it(nproc, monkeypatch, tmp_path):
    """The launcher listens on nothing: torch unpickles what anybody sends to a store on a port."""
    for name in SOCKET_INTERFACES:
        monkeypatch.delenv(name, raising=False)
    if nproc == 1:
        assert launch(config(tmp_path), nproc, report_sockets) == 0
    else:
        assert launch_in_a_fork(config(tmp_path), report_sockets) == 0
    listening = [
        json.loads((tmp_path / f"sockets-{rank}.json").read_text()) for rank in range(nproc)
    ]
    if nproc > 1:
        assert listening[0]["launcher"] == []
    assert {ip for addresses in listening for ip in addresses["rank"]} <= {"127.0.0.1"}
    assert not any(name in os.environ for name in SOCKET_INTERFACES)


def be_a_task(cfg: RunConfig, port: int, rank: int) -> None:
    """Be a task of a Slurm step of two on this node."""
    step = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "1", "STEP_NODELIST": "n"}
    place = {"JOB_ID": "5", "PROCID": str(rank), "LOCALID": str(rank)}
    os.environ.update({f"SLURM_{name}": value for name, value in (step | place).items()})
    os.environ["MASTER_PORT"] = str(port)
    sys.exit(launch(cfg, None, report_sockets))


@pytest.mark.parametrize("asked", [None, "127.0.0.2"])
def test_tasks_of_slurm_listen_where_they_meet(asked, monkeypatch, tmp_path):
    """On one node that is loopback, else the address that MASTER_ADDR has."""
    if asked:
        monkeypatch.setenv("MASTER_ADDR", asked)
    for name in SOCKET_INTERFACES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("fork")
    tasks = [
        context.Process(target=be_a_task, args=(config(tmp_path), port, rank)) for rank in range(2)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(60)
        task.kill()
    assert [task.exitcode for task in tasks] == [0, 0]
    reports = [json.loads((tmp_path / f"sockets-{rank}.json").read_text()) for rank in range(2)]
    assert {ip for report in reports for ip in report["rank"]} == {"127.0.0.1", asked} - {None}


def report_own_frames(cfg: RunConfig, mesh: Mesh) -> None:
    """Report the functions of shardwise on this rank's stack, the outermost first."""
    names = [
        frame.f_code.co_qualname
        for frame, _ in traceback.walk_stack(sys._getframe())
        if frame.f_globals.get("__name__", "").startswith("shardwise.")
    ]
    Path(cfg.training.output_dir, f"frames-{dist.get_rank()}.json").write_text(
        json.dumps(names[::-1])
    )


def test_the_interface_that_the_user_names_is_kept(monkeypatch):
    first, second = SOCKET_INTERFACES
    monkeypatch.setenv(first, "ib0")
    monkeypatch.delenv(second, raising=False)
    with on_loopback(ALONE):
        assert os.environ[first] == "ib0"
        assert os.environ[second] == loopback()
    assert second not in os.environ
    with on_loopback(World(0, 2, 0, "env://")):  # between nodes loopback reaches nobody
        assert second not in os.environ


def launch_in_a_fork(cfg: RunConfig, train: Callable[[RunConfig, Mesh], None]) -> int:
    """Return the exit code of a launch of two processes by a process without threads.

    Its ranks are forked. Those of this process are spawned, and import torch again, because
    pytest-xdist has threads.
    """
    return run_in_a_fork(lambda: sys.exit(launch_with_one_thread(cfg, train)))


def launch_with_one_thread(cfg: RunConfig, train: Callable[[RunConfig, Mesh], None]) -> int:
    torch.set_num_threads(1)  # with more, ranks are spawned
    return launch(cfg, 2, train)


def run_in_a_fork(function: Callable[[], None]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(2 * PATIENCE)
    return process.exitcode


def test_few_functions_lie_between_the_command_and_a_step(tmp_path):
    """With `main` and `train` of the command, the loop and a step they are ten."""
    assert launch_in_a_fork(config(tmp_path), report_own_frames) == 0
    names = json.loads((tmp_path / "frames-1.json").read_text())
    assert names == ["launch", "start_processes", "Group.run", "_run", "rank_process", "run_rank"]


def report_smallest(cfg: RunConfig, mesh: Mesh) -> None:
    smallest = torch.full((64,), 1e-30) * 1e-10
    Path(cfg.training.output_dir, "smallest").write_text(str(float(smallest.sum())))


def test_numbers_that_are_slow_on_a_cpu_are_zeros(tmp_path):
    assert launch_in_a_fork(config(tmp_path), report_smallest) == 0
    assert (tmp_path / "smallest").read_text() == "0.0"


def launch_where_one_process_starts(folder: Path) -> None:
    fork, started = os.fork, []

    def once() -> int:
        if started:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        started.append(pid := fork())
        return pid

    os.fork = once
    exit_code = launch(config(folder), 2, report_place)
    for process in multiprocessing.active_children():
        process.join(PATIENCE)
    (folder / "ended.json").write_text(json.dumps([exit_code, is_running(str(started[0]))]))


def test_where_not_all_processes_start_none_is_left(tmp_path, capfd):
    assert run_in_a_fork(partial(launch_where_one_process_starts, tmp_path)) == 0
    assert json.loads((tmp_path / "ended.json").read_text()) == [1, False]
    assert "no more processes" in capfd.readouterr().err


WANT = f"out of memory on rank 1 of 2: tried to allocate {2**50} bytes"
LEFT = "rank 1 of 2 ended with exit code 0 and without a message"
KILLED = "rank 1 of 2 was killed by SIGKILL; the system does that when memory runs out"


@pytest.mark.parametrize(
    ("train", "exit_code", "status", "reason", "one_line"),
    [
        (user_error_on_all, 2, "unsupported", "the file is empty; fill it", True),
        (out_of_memory_on_last, 3, "oom", WANT, True),
        (bug_on_last, 1, "failed", "KeyError on rank 1 of 2: 'a bug of ours'", False),
        (killed_on_last, 1, "failed", KILLED, True),
        (left_on_last, 1, "failed", LEFT, True),
    ],
)
def test_the_first_failure_of_two_processes_is_the_one_reported(
    train, exit_code, status, reason, one_line, tmp_path, capfd
):
    assert launch_in_a_fork(config(tmp_path), train) == exit_code
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], record["reason"]) == (status, reason)
    printed = capfd.readouterr().err
    if one_line:
        assert printed.startswith(f"error: {reason}")
        assert printed.count("\n") == 1
    else:
        assert printed.startswith(
            "error on rank 1 of 2: KeyError: 'a bug of ours'\nTraceback (most"
        )
        assert "in bug_on_last" in printed
        assert printed.endswith("\nKeyError: 'a bug of ours'\n")


def test_the_first_cause_is_told_by_a_clock_that_nobody_sets(tmp_path):
    for rank in (1, 0):
        group.leave_ending(str(tmp_path), rank, Ending(1, "a reason", ""))
    os.utime(tmp_path / "rank-1.json", (2**31, 2**31))  # the clock went back in between
    first = min((0, 1), key=lambda rank: group._seconds_of_ending(str(tmp_path), rank))
    assert first == 1


def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_every_rank(tmp_path, capfd):
    # 20 seconds: less than the test may take, and more than two processes need to meet.
    cfg = replace(config(tmp_path), launch=Launch(timeout_seconds=20))
    assert launch_in_a_fork(cfg, hang_on_last) == 1
    reason = "nothing was finished for 20 seconds (launch.timeout_seconds)"
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["status"], record["reason"]) == ("timeout", reason)
    printed = capfd.readouterr().err
    assert printed.endswith(f"error: {reason}; see the stacks of every rank in {tmp_path}\n")
    hanging, waiting = (
        printed.split(f"stacks on rank {rank} of 2:\n")[1].partition("stacks on")[0]
        for rank in (1, 0)
    )
    for stack in (hanging, waiting):
        assert "in hang_on_last" in stack
    assert "in barrier" in waiting
    assert "in barrier" not in hanging
    assert (tmp_path / "stacks-rank-1.txt").exists()


def test_processes_that_were_asked_to_stop_have_not_failed(tmp_path, capfd, caplog):
    """In spawned processes too."""
    assert (
        launch(replace(config(tmp_path), launch=Launch(restarts=3)), 2, stopped)
        == 128 + signal.SIGTERM
    )
    assert caplog.text == ""  # nothing of the libraries' own
    assert json.loads((tmp_path / "record.json").read_text())["status"] == "stopped"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("stopped by SIGTERM after step 3, saved as checkpoints/step-3")


SPAWNING = """
import os, sys, threading, time
from pathlib import Path
if __name__ == "__main__":
    # With a thread, new processes are spawned.
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
if __name__ == "__mp_main__":
    # A new process that still imports.
    Path(sys.argv[1], f"pid-{os.getpid()}").touch()
    time.sleep(600)
from shardwise.launch.local import launch
from tests.launch import test_local as test_launch
if __name__ == "__main__":
    sys.exit(launch(test_launch.config(Path(sys.argv[1])), 2, test_launch.sleep))
"""
Process = subprocess.Popen[str] | Forked


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Process]]:
    """Start `launch` as a shell would: start(nproc, fake run, **environment).

    Ctrl-C in a terminal goes to all the processes of a group, here those of the new session. A
    fake run of None: two processes that still import.
    """
    processes: list[Process] = []

    def start(nproc: int, train: Callable[..., None] | None, **env: str) -> Process:
        env["TMPDIR"] = str(tmp_path)
        if train is None:
            (tmp_path / "start.py").write_text(SPAWNING)
            process: Process = subprocess.Popen(
                [sys.executable, str(tmp_path / "start.py"), str(tmp_path)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        else:
            process = Forked(partial(launch, config(tmp_path), nproc or None, train), env)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE)


def wait_for_pids(process: Process, folder: Path) -> list[str]:
    """Return the ids of the two processes that `process` starts, once they run their task."""
    deadline = time.monotonic() + PATIENCE
    while len(files := list(folder.glob("pid-*"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return [file.name.removeprefix("pid-") for file in files]


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def blocks_ctrl_c(pid: str) -> bool:
    (mask,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) & 1 << signal.SIGINT - 1)


@pytest.mark.parametrize("importing", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ctrl_c_ends_all_processes_without_a_word(importing, start, tmp_path):
    process = start(2, None if importing else sleep)
    pids = wait_for_pids(process, tmp_path)
    # While it imports, Python would print where it was interrupted.
    assert [blocks_ctrl_c(pid) for pid in pids] == [importing] * 2
    os.killpg(process.pid, signal.SIGINT)
    assert (*process.communicate(timeout=PATIENCE), process.returncode) == ("", "", 130)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ("number", "exit_code", "train"),
    [
        (signal.SIGKILL, -9, sleep),
        (signal.SIGKILL, -9, finish_a_step),
        pytest.param(signal.SIGKILL, -9, finish_the_run, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 128 + 15, sleep, marks=pytest.mark.slow),
    ],
)
def test_processes_end_with_the_one_that_started_them(number, exit_code, train, start, tmp_path):
    process = start(2, train)
    pids = wait_for_pids(process, tmp_path)
    os.kill(process.pid, number)
    process.communicate(timeout=PATIENCE)  # until nobody holds its pipes
    assert process.returncode == exit_code
    time.sleep(0.2)
    assert not any(is_running(pid) for pid in pids)


def stop_when_asked(cfg: RunConfig, mesh: Mesh) -> None:
    """Steps of a run, after which all ranks agree on a signal."""
    signals: list[int] = []
    with on_signals(signals.append):
        Path(cfg.training.output_dir, f"pid-{os.getpid()}").touch()
        while not (number := agreed_signal(signals, mesh)):
            time.sleep(0.01)
        while number == signal.SIGINT and len(signals) == 1:  # as long as a save takes, so that
            time.sleep(0.01)  # the second one for processes that import does not come later
    raise Stopped(number, 3, "checkpoints/step-3")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM])
def test_the_exit_code_of_several_processes_tells_the_signal(number, start, tmp_path):
    process = start(2, stop_when_asked)
    wait_for_pids(process, tmp_path)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number  # as a shell tells, and one process
    name = signal.Signals(number).name
    assert stderr.startswith(f"stopped by {name} after step 3")
    assert f"stopped by {name}" in RunRecord.read(tmp_path / "record.json").reason


def test_two_slurm_tasks_join(start, tmp_path):
    env = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [
        start(0, report_place, **env, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in (0, 1)
    ]
    assert [(*task.communicate(timeout=PATIENCE), task.returncode) for task in tasks] == [
        ("", "", 0)
    ] * 2
    assert [
        json.loads((tmp_path / f"place-{rank}.json").read_text())["sum"] for rank in (0, 1)
    ] == [3, 3]
