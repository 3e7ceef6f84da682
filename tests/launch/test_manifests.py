"""The files that `shardwise launch` writes for SkyPilot and Kubernetes.

SkyPilot's own check of its file, and runs by what both files start: tests/clusters.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.commands import cli
from shardwise.config import Data, Launch, Model, RunConfig, Training, UserError
from shardwise.launch import kubernetes, skypilot
from shardwise.launch.manifest import name_of

HOSTILE = 'a b\'; touch "$HOME"/x `id` $(id) ${A} $$ \\ "'
TRAINJOB = json.loads(Path(__file__).with_name("schemas").joinpath("trainjob.json").read_text())
MOUNTED = {"container": "me/image:1", "mounts": {"/data": "kept"}}


def config(output_dir: str = "/data/First run", **launch: Any) -> RunConfig:
    training = Training(output_dir=output_dir, micro_batch_size=1, global_batch_size=1, steps=1)
    return RunConfig(Model("m"), Data("d"), training, launch=Launch(**{**MOUNTED, **launch}))


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What Kubernetes would refuse or drop: its schemas name every field that there is."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{where}: {value!r}"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return [f"{where} is no {schema['type']}: {value!r}"]
    found: list[str] = []
    if isinstance(value, dict):
        found += [f"{where}.{name} is missing" for name in schema.get("required", ())]
        found = [line for line in found if line.split()[0].rpartition(".")[2] not in value]
        for name, item in value.items():
            of_item = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if of_item is None and "properties" in schema:
                found.append(f"{where}.{name} is unknown")
            found += problems(item, of_item or {}, f"{where}.{name}")
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            found.append(f"{where} is too long")
        for number, item in enumerate(value):
            found += problems(item, schema["items"], f"{where}[{number}]")
    return found


def written(cfg: RunConfig, tmp_path: Path, *overrides: str) -> tuple[Any, Any]:
    """The ConfigMap and the TrainJob of a run."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model: {path: m}\n")
    return tuple(yaml.safe_load_all(kubernetes.script(cfg, str(run_file), overrides)))


def test_a_name_is_a_label_and_that_of_one_folder():
    folders = ("/a/first run", "/b/first run", "/c/7_" + "x" * 80, f"/d/{HOSTILE}", "/e/-")
    names = [name_of(config(folder)) for folder in folders]
    assert len({*names}) == len(folders)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name) for name in names), names
    assert names[0].startswith("first-run-")


def test_a_trainjob_is_what_its_schema_says(tmp_path):
    cfg = config(nodes=2, processes=8, resources={"nvidia.com/gpu": 8, "memory": "1Ti"})
    files, job = written(cfg, tmp_path, "--lora.r=4", "--launch.nodes=2")
    assert problems(job, TRAINJOB["schema"]) == []
    assert job["apiVersion"].endswith("/" + TRAINJOB["version"])
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8, "memory": "1Ti"}}
    assert files["metadata"]["name"] == job["metadata"]["name"] == name_of(cfg)
    assert files["data"]["run.yaml"] == "model: {path: m}\n"
    assert files["data"]["start.sh"] == (
        "cd /work\nset -e\nexec torchrun --shutdown-timeout 600 -m shardwise train "
        "/etc/shardwise/run.yaml --lora.r=4 "
        "--launch.nodes=2 --resume auto\n"
    )
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert "/data" in mounts.values()
    assert pod["terminationGracePeriodSeconds"] == 600


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("trainer.numNodes", "2", ".spec.trainer.numNodes is no integer"),
        ("trainer.nodes", 2, ".spec.trainer.nodes is unknown"),
        ("runtimePatches", [{}], ".spec.runtimePatches[0].manager is missing"),
        ("runtimeRef", {}, ".spec.runtimeRef.name is missing"),
    ],
)
def test_the_check_sees_mistakes(path, value, problem, tmp_path):
    _, job = written(config(), tmp_path)
    *sections, name = path.split(".")
    part = job["spec"]
    for section in sections:
        part = part[section]
    part[name] = value
    assert any(line.startswith(problem) for line in problems(job, TRAINJOB["schema"]))


def task(cfg: RunConfig, monkeypatch, tmp_path: Path, *overrides: str) -> Any:
    monkeypatch.chdir(tmp_path)
    return yaml.safe_load(skypilot.script(cfg, "run.yaml", overrides))


def test_a_task_is_what_the_section_says(monkeypatch, tmp_path):
    cfg = config(
        nodes=2,
        processes=8,
        restarts=3,
        environment={"A": "b c"},
        before=["echo ready"],
        mounts={"/data": "kept", "/in": "s3://bucket", "/here": "./corpus"},
        resources={"accelerators": "H100:8", "use_spot": True},
    )
    place = " ".join(["--nproc-per-node 8", *skypilot.PLACE])
    assert task(cfg, monkeypatch, tmp_path, "--lora.r=4", "--launch.nodes=2") == {
        "name": name_of(cfg),
        "workdir": ".",
        "num_nodes": 2,
        "resources": {
            "job_recovery": {"max_restarts_on_errors": 3},
            "accelerators": "H100:8",
            "use_spot": True,
            "image_id": "docker:me/image:1",
        },
        "file_mounts": {
            "/in": {"source": "s3://bucket", "mode": "MOUNT_CACHED"},
            "/here": "./corpus",
        },
        "volumes": {"/data": "kept"},
        "run": f"set -e\nexport A='b c'\necho ready\nexec torchrun --shutdown-timeout 600 {place} "
        "-m shardwise train run.yaml --lora.r=4 --launch.nodes=2 --resume auto\n",
    }


def words_of(begin: str, folder: Path) -> list[str]:
    """Run what a node runs, with programs that print their arguments; return these."""
    for name in ("python", "torchrun"):
        program = folder / name
        program.write_text('#!/bin/bash\nprintf "%s\\n" "$A" "$@"\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", begin.replace(kubernetes.WORK, str(folder), 1)],
        env={"PATH": f"{folder}:/bin:/usr/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("nodes", [1, 2])
def test_hostile_words_are_only_words(nodes, monkeypatch, tmp_path):
    cfg = config(f"/data/{HOSTILE}", nodes=nodes, environment={"A": HOSTILE})
    override = f"--data.train={HOSTILE}"
    sky = task(cfg, monkeypatch, tmp_path, override)
    files, job = written(cfg, tmp_path, override)
    assert sky["name"] == job["metadata"]["name"] == name_of(cfg)
    for begin in (sky["run"], files["data"]["start.sh"]):
        words = words_of(begin, tmp_path)
        assert words[0] == HOSTILE
        assert override in words
        assert ("--nproc" in words) == (nodes == 1)
    if nodes == 2:
        assert "10.0.0.1" in words_of(sky["run"], tmp_path)


@pytest.mark.parametrize(
    ("launcher", "launch", "message"),
    [
        (kubernetes, {"container": None}, "launch.container is missing"),
        (kubernetes, {"mounts": {}}, "training.output_dir /data/run would be lost"),
        (kubernetes, {"mounts": {"data": "kept"}}, "write an absolute folder"),
        (kubernetes, {"mounts": {"/data": "/mnt"}}, "write an absolute folder"),
        (kubernetes, {"mounts": {"/data": "My Claim"}}, "write an absolute folder"),
        (kubernetes, {"mounts": {"/data": "a", "/data/": "b"}}, "/data/, where something else is"),
        (kubernetes, {"mounts": {"/etc/shardwise": "a"}}, "where something else is mounted"),
        (kubernetes, {"resources": {"cpu": True}}, "cpu: true; on Kubernetes give an amount"),
        (kubernetes, {"resources": {"gpus": 8}}, "'gpus', which no node of Kubernetes has"),
        (skypilot, {"container": None}, "the machines have no shardwise"),
        (skypilot, {"mounts": {"/data": "./here"}}, "would be lost with its node"),
        (skypilot, {"mounts": {"/data": "s3://b"}, "nodes": 2}, "a volume, which several nodes"),
    ],
)
def test_what_would_be_lost_or_cannot_start_is_refused(launcher, launch, message, tmp_path):
    with pytest.raises(UserError, match=message):
        launcher.script(config("/data/run", **launch), "run.yaml", [])


def test_a_folder_is_where_its_path_leads(tmp_path):
    with pytest.raises(UserError, match="/run would be lost with its node"):
        written(config("/data/../run"), tmp_path)


def test_mounts_are_paths():
    for mounts in ({"/a": "b,c:/etc"}, {"/a\nb": "c"}, {"/a:/b": "c"}):
        with pytest.raises(UserError, match=r"launch\.mounts has"):
            Launch(mounts=mounts)


def test_a_run_file_outside_of_what_is_copied_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not in the current folder"):
        skypilot.script(config(), "/elsewhere/run.yaml", [])


@pytest.mark.parametrize(("where", "command"), [("skypilot", "sky"), ("kubernetes", "kubectl")])
def test_the_file_lies_beside_the_run_file(where, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    options = ["--training.output_dir=/data/a", f"--launch={json.dumps(MOUNTED)}"]
    arguments = ["launch", "run.yaml", f"--on={where}", *options]
    file = tmp_path / f"run.{where}.yaml"
    capsys.readouterr()
    assert cli.main([*arguments, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not file.exists()
    assert cli.main(arguments) == 0
    assert file.read_text() == printed
    assert f"wrote run.{where}.yaml; to submit it: {command}" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    file.write_text("name: mine\n")
    assert cli.main(arguments) == 2
    assert "was not written by shardwise" in capsys.readouterr().err
    assert file.read_text() == "name: mine\n"


@pytest.mark.parametrize("launcher", [kubernetes, skypilot])
def test_a_launcher_that_only_writes_a_file_is_short(launcher):
    assert len(Path(launcher.__file__).read_text(encoding="utf-8").splitlines()) < 60
