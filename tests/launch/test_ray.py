"""What `shardwise launch --on ray` asks for and refuses; no Ray is needed. Real runs:
tests/clusters."""

from __future__ import annotations

import importlib.util
import signal
from dataclasses import replace
from typing import Any

import pytest
import yaml

from shardwise.base.process import stop
from shardwise.base.process.ending import FAILED, OUT_OF_MEMORY, USER_ERROR, Ending
from shardwise.commands import cli
from shardwise.config import Data, Launch, Model, RunConfig, Training, UserError
from shardwise.launch import ray, ray_request


def config(**launch: Any) -> RunConfig:
    training = Training(output_dir="runs/a", micro_batch_size=1, global_batch_size=1, steps=1)
    return RunConfig(Model("m"), Data("d"), training, launch=Launch(**launch))


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cli.main(["init"]) == 0
    capsys.readouterr()
    return tmp_path


def test_a_dry_run_prints_and_starts_nothing(folder, capsys):
    files = sorted(folder.rglob("*"))
    overrides = [
        "--launch.nodes=2",
        "--parallel.tp=2",
        "--training.output_dir=a b",
        "--launch.ray={cpus: 4}",
    ]
    assert cli.main(["launch", "run.yaml", "--on=ray", "--dry-run", *overrides]) == 0
    assert capsys.readouterr().out == (
        "# Each worker of Ray Train has 4 CPUs, and a GPU where the cluster has GPUs, and is a "
        "rank of:\n"
        "# shardwise train run.yaml --launch.nodes=2 --parallel.tp=2 '--training.output_dir=a b' "
        "'--launch.ray={cpus: 4}' --resume auto\n"
        "address: auto\nworkers: 2\nrestarts: 10\nplacement: STRICT_SPREAD\ncpus: 4\n"
        "accelerator: null\nenvironment: {}\n"
    )
    assert sorted(folder.rglob("*")) == files


@pytest.mark.parametrize("letter", ["\n", "\r", "\x85", "\u2028"])
def test_a_line_break_in_a_name_stays_in_its_comment(letter):
    text = ray.script(config(), f"a{letter}b: 1.yaml", [])
    assert "b" not in yaml.safe_load(text)
    assert len(text.splitlines()) == 2 + len(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("nodes", "processes", "workers", "placement"),
    [(1, 2, 2, "STRICT_PACK"), (2, 1, 2, "STRICT_SPREAD"), (2, 8, 16, "PACK")],
)
def test_workers_and_their_places(nodes, processes, workers, placement):
    wanted = ray_request.request(config(nodes=nodes, processes=processes))
    assert (wanted.workers, wanted.placement) == (workers, placement)


def test_an_address_is_an_option_or_a_variable(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "b:1")
    assert ray_request.request(config()).address == "b:1"
    assert ray_request.request(config(ray={"address": "a:1"})).address == "a:1"


@pytest.mark.parametrize(
    ("device", "accelerator", "num_gpus", "on_gpu"),
    [
        ("auto", None, 0, False),
        ("auto", None, 8, True),
        ("auto", "H100", 0, True),  # nodes that are started when they are needed
        ("cuda", None, 0, True),
        ("cpu", None, 8, False),
    ],
)
def test_a_worker_has_a_gpu_where_there_are_any(device, accelerator, num_gpus, on_gpu):
    options = {"cpus": 4} | ({} if accelerator is None else {"accelerator": accelerator})
    cfg = config(nodes=2, ray=options)
    cfg = replace(cfg, training=replace(cfg.training, device=device))
    cluster = {"CPU": 6.0, "GPU": float(num_gpus)}
    resources = ray_request.resources_of(cfg, ray_request.request(cfg), cluster)
    assert resources == {"CPU": 4} | ({"GPU": 1} if on_gpu else {})
    missing = ray_request.shortage(2, resources, cluster)
    assert missing.startswith("8 CPUs of which the cluster has 6")
    assert ("2 GPUs of which the cluster has 0" in missing) == (on_gpu and num_gpus == 0)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (
            {"ray": {"partition": "gpu"}},
            "launch.ray has .partition.: .gpu., which Ray does not take",
        ),
        ({"ray": {"cpus": "many"}}, "it takes address .str., cpus .int."),
        ({"ray": {"cpus": 0}}, "launch.ray has .cpus.: 0, which"),
        ({"ray": {"cpus": -1}}, "launch.ray has .cpus.: -1, which"),
    ],
)
def test_what_ray_does_not_have_is_refused(launch, message):
    with pytest.raises(UserError, match=message):
        config(**launch)


@pytest.mark.parametrize("command", [["launch", "run.yaml"], ["bench", "sweep.yaml", "--out=o"]])
def test_a_missing_package_is_one_line(command, folder, monkeypatch, capsys):
    (folder / "sweep.yaml").write_text(
        "base: run.yaml\naxes: {seed: {a: {training.seed: 1}, b: {training.seed: 2}}}\n"
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    assert cli.main([*command, "--on=ray"]) == 2
    expected = "error: --on ray needs Ray, which is not installed; pip install 'ray[train]'\n"
    assert capsys.readouterr().err == expected


KILLED = RuntimeError("the actor died")
LOST_PEER = ray_request.RankError(Ending(FAILED, "lost a peer", ""))
MISTAKE = ray_request.RankError(Ending(USER_ERROR, "a mistake", "", "unsupported"))
NO_MEMORY = ray_request.RankError(Ending(OUT_OF_MEMORY, "out of memory", "", "oom"))


@pytest.mark.parametrize(
    ("failures", "reason", "is_final"),
    [
        ({0: LOST_PEER, 1: KILLED}, "rank 1 of 2 died", False),
        ({0: LOST_PEER, 1: NO_MEMORY}, "out of memory", True),
        ({0: MISTAKE, 1: KILLED}, "a mistake", True),
        ({0: LOST_PEER}, "lost a peer", False),
    ],
)
def test_the_cause_is_not_what_others_report_of_it(failures, reason, is_final):
    ending = ray_request.first_cause(failures, 2)
    assert ending.reason.startswith(reason)
    assert ray_request.is_final(ending) == is_final


def test_a_request_to_stop_reaches_a_run_that_begins_later(monkeypatch):
    monkeypatch.setattr(stop, "_asked", [])
    first: list[int] = []
    second: list[int] = []
    with stop.on_signals(first.append):
        stop.ask(signal.SIGTERM)
    stop.ask(signal.SIGINT)
    with stop.on_signals(second.append):
        pass
    assert first == [signal.SIGTERM]
    assert second == [signal.SIGTERM, signal.SIGINT]
