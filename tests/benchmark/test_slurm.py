"""Cells as jobs of their own, with stand-ins for Slurm and `shardwise train`. Real jobs:
tests/clusters.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from shardwise.commands import cli
from shardwise.config import UserError
from shardwise.lab.benchmark import slurm
from shardwise.lab.benchmark.cells import ALONE
from shardwise.lab.benchmark.folder import locked
from shardwise.lab.benchmark.runner import run_cell
from shardwise.lab.report.folder import read_bench
from shardwise.lab.report.summary import caveats
from shardwise.lab.report.tables import make_rows
from tests.benchmark.sweeps import BASE, STRATEGIES, ends, sweep_file
from tests.benchmark.test_runner import FAKE

IDS = ["single", "ddp", "control-single"]
SBATCH = """#!/bin/bash
cp "${@: -1}" submitted
echo 17
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch) -> Path:
    """A program that keeps the script that it gets; the path of the script."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "submitted"


def test_a_script_has_a_job_for_each_cell(sbatch, tmp_path, capsys):
    base = {**BASE, "launch": {"time": "01:00:00", "slurm": {"partition": "gpu"}}}
    path = sweep_file(tmp_path, base=base)
    arguments = ["bench", str(path), "--out", "out", "--on=slurm"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not Path("out").exists()
    for option in ("array=0-2", "nodes=1", "ntasks=1", "exclusive", "partition=gpu", "requeue"):
        assert f"#SBATCH --{option}\n" in text
    assert f"#SBATCH --output={tmp_path}/out/slurm-%A_%a.log\n" in text
    assert "#SBATCH --signal=USR1@300\n" in text
    assert "words=(single ddp control-single)\n" in text
    assert '--on=slurm --cell "${words[SLURM_ARRAY_TASK_ID]}"\n' in text
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\n' in text
    assert cli.main(arguments) == 0
    assert sbatch.read_text() == text
    assert "submitted job 17: 3 cells" in capsys.readouterr().out
    # Another limit is no other sweep.
    sweep_file(tmp_path, base={**base, "launch": {"time": "02:00:00"}})
    assert cli.main([*arguments, "--only=ddp"]) == 0
    assert "words=(ddp)\n" in sbatch.read_text()
    assert "#SBATCH --time=02:00:00\n" in sbatch.read_text()


def test_cells_run_where_they_are_and_say_so(sbatch, tmp_path, capsys):
    path = sweep_file(tmp_path, rounds=2)
    assert slurm.run(str(path), "out", [], []) == 0
    environ = {"SLURM_ARRAY_JOB_ID": "17", "SLURMD_NODENAME": "n1"}
    for number, name in enumerate(IDS):
        job = slurm.name_of_job({**environ, "SLURM_ARRAY_TASK_ID": str(number)})
        record = run_cell("out", name, job, train=FAKE)
        assert record.status == "ok"
        assert {entry["job"] for entry in record.rounds} == {f"Slurm job 17_{number} on n1"}
        assert ALONE in record.notes
    bench = read_bench("out")
    assert [len(bench.records[name].rounds) for name in IDS] == [2, 2, 1]
    lines = caveats(make_rows(bench))
    assert ALONE in lines
    assert any("not interleaved" in line for line in lines)

    # The same again: nothing is left. Another round is; it is another job's.
    sbatch.unlink()
    capsys.readouterr()
    assert slurm.run(str(path), "out", [], []) == 0
    assert "nothing is left to run" in capsys.readouterr().out
    assert not sbatch.exists()
    assert slurm.run(str(sweep_file(tmp_path, rounds=3)), "out", [], []) == 0
    assert "words=(single ddp)\n" in sbatch.read_text()
    record = run_cell("out", "ddp", "Slurm job 18_1 on n2", train=FAKE)
    assert len(record.rounds) == 3
    assert any("several jobs: Slurm job 17_1 on n1; Slurm job 18_1" in n for n in record.notes)


def test_a_cell_that_fails_or_is_refused_gets_no_second_job(sbatch, tmp_path):
    path = sweep_file(tmp_path, axes={**ends("ok", "exit 1"), "strategy": STRATEGIES})
    data = ["--out", "out", "--on=slurm", "--only", "exit_1-*"]
    assert cli.main(["bench", str(path), *data]) == 0
    assert run_cell("out", "exit_1-ddp", "job", train=FAKE).status == "failed"
    assert cli.main(["bench", str(path), *data]) == 0
    assert "words=(exit_1-single)\n" in sbatch.read_text()


def test_jobs_share_a_folder_but_no_cell(sbatch, tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.lab.benchmark.runner.WAIT_SECONDS", 0.2)
    path = sweep_file(tmp_path)
    assert slurm.run(str(path), "out", [], []) == 0
    out = Path("out")
    with locked(out, shared=True), locked(out / "ddp"):
        assert run_cell(out, "single", "job", train=FAKE).status == "ok"
        with pytest.raises(UserError, match="another bench is running in it"):
            run_cell(out, "ddp", "job", train=FAKE)
        with pytest.raises(UserError, match="another bench is running in it"):
            slurm.run(str(path), "out", [], [])
    monkeypatch.setattr("shardwise.lab.benchmark.runner.WAIT_SECONDS", 60)
    with locked(out / "ddp"):  # one that was killed, and is ending
        ending = threading.Event()
        results: list[str] = []

        def wait() -> None:
            ending.set()
            results.append(run_cell(out, "ddp", "job", train=FAKE).status)

        waiting = threading.Thread(target=wait)
        waiting.start()
        ending.wait()
    waiting.join()
    assert results == ["ok"]


@pytest.mark.parametrize("name", ["../out/ddp", "nobody", ""])
def test_a_job_of_no_cell_is_refused(name, sbatch, tmp_path):
    assert slurm.run(str(sweep_file(tmp_path)), "out", [], []) == 0
    with pytest.raises(UserError, match="was not prepared for it"):
        run_cell("out", name, "job", train=FAKE)


def test_what_cells_cannot_have_each_for_itself_is_refused(sbatch, tmp_path):
    axes = {"launch.restarts": [1, 2]}
    with pytest.raises(UserError, match="the keys of launch differ between cells"):
        slurm.script(str(sweep_file(tmp_path, axes=axes)), "out", [], [])
    axes = {"strategy": {"ddp": STRATEGIES["ddp"], "odd": {"nproc": 3, "parallel.data": "ddp"}}}
    path = str(sweep_file(tmp_path, axes=axes))
    with pytest.raises(UserError, match="none of the selected cells can run"):
        slurm.script(path, "out", ["odd"], [])
    assert cli.main(["bench", path, "--out=out", "--on=slurm", "--cell=ddp"]) == 2


def test_a_script_that_slurm_refuses_leaves_a_folder_to_go_on_with(sbatch, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "sbatch"
    program.write_text("#!/bin/bash\necho no such partition >&2; exit 1\n")
    path = sweep_file(tmp_path)
    with pytest.raises(UserError, match="no such partition; change"):
        slurm.run(str(path), "out", [], [])
    program.write_text(SBATCH)
    assert slurm.run(str(path), "out", [], []) == 0
    assert subprocess.run(["/bin/bash", "-n", str(sbatch)], check=False).returncode == 0
