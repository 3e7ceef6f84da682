"""`shardwise launch --on torchrun`: what the agent makes of how its ranks end.

Real runs on two nodes, one of which is lost: tests/clusters.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from shardwise.base.process import world
from shardwise.base.process.ending import RunError
from shardwise.base.process.world import ALONE, STORE
from shardwise.commands import cli
from shardwise.commands.library import LOOP
from shardwise.config import Data, Launch, Model, Parallel, RunConfig, Training
from shardwise.launch import torchrun
from shardwise.launch.local import launch
from shardwise.launch.rank import run_rank
from tests.command import run_command
from tests.launch.test_local import no_launcher  # noqa: F401
from tests.left_out import some_now
from tests.process.test_world import TORCHRUN

RANK = f"""#!{sys.executable}
import json, os, psutil, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
agent = psutil.Process(os.getppid())
store = os.environ.get("SHARDWISE_STORE", "")
listening = [c.laddr.ip for c in agent.net_connections("inet") if c.status == psutil.CONN_LISTEN]
start = {{
    "arguments": sys.argv[1:],
    "store": store + "-" + os.environ["TORCHELASTIC_RESTART_COUNT"],
    "folder": oct(os.stat(os.path.dirname(store) or ".").st_mode),
    "listening": listening,
}}
with Path("starts.jsonl").open("a") as file:
    print(json.dumps(start), file=file)
number = int(os.environ["SIGNAL"])
if number:
    signal.signal(number, lambda *_: os._exit(128 + number))
    os.kill(os.getppid(), number)
    time.sleep(60)
code = int(os.environ["CODE"])
if code >= 0:
    Path(os.environ["SHARDWISE_CODES"], str(os.getpid())).write_text(str(code))
else:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""A rank that reports what it sees of its agent, and ends with a code or asks its agent to end."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    Path("rank").write_text(RANK)
    Path("rank").chmod(0o755)
    return tmp_path


def run(folder: Path, code: int = 0, number: int = 0, restarts: int = 2, *overrides: str):
    environment = {"PYTHON_EXEC": str(folder / "rank"), "CODE": str(code), "SIGNAL": str(number)}
    done = run_command(
        [
            *("launch", "run.yaml", "--on=torchrun", f"--launch.restarts={restarts}"),
            f"--launch.environment={json.dumps(environment)}",
            *overrides,
        ]
    )
    return done, [json.loads(line) for line in Path("starts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("code", "expected", "num_starts"),
    some_now(
        [(0, 0, 1), (1, 1, 3), (2, 2, 1), (3, 3, 1), (143, 143, 1), (-9, 1, 3)],
        [(1, 1, 3), (2, 2, 1), (143, 143, 1), (-9, 1, 3)],
    ),
)
def test_what_would_end_alike_is_not_started_again(folder, code, expected, num_starts):
    done, starts = run(folder, code)
    assert done.returncode == expected, done.stderr
    assert len(starts) == num_starts
    assert done.stderr.count("note: starting again") == num_starts - 1


def test_one_node_listens_nowhere_and_leaves_nothing(folder):
    _, starts = run(folder, code=1, restarts=1)
    assert [start["listening"] for start in starts] == [[], []]
    assert len({start["store"] for start in starts}) == 2  # a new group meets in a new file
    assert {start["folder"] for start in starts} == {"0o40700"}
    assert not Path(starts[0]["store"]).parent.exists()
    assert starts[0]["arguments"][:5] == ["-u", "-m", "shardwise", "train", "run.yaml"]
    assert starts[0]["arguments"][-2:] == ["--resume", "auto"]


def test_one_node_looks_no_name_up(folder, monkeypatch):
    """Its agent and ranks meet in files, however long the path of the temporary folder is."""
    temporary = folder / ("a" * 100)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done, starts = run(folder)
    assert (done.returncode, len(starts)) == (0, 1), done.stderr


@pytest.mark.parametrize(
    ("endpoint", "note"),
    [
        ("node1:29400", "if this node is the meeting place of the agents, they meet on every"),
        ("x", ""),
    ],
)
def test_a_name_that_no_other_node_reaches_is_told(monkeypatch, capsys, endpoint, note):
    """Debian's /etc/hosts has an address of loopback for a machine's own name."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    monkeypatch.setattr(registry, "get_rendezvous_handler", lambda parameters: parameters)
    options = {} if note else {"store_type": "file"}
    parameters = RendezvousParameters("c10d", endpoint, "run", 1, 2, **options)
    assert torchrun._rendezvous(parameters) is parameters
    said = capsys.readouterr().err
    assert note in said if note else not said


def test_a_node_whose_own_name_has_no_address_joins_the_others(monkeypatch):
    """torch asks for the addresses of its name, to see whether the store is to be here."""
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-node.invalid")
    elsewhere = "192.0.2.1:29400"  # of a network that nobody has
    parameters = RendezvousParameters("c10d", elsewhere, "run", 1, 2, read_timeout=1)
    with pytest.raises(RendezvousConnectionError):
        torchrun._rendezvous(parameters)


@pytest.mark.parametrize(
    ("host", "conf", "address"),
    [
        ("localhost", "", "127.0.0.1"),
        ("127.0.0.1", ",is_host=true", "127.0.0.1"),
        ("[::1]", "", "::1"),
    ],
)
def test_the_agents_meet_at_an_address_alone(folder, host, conf, address):
    """torch's own store listens on every interface, and runs code that a key of it holds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            port = server.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no {address}")
    options = f"{{rdzv-endpoint: '{host}:{port}', rdzv-conf: 'last_call_timeout=1{conf}'}}"
    done, (start,) = run(
        folder,
        0,
        0,
        0,
        "--launch.nodes=2",
        "--launch.min_nodes=1",
        "--parallel.data=ddp",
        "--training.micro_batch_size=1",
        f"--launch.torchrun={options}",
    )
    assert done.returncode == 0, done.stderr
    assert start["listening"] == [address]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_agent_reaches_the_ranks(folder, number):
    done, starts = run(folder, number=number)
    assert done.returncode == 128 + number
    assert len(starts) == 1


def wait_for_the_end(cfg: RunConfig, mesh: Any) -> None:
    Path("pid.new").write_text(str(os.getpid()))
    Path("pid.new").rename("pid")
    time.sleep(60)


def be_an_agent(cfg: RunConfig) -> None:
    """Start a rank, and die as soon as it trains."""
    os.environ[STORE] = "store"
    rank = multiprocessing.get_context("fork").Process(
        target=run_rank, args=(cfg, ALONE, wait_for_the_end)
    )
    rank.start()
    while rank.is_alive() and not Path("pid").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_rank_outlives_the_only_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = RunConfig(Model("m"), Data("d"), Training(str(tmp_path)))
    agent = multiprocessing.get_context("fork").Process(target=be_an_agent, args=(cfg,))
    agent.start()
    agent.join()
    assert agent.exitcode == -signal.SIGKILL
    rank = int(Path("pid").read_text())
    for _ in range(200):
        if not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    os.kill(rank, signal.SIGKILL)
    raise AssertionError("the rank goes on")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([1, -15], 1),
        ([-9, 143], 1),
        ([143, -15], 143),
        ([-15], 1),
        ([2, 1], 2),
        ([138, 138], 138),
    ],
)
def test_the_code_of_a_node_is_its_causes(codes, expected):
    assert torchrun.exit_code(codes) == expected


@pytest.mark.parametrize(
    ("codes", "starts_again", "expected"),
    [
        ([], False, 0),  # they go on, or were killed and have said nothing
        ([1, 143], False, 1),
        ([2], False, 2),
        ([1], True, 0),  # those of the start before
    ],
)
def test_an_agent_that_lost_the_others_is_silent_where_its_ranks_have_said_why(
    tmp_path, monkeypatch, capsys, codes, starts_again, expected
):
    def lose_the_others(*_):
        raise DistNetworkError("the connection was lost")

    def run(agent):
        for rank, code in enumerate(codes):
            (tmp_path / f"{rank}").write_text(str(code))
        if starts_again:
            agent.get_worker_group().spec.rdzv_handler.next_rendezvous()
        lose_the_others()

    monkeypatch.setattr(LocalElasticAgent, "run", run)
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", lose_the_others)
    with contextlib.nullcontext() if expected else pytest.raises(RunError, match="was that node"):
        there = (f"--rdzv-endpoint={tmp_path}-agents", "--rdzv-conf=store_type=file")
        arguments = ["--rdzv-backend=c10d", *there, "train.py"]
        assert torchrun._run_agent(arguments, tmp_path) == expected
    assert capsys.readouterr().err == ""


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep({seconds}), sys.exit(7)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("seconds", "limit", "code"), [(1, 60, 7), (60, 1, None)])
def test_ranks_that_start_again_have_as_long_to_save_as_the_run_says(
    tmp_path, capsys, seconds, limit, code
):
    """torch's agent, which ends them next, gives 30 seconds. It reads how they have ended."""
    handler = SimpleNamespace(next_rendezvous=None, num_nodes_waiting=lambda: 1)
    config = SimpleNamespace(
        nproc_per_node=1, min_nodes=1, max_nodes=2, max_restarts=3, shutdown_timeout=limit
    )
    command = [sys.executable, "-c", SAVES.format(seconds=seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        workers = SimpleNamespace(workers=[SimpleNamespace(id=rank.pid)])
        torchrun._Starts(handler, config, tmp_path, workers)
        assert handler.num_nodes_waiting() == 1
        assert rank.poll() == code
        rank.kill()
    assert "starting again" in capsys.readouterr().err


def test_an_agent_knows_its_ranks_by_their_processes(tmp_path):
    """What `_Starts` asks them by: torch leaves it to each agent what `Worker.id` is."""
    config, _, _ = torchrun._parsed(["--rdzv-endpoint=here", "train.py"])
    handler = registry.get_rendezvous_handler(
        RendezvousParameters("static", "127.0.0.1:0", "1", 1, 1, rank=0)
    )
    spec = WorkerSpec("train", 1, handler, entrypoint="true", max_restarts=0)
    agent = LocalElasticAgent(spec, logs_specs=config.logs_specs)
    agent.run()
    (rank,) = agent.get_worker_group().workers
    assert isinstance(rank.id, int)


def test_a_command_says_what_the_section_says(folder, capsys):
    capsys.readouterr()
    arguments = ["--launch.nodes=2", "--launch.processes=4", "--parallel.data=ddp"]
    arguments += ["--training.micro_batch_size=1", "--launch.min_nodes=1"]
    options = "--launch.torchrun={rdzv-endpoint: n1:29400, rdzv-conf: join_timeout=60}"
    command = ["launch", "run.yaml", "--on=torchrun", "--dry-run", *arguments]
    assert cli.main(command) == 2
    assert "say where the nodes meet" in capsys.readouterr().err
    assert cli.main([*command, options]) == 0
    out = capsys.readouterr().out
    assert "torchrun --rdzv-backend=c10d --rdzv-endpoint=n1:29400 --rdzv-conf=join_t" in out
    assert "--nnodes=1:2 --nproc-per-node=4 --max-restarts=10 --rdzv-id=run-" in out
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " in out
    assert out.endswith("--resume auto\n")


def test_a_dry_run_leaves_the_threads_of_ranks_as_they_are(folder, monkeypatch, capsys):
    """torchrun gives each of several ranks one thread, where nobody has said how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(world, "num_cores", lambda: 16)
    capsys.readouterr()
    sizes = ("--launch.processes=2", "--parallel.data=ddp", "--training.micro_batch_size=1")
    assert cli.main(["launch", "run.yaml", "--on=torchrun", "--dry-run", *sizes]) == 0
    printed = capsys.readouterr()
    assert "OMP_NUM_THREADS=8" in printed.out
    assert not printed.err
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_launch_says_where_nodes_would_wait(folder, capsys):
    arguments = ["--launch.nodes=4", "--parallel.data=ddp", "--training.micro_batch_size=1"]
    arguments += ["--launch.torchrun={rdzv-endpoint: 'n1:1'}", "--dry-run"]
    command = ["launch", "run.yaml", "--on=torchrun", "--launch.min_nodes=1", *arguments]
    assert cli.main(command) == 0
    assert "the run continues on 2 of 3 remaining nodes, because its" in capsys.readouterr().err
    assert cli.main([*command, "--training.global_batch_size=12"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launch.torchrun={no-such: 1}"], "torchrun refuses launch.torchrun: "),
        *[
            (["--launch.torchrun={%s}" % option], "torchrun refuses launch.torchrun: ")  # noqa: UP031
            for option in ("help: null", "redirects: 9", "rdzv-conf: x", "rdzv-backend: x")
        ],
        (["--launch.torchrun={no-such: 1}", "--dry-run"], "torchrun refuses launch.torchrun: "),
        (
            ["--launch.nodes=2", "--launch.torchrun={rdzv-endpoint: null}"],
            "say where the nodes meet",
        ),
        (["--launch.torchrun={nnodes: 3}"], "which launch itself sets"),
        (["--launch.min_nodes=2"], "launch.min_nodes is 2 of 1 launch.nodes"),
        (
            ["--launch.nodes=2", "--launch.min_nodes=1", "--parallel.tp=2"],
            "launch.min_nodes is 1: parallel.tp is 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(folder, capsys, arguments, message):
    capsys.readouterr()
    assert cli.main(["launch", "run.yaml", "--on=torchrun", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_ranks_that_cannot_go_on_say_how_to_resume(tmp_path, monkeypatch, capsys):
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    cfg = RunConfig(
        Model("m"),
        Data("d"),
        Training(str(tmp_path)),
        parallel=Parallel("ddp", tp=4),
        launch=Launch(nodes=4, min_nodes=1),
    )
    assert launch(cfg, None, LOOP) == 2
    err = capsys.readouterr().err
    assert "3 of 4 processes are left" in err
    assert "parallel.tp is 4" in err
    assert "resumes from its last checkpoint" in err


@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_warns_of_none_of_its_arguments(nodes, monkeypatch):
    from torch.distributed import run as torchs

    warnings = []
    monkeypatch.setattr(torchs.logger, "warning", lambda *message: warnings.append(message))
    training = Training(output_dir="a", micro_batch_size=1, global_batch_size=2, steps=1)
    endpoint = {"rdzv-endpoint": "node1:29400"} if nodes > 1 else {}
    cfg = RunConfig(Model("m"), Data("d"), training, launch=Launch(nodes, torchrun=endpoint))
    torchrun.script(cfg, "run.yaml", [])
    assert warnings == []
