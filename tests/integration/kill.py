"""Kill a random rank of a run at a random moment, and see the run go on to the same end.

`python -m tests.integration.kill --times 20` repeats it and writes results/kill.json; a test does it twice in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardwise.config import RunConfig
from shardwise.metrics.hardware import environment
from shardwise.metrics.record import RunRecord

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY, NPROC = 40, 8, 2


def run_file(folder: Path, cfg: RunConfig) -> Path:
    """The run as a file, as a user would have it."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(cfg.to_dict()))))
    return path


def start(path: Path, output_dir: Path, *overrides: str, nproc: int = NPROC) -> subprocess.Popen[str]:
    """`shardwise train` in a process of its own."""
    command = [sys.executable, "-m", "shardwise", "train", str(path), f"--training.output_dir={output_dir}", *overrides]
    return subprocess.Popen(
        [*command, *(["--nproc", str(nproc)] if nproc > 1 else [])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_done(output_dir: Path) -> int:
    """The last step that `metrics.jsonl` tells of."""
    try:
        *lines, _ = (output_dir / "metrics.jsonl").read_text().split("\n")  # the last one may be half written
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if '"loss"' in line), default=0)


def wait_for_step(process: subprocess.Popen[str], output_dir: Path, step: int, seconds: float = 180) -> None:
    """Until `step` is done; fails where the run ends before it."""
    deadline = time.monotonic() + seconds
    while steps_done(output_dir) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} was not reached in {seconds} s"
        time.sleep(0.01)


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks, which `process` has spawned (as it has multiprocessing's helpers)."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def run_killed(path: Path, output_dir: Path, *kills: tuple[int, float, int]) -> tuple[int, str]:
    """Exit code and stderr of a run that starts again after each kill: (step to wait for, seconds more, rank)."""
    process = start(path, output_dir, f"--training.max_restarts={len(kills)}")
    for step, delay, victim in kills:
        wait_for_step(process, output_dir, step)
        time.sleep(delay)
        ranks(process)[victim].send_signal(signal.SIGKILL)
    told = process.communicate(timeout=300)[1].strip()
    return process.returncode, told


def kill_once(path: Path, output_dir: Path, reference: RunRecord, seed: int) -> dict[str, Any]:
    """One run with one rank killed; what was done, and `joined`: the losses of all steps equal the reference's."""
    draw = random.Random(seed)
    step, delay, victim = draw.randrange(1, STEPS - 8), draw.random() * 0.2, draw.randrange(NPROC)
    begin = time.monotonic()
    exit_code, told = run_killed(path, output_dir, (step, delay, victim))
    record = RunRecord.read(output_dir / "record.json")
    return {
        "seed": seed,
        "killed_after_step": step,
        "exit_code": exit_code,
        "told": told,
        "joined": exit_code == 0 and record.losses == reference.losses,
        "seconds": round(time.monotonic() - begin, 1),
    }


def undisturbed(path: Path, output_dir: Path) -> RunRecord:
    """The run that nobody kills."""
    process = start(path, output_dir)
    told = process.communicate(timeout=300)[1]
    assert process.returncode == 0, told
    return RunRecord.read(output_dir / "record.json")


def kill_config(folder: Path) -> RunConfig:
    """A run of STEPS short steps that saves every SAVE_EVERY."""
    from tests.integration.test_train import config

    return config(folder, "unused", "ddp", steps=STEPS, save_every=SAVE_EVERY, eval_every=0)


def main() -> int:
    from tests.integration.conftest import make_corpus

    parser = argparse.ArgumentParser(prog="python -m tests.integration.kill", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kill.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder)
        path = run_file(folder, kill_config(folder))
        reference = undisturbed(path, folder / "reference")
        rows = []
        for seed in range(options.times):
            rows.append(kill_once(path, folder / f"run-{seed}", reference, seed))
            print(json.dumps(rows[-1]), flush=True)
    joined = sum(row["joined"] for row in rows)
    content = {"environment": environment(), "joined": joined, "times": options.times, "runs": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{options.out}: {joined} of {options.times}")
    return 0 if joined == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
