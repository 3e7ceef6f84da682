"""Kill a random rank of a run at a random moment, and see the run go on to the same end.

`python -m tests.integration.kill --times 20` repeats it and writes results/kill.json; a test does it twice in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardwise.config import RunConfig
from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY, NPROC = 40, 8, 2
LAYOUTS = ("ddp", "fsdp2", "zero2")
START_SECONDS, STEP_SECONDS, END_SECONDS = 6.0, 0.2, 0.5
"""How long a kill waits at most: for a run to start, in which nothing is done yet; after a step; after the last one,
when its checkpoint, the adapter and the record are written."""


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


def losses(output_dir: Path) -> dict[int, float]:
    """Of every step that `metrics.jsonl` tells of."""
    try:
        *lines, _ = (output_dir / "metrics.jsonl").read_text().split("\n")  # the last one may be half written
    except FileNotFoundError:
        return {}
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def steps_done(output_dir: Path) -> int:
    """The last step that `metrics.jsonl` tells of."""
    return max(losses(output_dir), default=0)


def trained(output_dir: Path) -> tuple[dict[int, float], bytes]:
    """Every loss, and what a run leaves."""
    return losses(output_dir), (output_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def wait_for_step(process: subprocess.Popen[str], output_dir: Path, step: int, seconds: float = 180) -> None:
    """Until `step` is done; fails where the run ends before it."""
    deadline = time.monotonic() + seconds
    while steps_done(output_dir) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} was not reached in {seconds} s"
        time.sleep(0.01)


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks, which `process` has spawned (as it has multiprocessing's helpers)."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # they may be ending
        for child in psutil.Process(process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def run_killed(
    path: Path, output_dir: Path, *kills: tuple[int, float, int], overrides: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Exit code and stderr of a run that starts again after each kill: (step to wait for, seconds more, rank).

    To wait for step 0 is to wait until there are ranks.
    """
    process = start(path, output_dir, f"--training.max_restarts={len(kills)}", *overrides)
    for step, delay, victim in kills:
        wait_for_step(process, output_dir, step)
        while len(found := ranks(process)) < NPROC:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(delay)
        found[victim].send_signal(signal.SIGKILL)
    told = process.communicate(timeout=300)[1].strip()
    return process.returncode, told


def kill_once(path: Path, output_dir: Path, references: Mapping[str, Path], seed: int) -> dict[str, Any]:
    """One run with one rank killed; what was done, and `joined`: losses and adapter equal the undisturbed run's.

    What is killed after the adapter was saved does not start again, and ends with exit code 1.
    """
    draw = random.Random(seed)
    layout, asynchronous = draw.choice(LAYOUTS), draw.random() < 0.5
    moments = {
        "start": (0, START_SECONDS),
        "step": (draw.randrange(1, STEPS), STEP_SECONDS),
        "end": (STEPS, END_SECONDS),
    }
    moment = draw.choice(list(moments))
    step, longest = moments[moment]
    kill = step, draw.random() * longest, draw.randrange(NPROC)
    begin = time.monotonic()
    overrides = f"--parallel.data={layout}", f"--training.async_save={str(asynchronous).lower()}"
    exit_code, told = run_killed(path, output_dir, kill, overrides=overrides)
    ended_well = exit_code == 0 or "the results were saved before" in told
    return {
        "seed": seed,
        "layout": layout,
        "async_save": asynchronous,
        "moment": moment,
        "killed_after_step": step,
        "exit_code": exit_code,
        "told": told,
        "joined": ended_well and trained(output_dir) == trained(references[layout]),
        "seconds": round(time.monotonic() - begin, 1),
    }


def undisturbed(path: Path, output_dir: Path, layout: str) -> Path:
    """The folder of the run that nobody kills."""
    process = start(path, output_dir, f"--parallel.data={layout}")
    told = process.communicate(timeout=300)[1]
    assert process.returncode == 0, told
    return output_dir


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
        references = {layout: undisturbed(path, folder / layout, layout) for layout in LAYOUTS}
        rows = []
        for seed in range(options.times):
            rows.append(kill_once(path, folder / f"run-{seed}", references, seed))
            print(json.dumps(rows[-1]), flush=True)
    joined = sum(row["joined"] for row in rows)
    content = {"environment": environment(), "joined": joined, "times": options.times, "runs": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{options.out}: {joined} of {options.times}")
    return 0 if joined == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
