"""Rounds, endings and continued benches, with a stand-in for `shardwise train`.

One test has real runs.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.base.records.cell import CellRecord
from shardwise.config import UserError
from shardwise.lab.benchmark.runner import bench
from tests.benchmark.sweeps import STRATEGIES, ends, sweep_file
from tests.distributed import PATIENCE
from tests.integration.conftest import make_corpus
from tests.parity.harness import CONFIGS

FAKE = (sys.executable, str(Path(__file__).with_name("fake_train.py")))
COMMAND = (  # `shardwise bench`, but with FAKE for its runs
    "import functools, sys; from shardwise.lab.benchmark import runner; "
    "from shardwise.commands.cli import main; "
    f"runner.bench = functools.partial(runner.bench, train={FAKE!r}); "
    "sys.exit(main(['bench', *sys.argv[1:]]))"
)


def rows(records: list[CellRecord]) -> dict[str, CellRecord]:
    return {record.cell["id"]: record for record in records}


def start(path: Path, out: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`shardwise bench` with FAKE, in a process of its own."""
    command = [sys.executable, "-c", COMMAND, str(path), "--out", str(out), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> str:
    """Wait until `process` has written a file, and return its content."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or not path.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return path.read_text()


def assert_gone(pids: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(
        psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie"
        for pid in pids.split()
    ):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def test_rounds_are_interleaved(tmp_path):
    records = rows(bench(sweep_file(tmp_path), tmp_path / "out", train=FAKE))
    assert list(records) == ["single", "ddp", "control-single"]
    begun = sorted(
        (entry["started"], name) for name, record in records.items() for entry in record.rounds
    )
    assert [name for _, name in begun] == [
        "single",
        "control-single",
        "ddp",
        "single",
        "ddp",
        "single",
        "ddp",
    ]
    ddp = records["ddp"]
    # The stand-in's rates are 100, 200 and 300 in rounds 1, 2 and 3.
    assert (ddp.status, ddp.tokens_per_second, ddp.spread["tokens_per_second"]) == (
        "ok",
        200.0,
        [100.0, 300.0],
    )
    assert CellRecord.read(tmp_path / "out" / "ddp" / "record.json") == ddp
    assert ddp.command[:3] == ["shardwise", "train", str(tmp_path / "out" / "ddp" / "run.yaml")]
    assert ddp.command[-1] == "--nproc=2"
    assert records["single"].command[-1].startswith("--training.output_dir=")
    assert (tmp_path / "out" / "ddp" / "round-3" / "log.txt").read_text() == "starting\n"


def test_a_reference_and_its_control_run_before_what_is_checked_against_them(tmp_path):
    axes = {"strategy": STRATEGIES, "data.sequence_length": [32, 16]}
    path = sweep_file(tmp_path, axes=axes, reference={"strategy": "ddp"}, rounds=1)
    records = bench(path, tmp_path / "out", train=FAKE)
    begun = sorted((record.rounds[0]["started"], record.cell["id"]) for record in records)
    assert [name for _, name in begun] == [
        "ddp-32",
        "control-ddp-32",
        "ddp-16",
        "control-ddp-16",
        "single-32",
        "single-16",
    ]


def test_every_ending_is_a_row(tmp_path):
    names = ("ok", "exit 1", "exit 2", "exit 3", "kill", "late", "sleep", "later")
    path = sweep_file(tmp_path, axes=ends(*names), timeout_seconds=10, rounds=2)
    records = rows(bench(path, tmp_path / "out", train=FAKE, only=["[!c]*"]))  # not the control
    expected = {  # status, what the reason contains, and the last line of the log
        "exit_1": ("failed", "exit code 1", "error: exit 1"),
        "exit_2": ("unsupported", "exit code 2", "error: exit 2"),
        "exit_3": ("oom", "exit code 3", "error: exit 3"),
        "kill": ("failed", "SIGKILL", "starting"),
        "late": ("failed", "exit code 1", "starting"),
        "sleep": ("timeout", "10 seconds", "starting"),
    }
    for name, (status, fragment, last_line) in expected.items():
        assert records[name].status == status
        assert fragment in records[name].reason
        assert records[name].reason.endswith(last_line)
    for name in ("ok", "later"):
        assert (records[name].status, records[name].reason) == ("ok", "")
    # A cell whose first round failed does not run again. A later failure leaves a note.
    rounds = {name: len(record.rounds) for name, record in records.items()}
    assert rounds == dict.fromkeys(records, 1) | {"ok": 2, "later": 2}
    assert "Round 2" in records["later"].notes[0]
    assert "exit code 1" in records["later"].notes[0]
    assert_gone((tmp_path / "out" / "sleep" / "round-1" / "pids").read_text())
    assert (
        json.loads((tmp_path / "out" / "sleep" / "record.json").read_text())["status"] == "timeout"
    )


@pytest.mark.parametrize(
    ("number", "rerun"),
    [
        (signal.SIGKILL, []),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, ["--rerun", "ok"], marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_bench_leaves_no_process_and_continues(number, rerun, tmp_path):
    path, out = (
        sweep_file(tmp_path, axes=ends("ok", "sleep once", "exit 1"), rounds=2),
        tmp_path / "out",
    )
    process = start(path, out, "--only", "[!c]*", *rerun)
    pids = wait_for(out / "sleep_once" / "round-1" / "pids", process)
    assert all(psutil.pid_exists(int(pid)) for pid in pids.split())
    process.send_signal(number)
    errors = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert number.name in errors
        assert ("without --rerun" in errors) == bool(rerun)
        assert errors.count("\n") == 1
    assert_gone(pids)
    assert not (out / "sleep_once" / "record.json").exists()
    finished = out / "ok" / "round-1" / "record.json"
    before = finished.stat().st_mtime_ns
    process = start(path, out, "--only", "[!c]*")
    printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    assert finished.stat().st_mtime_ns == before
    records = {
        name: CellRecord.read(out / name / "record.json") for name in ("ok", "sleep_once", "exit_1")
    }
    assert [len(record.rounds) for record in records.values()] == [2, 2, 1]
    assert "run 2 of 6: sleep_once, round 1: ok, 100 tokens/s" in printed
    assert re.search(r"^ok +ok +2 +150 \[100-200\] +1\.0$", printed, re.M)
    assert printed.endswith(f"shardwise report {out}\n")


def test_a_finished_bench_runs_nothing(tmp_path):
    path, out = sweep_file(tmp_path, rounds=1), tmp_path / "out"
    first = bench(path, out, train=FAKE)
    assert bench(path, out, train=("false",)) == first
    # More rounds of the same sweep are more of the same.
    more = rows(bench(sweep_file(tmp_path, rounds=2), out, train=FAKE))
    assert [len(record.rounds) for record in more.values()] == [2, 2, 1]


def test_only_and_rerun_select(tmp_path):
    path, out = (
        sweep_file(tmp_path, axes=ends("ok", "exit 1", "exit 3"), rounds=1),
        tmp_path / "out",
    )
    assert list(rows(bench(path, out, train=FAKE, only=["ok", "exit_*3"]))) == ["ok", "exit_3"]
    kept = (out / "ok" / "round-1" / "record.json").stat().st_mtime_ns
    again = rows(bench(path, out, train=("sh", "-c", "exit 2"), rerun=["exit_3"]))
    assert {name: record.status for name, record in again.items()} == {
        "ok": "ok",
        "exit_1": "unsupported",
        "exit_3": "unsupported",
        "control-ok": "unsupported",
    }
    assert (out / "ok" / "round-1" / "record.json").stat().st_mtime_ns == kept
    for wrong in ({"only": ["none*"]}, {"only": ["ok"], "rerun": ["exit_1"]}):
        with pytest.raises(UserError, match=r"--(only|rerun) .* matches no cell of ok"):
            bench(path, out, train=FAKE, **wrong)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"set": {"training.steps": 5}}, "cells.single.run.training.steps"),
        ({"axes": {"strategy": {"ddp": STRATEGIES["ddp"]}}}, "axes.strategy"),
        ({"axes": {"layout": STRATEGIES}}, "axes.strategy"),
        (
            {"nproc": 2, "axes": {"strategy": STRATEGIES, "data.packing": ["none"]}},
            "axes.data.packing",
        ),
        ({"reference": {"strategy": "ddp"}}, "cells.single.reference"),
    ],
)
def test_another_sweep_is_refused(changed, key, tmp_path):
    out = tmp_path / "out"
    bench(sweep_file(tmp_path), out, train=FAKE, only=["single"])
    with pytest.raises(UserError, match=re.escape(f"--out {out} holds another sweep: {key} is ")):
        bench(sweep_file(tmp_path, **changed), out, train=FAKE)


def test_fields_that_another_version_derives_may_differ(tmp_path):
    path, out = sweep_file(tmp_path, rounds=1), tmp_path / "out"
    made = bench(path, out, train=FAKE)
    new = {
        file: json.loads(file.read_text())
        for file in (out / "sweep.json", *out.glob("*/record.json"))
    }
    assert len(new) == 4
    for file, content in new.items():
        for plan in content.get("cells", [content.get("cell")]):
            assert plan.pop("baseline", "") in (None, "single")
        file.write_text(json.dumps(content | ({"equal": {}} if "equal" in content else {})))
    assert bench(path, out, train=("false",)) == made
    assert json.loads((out / "sweep.json").read_text())["equal"]["all cells"]
    for name, baseline in (("single", None), ("ddp", "single")):
        assert CellRecord.read(out / name / "record.json").cell["baseline"] == baseline


def measured_memory(out: Path) -> list[str]:
    """The cells and rounds that have measured memory."""
    records = {
        file.parent: json.loads(file.read_text()) for file in out.glob("*/round-*/record.json")
    }
    return sorted(
        f"{path.parent.name} {path.name[-1]}"
        for path, record in records.items()
        if record["peak_memory_bytes"]
    )


def test_memory_is_measured_in_the_first_round_alone(tmp_path):
    path, out = sweep_file(tmp_path), tmp_path / "out"
    records = rows(bench(path, out, train=FAKE))
    assert measured_memory(out) == ["control-single 1", "ddp 1", "single 1"]
    assert {record.peak_memory_bytes[0] for record in records.values()} == {2**20}
    assert not any(
        word == "--measure.memory=false" for record in records.values() for word in record.command
    )
    bench(path, out, train=FAKE, rerun=["ddp"])
    assert measured_memory(out) == ["control-single 1", "ddp 1", "single 1"]
    (out / "single" / "round-1" / "record.json").write_text("{")
    assert rows(bench(path, out, train=FAKE))["single"].peak_memory_bytes == [2**20]
    assert measured_memory(out) == ["control-single 1", "ddp 1", "single 1"]
    bench(
        sweep_file(tmp_path, rounds=2, memory_rounds=2), tmp_path / "two", train=FAKE, only=["ddp"]
    )
    assert measured_memory(tmp_path / "two") == ["ddp 1", "ddp 2"]


def test_a_damaged_round_is_run_again(tmp_path, capsys):
    path, out = sweep_file(tmp_path), tmp_path / "out"
    bench(path, out, train=FAKE)
    damaged = out / "ddp" / "round-2" / "record.json"
    kept = {file: file.stat().st_mtime_ns for file in out.glob("*/round-*/record.json")}
    for content in ("{", "[]", '{"schema_version": 1, "status": "ok", "config": {}, "new": 1}'):
        damaged.write_text(content)
        records = rows(bench(path, out, train=FAKE))
        printed = capsys.readouterr().out
        assert str(damaged) in printed
        assert "from round 2 on" in printed
        # 3 rounds of two cells and one of a control are 7 runs
        assert "run 7 of 7: ddp, round 3: ok" in printed
        assert len(records["ddp"].rounds) == len(records["single"].rounds) == 3
    again = {file for file, before in kept.items() if file.stat().st_mtime_ns != before}
    assert again == {damaged, out / "ddp" / "round-3" / "record.json"}


def test_rounds_of_another_version_are_one_line(tmp_path):
    path, out = sweep_file(tmp_path, rounds=1), tmp_path / "out"
    bench(path, out, train=FAKE)
    file = out / "ddp" / "record.json"
    content = json.loads(file.read_text())
    content["rounds"][0]["new"] = 1
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"ddp/record.json: .* --rerun ddp$"):
        bench(path, out, train=FAKE)
    assert rows(bench(path, out, train=FAKE, rerun=["ddp"]))["ddp"].status == "ok"


def test_fewer_rounds_keep_what_there_is(tmp_path):
    out = tmp_path / "out"
    bench(sweep_file(tmp_path, rounds=2), out, train=FAKE)
    records = rows(bench(sweep_file(tmp_path, rounds=1), out, train=("false",)))
    assert json.loads((out / "sweep.json").read_text())["rounds"] == 1  # of the last call
    assert [len(record.rounds) for record in records.values()] == [2, 2, 1]


def test_cells_that_will_be_unchecked_are_printed_before_the_start(tmp_path, capsys):
    path, out = sweep_file(tmp_path, rounds=1), tmp_path / "out"
    bench(path, out, train=FAKE, only=["ddp"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("--only leaves out")
    assert "single and control-single" in first
    for only in (["single", "control-*"], ["ddp"], []):  # each reference has run by now
        bench(path, out, train=FAKE, only=only)
        printed = capsys.readouterr().out
        assert not {"leaves", "Unchecked,"} & set(printed.split())


def test_a_folder_of_something_else_is_refused(tmp_path):
    path, out = sweep_file(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="other than a bench"):
        bench(path, out, train=FAKE)
    assert [entry.name for entry in out.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="cannot make or open the folder"):
        bench(path, path, train=FAKE)
    (out / "thesis.tex").rename(out / "sweep.json")
    with pytest.raises(UserError, match="damaged bench"):
        bench(path, out, train=FAKE)


def test_one_bench_at_a_time(tmp_path):
    path, out = sweep_file(tmp_path, axes=ends("sleep")), tmp_path / "out"
    process = start(path, out)
    pids = wait_for(out / "sleep" / "round-1" / "pids", process)
    with pytest.raises(UserError, match="another bench is running in it"):
        bench(path, out, train=FAKE)
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert_gone(pids)


def test_a_refused_combination_has_its_row(tmp_path):
    keep = {"nproc": 2, "parallel.data": "ddp", "parallel.reshard_after_forward": False}
    path = sweep_file(tmp_path, axes={"strategy": {**STRATEGIES, "keep": keep}}, rounds=1)
    row = rows(bench(path, tmp_path / "out", train=FAKE))["keep"]
    assert (row.status, row.rounds) == ("unsupported", [])
    assert "parallel.reshard_after_forward" in row.reason
    assert CellRecord.read(tmp_path / "out" / "keep" / "record.json") == row


def test_weights_are_not_kept(tmp_path):
    script = f'mkdir -p $OUT/model $OUT/checkpoints/step-1 $OUT/adapter; exec {" ".join(FAKE)} "$@"'
    out = tmp_path / "out"
    environment = f"OUT={out}/single/round-1"
    bench(
        sweep_file(tmp_path, rounds=1),
        out,
        train=("env", environment, "sh", "-c", script, "sh"),
        only=["single"],
    )
    left = {path.name for path in (out / "single" / "round-1").iterdir()}
    assert left == {"adapter", "log.txt", "record.json"}


def test_a_bench_without_a_good_cell_ends_with_1(tmp_path):
    process = start(sweep_file(tmp_path, axes=ends("exit 1")), tmp_path / "out")
    printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert re.search(r"^exit_1 +failed +1 .* error: exit 1$", printed, re.M)


def test_every_run_has_a_line(tmp_path, capsys):
    bench(sweep_file(tmp_path, rounds=1), tmp_path / "out", train=FAKE)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["run 1 of 3", "run 2 of 3", "run 3 of 3"]
    assert [line.split(": ")[1] for line in lines][2] == "ddp, round 1"
    assert lines[-1].endswith("0 s left")


def real(folder: Path, steps: int) -> dict[str, Any]:
    """Return a base run that can be trained."""
    make_corpus(folder)
    return {
        "model": {
            "path": str(CONFIGS / "tiny-llama"),
            "init": "random",
            "tokenizer": str(folder / "tokenizer"),
        },
        "lora": {"r": 4},
        "data": {"train": str(folder / "corpus.jsonl"), "sequence_length": 32},
        "training": {
            "steps": steps,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "device": "cpu",
        },
        "measure": {"warmup_steps": 2, "memory": False},
    }


TENSOR = {
    "nproc": 2,
    "parallel.data": "single",
    "parallel.tp": 2,
    "parallel.sequence_parallel": True,
}


def test_real_runs_killed_refused_and_out_of_memory(tmp_path):
    """A bench of two processes, as a user starts it, is killed during a run and started again."""
    base = real(tmp_path, 12)
    strategies = {"single": STRATEGIES["single"], "tp": TENSOR}
    wide = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text()) | {
        "intermediate_size": 2**23
    }
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(wide))  # 6 GB in each layer
    models = {"small": {}, "wide": {"model.path": str(tmp_path / "wide")}}
    axes = {"strategy": strategies, "model": models, "training.micro_batch_size": [2, 3]}
    path, out = sweep_file(tmp_path, base=base, axes=axes, rounds=1), tmp_path / "out"
    names = ("tp-small-2", "single-small-2", "single-small-3", "single-wide-2")
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "bench",
        str(path),
        "--out",
        str(out),
        "--only",
        *names,
    ]
    limit = 3 * 2**30  # more than the libraries map, less than a layer

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    process = begin()
    wait_for(out / names[0] / "round-1" / "metrics.jsonl", process)
    pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    assert len(pids) >= 3  # the launcher and its two ranks
    process.communicate(timeout=PATIENCE)
    assert_gone(" ".join(map(str, pids)))
    assert not (out / names[0] / "record.json").exists()

    process = begin()
    printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, ""), printed
    good, alone, refused, full = (CellRecord.read(out / name / "record.json") for name in names)
    assert (good.status, alone.status) == ("ok", "ok")
    assert len(good.losses) == 12
    # Rounding grows from step to step.
    assert good.losses[:4] == pytest.approx(alone.losses[:4], rel=1e-5)
    assert good.tokens_per_second == good.spread["tokens_per_second"][0] > 0
    assert good.environment["OMP_NUM_THREADS"] == "1"
    assert (refused.status, full.status) == ("unsupported", "oom")
    assert "global_batch_size 8" in refused.reason
    assert "out of memory" in full.reason
