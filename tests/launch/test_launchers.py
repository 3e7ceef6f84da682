"""One run file for every launcher of `shardwise launch`."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml

from shardwise.commands import cli
from shardwise.commands.command import overrides_of
from shardwise.commands.launch import LAUNCHERS, UNUSED
from shardwise.commands.library import LOOP
from shardwise.config.run_file import load_config
from shardwise.launch import local

LAUNCH = {
    "nodes": 2,
    "processes": 2,
    "time": "04:00:00",
    "ahead_seconds": 60,
    "restarts": 3,
    "environment": {"HF_HOME": "/data/hf"},
    "before": ["module load cuda"],
    "slurm": {"partition": "gpu", "cpus-per-task": 8},
    "torchrun": {"rdzv-endpoint": "node1:29400"},
    "ray": {"address": "10.0.0.1:6379"},
    "container": "me/image:1",
    "mounts": {"/data": "kept"},
    "resources": {"cpu": 4},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_run_file_goes_everywhere(launcher, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    run["training"] |= {"output_dir": "/data/run", "global_batch_size": 8, "micro_batch_size": 2}
    run["parallel"] = {"data": "fsdp2"}
    run["model"]["path"], run["data"]["train"] = "/data/model", "/data/corpus.jsonl"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | {"launch": LAUNCH}))
    capsys.readouterr()
    command = ["launch", "run.yaml", f"--on={launcher}", "--dry-run"]
    # Each rank reads the timeout.
    command += [
        "--launch.timeout_seconds=60",
        "--training.device=cpu",
        *(["--launch.nodes=1"] if launcher == "local" else []),
    ]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert "--launch.timeout_seconds=60" in printed.out
    if launcher != "kubernetes":  # its file has the run file in it
        others = {"slurm": "--partition=gpu", "torchrun": "node1:29400", "ray": "10.0.0.1:6379"}
        found = {name for name, text in others.items() if text in printed.out}
        assert found == {launcher} & others.keys()
    unused = [f"launch.{key}" for key in UNUSED[launcher]]
    assert printed.err == (f"note: --on {launcher} does not use {', '.join(unused)}\n")


@pytest.mark.parametrize(
    ("launcher", "options", "asked"),
    [
        ("slurm", {}, "launch.slurm={gpus-per-node: 4}"),
        ("slurm", {"slurm": {"gres": "gpu:4"}}, None),
        ("slurm", {"slurm": {"gpus-per-task": 1}}, None),
        ("kubernetes", {}, "launch.resources={nvidia.com/gpu: 4}"),
        ("kubernetes", {"resources": {"amd.com/gpu": 4}}, None),
        ("skypilot", {"resources": {"cpus": "8+"}}, "launch.resources={accelerators: H100:4}"),
        ("skypilot", {"resources": {"accelerators": "A100:4"}}, None),
        ("torchrun", {}, None),
    ],
)
def test_a_job_that_asks_for_no_gpu_says_so(
    launcher, options, asked, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    run["training"] |= {"output_dir": "/data/run", "micro_batch_size": 2}
    run["parallel"] = {"data": "ddp"}
    launch = {"processes": 4, "container": "me/image:1", "mounts": {"/data": "kept"}, **options}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | {"launch": launch}))
    for device, is_told in (("auto", asked is not None), ("cpu", False)):
        capsys.readouterr()
        command = ["launch", "run.yaml", f"--on={launcher}", "--dry-run"]
        assert cli.main([*command, f"--training.device={device}"]) == 0
        note = f"note: the job asks for no GPU; set {asked}, or training.device=cpu"
        assert (note in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("options", "is_told"),
    [({}, True), ({"gpus-per-node": 1}, True), ({"cpus-per-task": 8}, False)],
)
def test_a_job_of_slurm_whose_processes_get_one_cpu_each_says_so(
    options, is_told, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    keys = ["--launch.mounts={/data: kept}", f"--launch.slurm={json.dumps(options)}"]
    assert cli.main(["launch", "run.yaml", "--on=slurm", "--dry-run", *keys]) == 0
    assert ("set launch.slurm.cpus-per-task" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_checkpoint_that_a_cluster_would_not_read_is_refused(
    launcher, tmp_path, monkeypatch, capsys
):
    """Each start there has `--resume auto`, which knows the checkpoints of the folder alone."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    capsys.readouterr()
    command = ["launch", "run.yaml", f"--on={launcher}", "--dry-run"]
    command += ["--training.resume=runs/a/checkpoints/step-5", "--training.output_dir=/data/run"]
    command += ["--launch.mounts={/data: kept}"]
    if launcher == "local":
        assert cli.main(command) == 0
        return
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert "copy that into /data/run/checkpoints" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--launch.restarts=10 --resume auto"),
        (["--resume", "latest"], "'--training.resume=\"latest\"' --launch.restarts=10"),
        (["--launch.restarts=0"], "--launch.restarts=0 --resume auto"),
        (["--training.overwrite=true"], "--training.overwrite=true --launch.restarts=10"),
    ],
)
def test_a_launch_on_this_machine_goes_on_until_it_is_finished(
    options, words, tmp_path, monkeypatch, capsys
):
    """The run that it starts is the one of the command that a dry run prints."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    capsys.readouterr()
    assert cli.main(["launch", "run.yaml", "--dry-run", *options]) == 0
    printed = capsys.readouterr().out
    assert printed == f"shardwise train run.yaml --nproc 1 {words}\n"
    started = []
    monkeypatch.setattr(local, "launch", lambda *args: started.append(args) or 0)
    assert cli.main(["launch", "run.yaml", *options]) == 0
    args = cli.parse(shlex.split(printed)[1:])
    assert started == [(load_config("run.yaml", overrides_of(args)), 1, LOOP)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_resume_that_an_ending_prints_is_taken_everywhere(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    keys = ["--training.output_dir=/data/run", "--launch.mounts={/data: kept}"]
    keys += ["--launch.container=me/image:1", "--resume", "latest", "--dry-run"]
    assert cli.main(["launch", "run.yaml", f"--on={launcher}", *keys]) == 0


@pytest.mark.parametrize(
    ("launcher", "unseen"),
    [
        (
            "kubernetes",
            {
                *("model.path weights", "model.tokenizer /data/../tok", "data.train a.jsonl"),
                *("data.train ~/b", "data.validation held/out.jsonl", "data.chat_template t.jinja"),
                *("data.tools tools.json", "data.train calls.json", "lora.path adapter"),
            },
        ),
        ("skypilot", {"model.tokenizer /data/../tok", "data.train ~/b"}),
        ("slurm", {"model.tokenizer /data/../tok", "data.train ~/b"}),
        ("torchrun", set()),
    ],
)
def test_inputs_that_no_process_finds_are_told_one_by_one(
    launcher, unseen, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        """
model: {path: weights, tokenizer: /data/../tok}
lora: {path: adapter}
data:
  train:
    - {path: a.jsonl, format: chat, tools: calls.json}
    - ~/b
    - owner/name
    - "/data/c:all:train"
    - /data/*.jsonl
  validation: held/out.jsonl
  format: chat
  chat_template: t.jinja
  tools: tools.json
training: {output_dir: /data/run, device: cpu}
launch: {container: me/image:1, mounts: {/data: kept}}
"""
    )
    assert cli.main(["launch", "run.yaml", f"--on={launcher}", "--dry-run"]) == 0
    notes = capsys.readouterr().err.splitlines()
    told = [
        re.match(r"note: ((?:model|lora|data)\.\S+ \S+) is (?:in no|neither)", n) for n in notes
    ]
    assert {match[1] for match in told if match} == unseen
    assert sum(match is not None for match in told) == len(unseen)


def test_what_is_no_path_is_not_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        """
model: {path: owner/Model-3.5}
data: {train: owner/name::train, validation: 0.1, format: chat, tools: functions}
training: {output_dir: /data/run, device: cpu}
launch: {container: me/image:1, mounts: {/data: kept}}
"""
    )
    assert cli.main(["launch", "run.yaml", "--on=kubernetes", "--dry-run"]) == 0
    assert not capsys.readouterr().err
    (tmp_path / "owner" / "name").mkdir(parents=True)  # then it is a folder
    assert cli.main(["launch", "run.yaml", "--on=kubernetes", "--dry-run"]) == 0
    assert "data.train owner/name::train is in no folder" in capsys.readouterr().err
