"""A signal that comes while the command imports: what several processes end with, and record."""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from shardwise.base.records.record import RunRecord
from shardwise.commands.library import LOOP
from shardwise.launch import local
from tests.command import Forked
from tests.distributed import PATIENCE
from tests.launch.test_local import config

UNTIMELY = (
    "SIGUSR1 asks to save, and the run has not begun to train; is the time limit longer than "
    "launch.ahead_seconds and the start of the run?"
)
ENDS = [
    (signal.SIGINT, 130, "interrupted by a signal"),
    (signal.SIGTERM, 143, "interrupted by a signal"),
    (signal.SIGUSR1, 1, UNTIMELY),
]
COMMAND = """
import os, sys
from importlib.abc import MetaPathFinder
class Signals(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(sys.argv[2]))
sys.meta_path.insert(0, Signals())
from shardwise.commands.cli import main
sys.exit(main(["train", sys.argv[3], "--nproc", "2", "--parallel.data=ddp"]))
"""


@pytest.mark.parametrize(
    ("module", "number", "code", "reason"),
    [
        pytest.param("torch.nn", *ENDS[0], marks=pytest.mark.slow),
        ("torch.nn", *ENDS[1]),
        pytest.param("torch._tensor", *ENDS[2], marks=pytest.mark.slow),
        pytest.param("transformers", *ENDS[1], marks=pytest.mark.slow),
    ],
)
def test_a_signal_within_import_torch_ends_the_command_as_it_says(
    module, number, code, reason, tmp_path
):
    """To import torch again after an exception within it kills the process."""
    (tmp_path / "start.py").write_text(COMMAND)
    run_file, out = tmp_path / "run.yaml", tmp_path / "out"
    run_file.write_text(
        f"model: {{path: {tmp_path}/none}}\ndata: {{train: none.jsonl}}\n"
        f"training: {{output_dir: {out}, steps: 1, device: cpu}}\n"
    )
    ended = subprocess.run(
        [sys.executable, tmp_path / "start.py", module, str(int(number)), run_file],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "Traceback" not in ended.stderr
    assert (ended.returncode, RunRecord.read(out / "record.json").reason) == (code, reason)


@pytest.mark.parametrize(("number", "code", "reason"), ENDS)
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_before_the_ranks_is_acted_on_before_they_start(
    late, number, code, reason, tmp_path, monkeypatch
):
    """While modules are imported, and while the run is checked."""

    def interrupted(train):
        if not late:
            os.kill(os.getpid(), number)
            (tmp_path / "imported").touch()  # the import goes on to its end
        return train

    def described(cfg, nproc):
        os.kill(os.getpid(), number)
        (tmp_path / "imported").touch()

    monkeypatch.setattr(local, "import_all", interrupted)
    monkeypatch.setattr("shardwise.assembly.describe.describe", described)
    process = Forked(partial(local.launch, config(tmp_path), 2, LOOP), {"TMPDIR": str(tmp_path)})
    _, printed = process.communicate()
    assert (process.returncode, (tmp_path / "imported").exists()) == (code, True)
    assert printed == (f"error: {UNTIMELY}\n" if code == 1 else "")
    assert RunRecord.read(tmp_path / "record.json").reason == reason
    assert not list(tmp_path.glob("shardwise-*"))  # no rank had a folder


def test_a_second_signal_ends_the_imports_at_once(tmp_path, monkeypatch):
    def interrupted(train):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the imports went on")

    monkeypatch.setattr(local, "import_all", interrupted)
    process = Forked(partial(local.launch, config(tmp_path), 2, LOOP), {"TMPDIR": str(tmp_path)})
    assert (*process.communicate(), process.returncode) == ("", "", 143)


def test_an_ending_imports_no_torch(tmp_path):
    """Whose import may be what has failed, or was broken off."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from shardwise.config import *\n"
        "from shardwise.launch.rank import record\n"
        "from shardwise.base.process.ending import explain\n"
        f"cfg = RunConfig(Model('m'), Data('d'), training=Training({str(tmp_path)!r}))\n"
        "for error in (KeyboardInterrupt(), MemoryError(), ImportError('no torch')):\n"
        "    record(cfg, explain(error)); print(explain(error).exit_code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout.split(), ended.stderr) == (["130", "3", "1"], "")
    assert RunRecord.read(tmp_path / "record.json").reason == "interrupted by a signal"
