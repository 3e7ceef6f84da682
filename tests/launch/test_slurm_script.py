"""The batch script that `shardwise launch --on slurm` writes. Real jobs: tests/clusters."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.commands import cli
from shardwise.config import Data, Launch, Model, RunConfig, Training, UserError
from shardwise.launch import slurm

HOSTILE = 'a b\'; touch "$HOME"/x `id` $(id) %j #'


def config(output_dir: str = "runs/first", **launch: Any) -> RunConfig:
    training = Training(output_dir=output_dir, micro_batch_size=1, global_batch_size=1, steps=1)
    return RunConfig(Model("m"), Data("d"), training, launch=Launch(**launch))


def test_a_script_asks_for_what_the_section_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/opt/python")
    cfg = config(
        nodes=2,
        processes=8,
        time="04:00:00",
        ahead_seconds=120,
        restarts=3,
        environment={"HF_HOME": "/data/hf"},
        before=["module load cuda"],
        slurm={"partition": "gpu", "gpus-per-node": 8, "exclusive": None, "spread-job": True},
    )
    overrides = ["--lora.r=4"]
    assert (
        slurm.script(cfg, "run.yaml", overrides)
        == f"""\
#!/bin/bash
# Written by shardwise. Start it with `sbatch`, or by the same command again.
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --chdir={tmp_path}
#SBATCH --output={tmp_path}/runs/first/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --spread-job

export HF_HOME=/data/hf
# srun takes no --cpus-per-task from sbatch (since Slurm 22.05), but this variable. It
# gives the processes all variables, whatever --export kept from this script.
export SLURM_EXPORT_ENV=ALL
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi
set -e
module load cuda
set +e

# Slurm sends it where somebody cancels the job, or where it queues the job again itself.
trap ended=1 TERM
# With one process dead, all end by SIGTERM: none could go on. srun ends with the highest
# code, at least 143; a rank whose run would end alike again adds 200 to its own.
rank='trap : USR1 TERM; "$@"; code=$?; case $code in 2|3) exit $((code + 200)) ;; \
138) exit 199 ;; esac; exit $code'
failures={tmp_path}/runs/first/"slurm-$SLURM_JOB_ID.failures"
srun --kill-on-bad-exit=1 bash -c "$rank" rank \
/opt/python -m shardwise train run.yaml --lora.r=4 --resume auto
code=$?
[ -z "${{ended:-}}" ] || exit "$code"
[ "$code" -lt 200 ] || exit $((code - 200))
[ "$code" -ne 0 ] || exit 0
if [ "$code" -ne 199 ]; then  # counted; without room to count, the job ends
  echo "exit code $code" >> "$failures" || exit "$code"
  [ "$(wc -l < "$failures")" -le 3 ] || exit "$code"
fi
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""
    )


def test_an_elastic_job_takes_the_nodes_that_there_are():
    text = slurm.script(config(nodes=4, min_nodes=2), "run.yaml", ["--launch.min_nodes=2"])
    assert "#SBATCH --signal=USR1@300\n" in text  # the partition has a limit, too
    assert "#SBATCH --nodes=2-4\n#SBATCH --exclusive\n" in text
    assert "#SBATCH --ntasks" not in text  # it would be that of two nodes, and bound them
    assert "\nsrun --ntasks-per-node=1 --kill-on-bad-exit=1 " in text
    assert "train run.yaml --launch.min_nodes=2 --resume auto" in text  # ranks fit their layout


def script_with(
    monkeypatch,
    tmp_path: Path,
    code: int,
    says: str = "",
    ends_with: int | None = None,
    **training: Any,
) -> list[str]:
    """Run a script whose ranks end with a code, the next start of a job; return what it called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / HOSTILE).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    ends = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": "exit 0",
        "python": f"exit {code}",
    }
    for name, end in ends.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name}" "$@" "--"\n{end}\n')
        program.chmod(0o755)
    cfg = config(f"runs/{HOSTILE}", environment={"A": HOSTILE}, slurm={"comment": HOSTILE})
    cfg = replace(cfg, training=replace(cfg.training, **training))
    file = tmp_path / "job"
    file.write_text(slurm.script(cfg, HOSTILE, [f"--data.train={HOSTILE}"]))
    done = subprocess.run(
        ["/bin/bash", str(file)],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == (ends_with or code)
    assert says in done.stderr if says else not done.stderr
    return done.stdout.split("\n")


@pytest.mark.parametrize(("code", "starts"), [(2, 0), (1, 10), (1, 9), (0, 0)])
def test_what_is_in_memory_is_removed_where_a_run_fails_for_good(
    code, starts, monkeypatch, tmp_path
):
    for _ in range(starts):
        script_with(monkeypatch, tmp_path, 1)
    called = script_with(monkeypatch, tmp_path, code, memory_checkpoint_every=1)
    fails = code == 2 or starts == 10
    assert any("memory_folder" in word for word in called) == fails
    assert ("requeue" in called) == (starts == 9)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 137, 138, 143])
def test_what_would_change_nothing_is_not_started_again(code, monkeypatch, tmp_path):
    called = script_with(monkeypatch, tmp_path, code, ends_with=199 if code == 138 else None)
    assert ("requeue" in called) == (code not in (0, 2, 3))


def test_failures_are_counted(monkeypatch, tmp_path):
    for _ in range(10):
        assert "requeue" in script_with(monkeypatch, tmp_path, 1)
    assert "requeue" not in script_with(monkeypatch, tmp_path, 1)


def test_a_job_reaches_its_limit_as_often_as_it_needs(monkeypatch, tmp_path):
    """What ends by SIGUSR1 has saved; so restarts are of failures alone."""
    for _ in range(12):
        assert "requeue" in script_with(monkeypatch, tmp_path, 138, ends_with=199)
    for _ in range(10):
        assert "requeue" in script_with(monkeypatch, tmp_path, 1)
        assert "requeue" in script_with(monkeypatch, tmp_path, 138, ends_with=199)
    assert "requeue" not in script_with(monkeypatch, tmp_path, 1)


def test_what_saves_nothing_at_its_limit_is_counted():
    launch = Launch(restarts=3)
    text = slurm.job(launch, Path("/runs"), ["-m", "shardwise", "bench"], ["nodes=1"], (2,))
    assert "138" not in text


def test_where_failures_cannot_be_counted_a_job_ends(monkeypatch, tmp_path):
    (tmp_path / "runs" / HOSTILE / "slurm-7.failures").mkdir(parents=True)
    assert "requeue" not in script_with(monkeypatch, tmp_path, 1, says="Is a directory")


def test_hostile_names_are_only_names(monkeypatch, tmp_path):
    called = script_with(monkeypatch, tmp_path, 0)
    assert called[:4] == ["srun", "--kill-on-bad-exit=1", "bash", "-c"]
    rank = called[called.index("python") :]
    assert rank[:6] == ["python", "-m", "shardwise", "train", HOSTILE, f"--data.train={HOSTILE}"]
    cfg = config(f"runs/{HOSTILE}", slurm={"comment": HOSTILE})
    options = re.findall("^#SBATCH (.*)$", slurm.script(cfg, "r", []), re.MULTILINE)
    (comment,) = (shlex.split(option) for option in options if "comment" in option)
    assert comment == [f"--comment={HOSTILE}"]
    (output,) = (shlex.split(option) for option in options if option.startswith("--output"))
    assert output == [f"--output={Path.cwd()}/runs/{HOSTILE.replace('%', '%%')}/slurm-%j.log"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("time", "tomorrow", "launch.time is 'tomorrow'; give it as 04:00:00"),
        *[("time", time, "which is at once") for time in ("5", "5:00", "00:05:00", "0-00:05")],
        ("environment", {"A B": "c"}, "which is no name of a variable"),
        ("slurm", {"--partition": "a"}, "which is no option of it"),
        ("slurm", {"comment": "a\n#SBATCH --uid=0"}, "which is no option of it"),
        ("slurm", {"nodes": 3}, "which launch itself sets"),
        ("slurm", {"test-only": None}, "which launch itself sets"),
        ("slurm", {"exclusive": False}, "exclusive: false; leave out an option"),
        ("nodes", 0, "launch.nodes is 0; give at least 1"),
    ],
)
def test_what_is_no_option_is_refused(key, value, message):
    with pytest.raises(UserError, match=message):
        Launch(**{key: value})


def test_a_limit_that_leaves_time_to_train_is_kept():
    for time in ("0", "6", "5:01", "00:05:01", "1-0", "0-1", "0-00:06", "0-00:05:01"):
        assert Launch(time=time).time == time


def test_a_script_is_written_into_no_other_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm.shutil, "which", str)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (slurm.SCRIPT, "slurm-7.log"):
        folder = tmp_path / f"of {name}"
        folder.mkdir()
        (folder / name).symlink_to(precious)
        with pytest.raises(UserError, match="is a link to"):
            slurm.submit("#!/bin/bash", folder)
    assert precious.read_text() == "mine"
    with pytest.raises(UserError, match="cannot write it"):
        slurm.submit("#!/bin/bash", precious / "runs")
    with pytest.raises(UserError, match="has a line break"):
        slurm.script(config("runs/a\nid"), "run.yaml", [])


def test_a_job_without_a_number_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho later\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="gave no number of a job: 'later'"):
        slurm.submit("#!/bin/bash", tmp_path / "run")


def test_what_ranks_would_refuse_is_refused_before_a_job_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    for launcher in ("local", "slurm", "torchrun", "ray"):
        command = ["launch", "run.yaml", "--on", launcher, "--dry-run", "--launch.processes=2"]
        assert cli.main([*command, "--parallel.tp=3"]) == 2
        assert "parallel.tp is 3" in capsys.readouterr().err


def test_keys_that_a_launcher_does_not_use_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    capsys.readouterr()
    keys = ["--launch.before=[module load cuda]", "--launch.container=a.sif"]
    keys += ["--training.device=cpu"]
    for launcher in ("local", "torchrun"):
        assert cli.main(["launch", "run.yaml", "--on", launcher, "--dry-run", *keys]) == 0
        expected = f"note: --on {launcher} does not use launch.before, launch.container\n"
        assert expected in capsys.readouterr().err
    assert cli.main(["launch", "run.yaml", "--on=slurm", "--dry-run", *keys]) == 0
    assert "does not use" not in capsys.readouterr().err


def test_dry_runs_print_and_start_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    files = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert (
        cli.main(["launch", "run.yaml", "--dry-run", "--launch.processes=2", "--parallel.tp=2"])
        == 0
    )
    expected = "shardwise train run.yaml --nproc 2 --launch.processes=2 --parallel.tp=2"
    assert capsys.readouterr().out == f"{expected} --launch.restarts=10 --resume auto\n"
    assert cli.main(["launch", "run.yaml", "--on", "slurm", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert sorted(tmp_path.rglob("*")) == files


def test_more_nodes_than_this_machine_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    assert cli.main(["launch", "run.yaml", "--launch.nodes=2"]) == 2
    assert "give --on slurm or torchrun, or set it to 1" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["launch", "run.yaml", "--on=slurm"]) == 2
    assert "no command sbatch here" in capsys.readouterr().err
