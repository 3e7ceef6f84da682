"""A real shell completes commands, options, and the keys of the run file with their words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import PATIENCE

ASK = """
eval "$(shardwise completion bash)"
ask() {
  COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9 COMPREPLY=()
  _python_argcomplete shardwise "" ""
  echo "${COMPREPLY[@]}"
}
"""


def answers(folder: Path, *lines: str) -> list[str]:
    """What bash suggests for each line, with the cursor at its end."""
    script = ASK + "".join(f"ask '{line}'\n" for line in lines)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


def test_bash_completes_commands_options_and_keys(tmp_path):
    (tmp_path / "mine.yaml").touch()
    command, option, file, key, word, switch, by_epoch = answers(
        tmp_path,
        "shardwise expo",
        "shardwise report --comp",
        "shardwise train mi",
        "shardwise train mine.yaml --training.sav",
        "shardwise train mine.yaml --parallel.data=fs",
        "shardwise split mine.yaml --lora.rslora=",
        "shardwise train mine.yaml --training.eval_every=",
    )
    assert (command, option, file) == ("export", "--compare", "mine.yaml")
    assert key == "--training.save_every="
    assert word == "fsdp1 fsdp2"
    assert switch == "true false"
    assert by_epoch == "epoch"
