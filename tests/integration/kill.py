"""Kill a random rank of a run at a random moment, and see the run go on to the same end.

`python -m tests.integration.kill --times 20` repeats it over LAYOUTS and writes results/kill.json;
a test does it twice in one run. Of three runs one is not restarted by its launcher but by a second
command, at once and in another layout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardwise.config import RunConfig
from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY, NPROC = 40, 8, 2
LAYOUTS = {
    "ddp": (2, {}),
    "zero1": (2, {}),
    "zero2": (2, {}),
    "fsdp2": (2, {}),
    "tp": (2, {"data": "single", "tp": 2}),
    "tp-sp": (2, {"data": "single", "tp": 2, "sequence_parallel": "true"}),
    "pp": (2, {"data": "single", "pp": 2, "schedule": "1f1b"}),
    "pp-interleaved": (2, {"data": "single", "pp": 2, "schedule": "interleaved-1f1b"}),
    "hsdp": (4, {"data": "fsdp2", "dp_replicate": 2}),
    "pp-fsdp2": (4, {"data": "fsdp2", "pp": 2}),
    "tp-fsdp2": (4, {"data": "fsdp2", "tp": 2}),
}
"""How many ranks, and the keys of `parallel` (default: `data` by the layout's name)."""
TOLERANCE = 1e-6
"""Of a loss, relative to the undisturbed run's, where the layout changed on the way; else they are
equal."""
START_SECONDS, STEP_SECONDS, END_SECONDS = 2.0, 0.2, 0.5
"""How long a kill waits at most: for a run to start, in which nothing is done yet; after a step;
after the last one, when its checkpoint, the adapter and the record are written."""


def run_file(folder: Path, cfg: RunConfig) -> Path:
    """The run as a file, as a user would have it."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(cfg.to_dict()))))
    return path


def start(
    path: Path, output_dir: Path, *overrides: str, nproc: int = NPROC
) -> subprocess.Popen[str]:
    """`shardwise train` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "train",
        str(path),
        f"--training.output_dir={output_dir}",
        *overrides,
    ]
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
        *lines, _ = (
            (output_dir / "metrics.jsonl").read_text().split("\n")
        )  # the last one may be half written
    except FileNotFoundError:
        return {}
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def steps_done(output_dir: Path) -> int:
    """The last step that `metrics.jsonl` tells of."""
    return max(losses(output_dir), default=0)


def trained(output_dir: Path) -> tuple[dict[int, float], bytes]:
    """Every loss, and what a run leaves."""
    return losses(output_dir), (output_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def wait_for_step(
    process: subprocess.Popen[str], output_dir: Path, step: int, seconds: float = 180
) -> None:
    """Until `step` is done; fails where the run ends before it."""
    deadline = time.monotonic() + seconds
    while steps_done(output_dir) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} was not reached in {seconds} s"
        time.sleep(0.01)


def ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks, which `process` has started (as it has a helper of
    multiprocessing's)."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # they may be ending
        for child in psutil.Process(process.pid).children():
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def run_killed(
    path: Path,
    output_dir: Path,
    *kills: tuple[int, float, int],
    overrides: Sequence[str] = (),
    nproc: int = NPROC,
) -> tuple[int, str]:
    """Exit code and stderr of a run in which ranks are killed: (step to wait for, seconds more,
    rank).

    It starts again after each kill, unless `overrides` has another `max_restarts`. To wait for step
    0 is to wait until there are ranks. A run that has ended before it is killed is left as it is.
    """
    process = start(
        path, output_dir, f"--training.max_restarts={len(kills)}", *overrides, nproc=nproc
    )
    for step, delay, victim in kills:
        wait_for_step(process, output_dir, step)
        while len(found := ranks(process)) < nproc and process.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            found[victim].send_signal(signal.SIGKILL)
    told = process.communicate(timeout=300)[1].strip()
    return process.returncode, told


def in_layout(name: str) -> list[str]:
    """The overrides that make a run one of a layout."""
    return [
        f"--parallel.{key}={value}" for key, value in ({"data": name} | LAYOUTS[name][1]).items()
    ]


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Of two curves, relative to the other; infinite where one has steps that the other lacks."""
    if one.keys() != other.keys():
        return math.inf
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one)


def kill_once(
    path: Path, output_dir: Path, reference: Callable[[str], Path], seed: int
) -> dict[str, Any]:
    """One run with one rank killed, and what was done.

    `joined`: losses and adapter are those of the undisturbed run in its layout, where another
    layout took it up the losses within TOLERANCE. What is killed after the adapter was saved is not
    restarted, and ends with exit code 1.
    """
    draw = random.Random(seed)
    layout, asynchronous = list(LAYOUTS)[seed % len(LAYOUTS)], draw.random() < 0.5
    other = draw.choice([name for name in LAYOUTS if name != layout]) if seed % 3 == 2 else None
    moments = {
        "start": (0, START_SECONDS),
        "step": (draw.randrange(1, STEPS), STEP_SECONDS),
        "end": (STEPS, END_SECONDS),
    }
    moment = draw.choice(list(moments))
    step, longest = moments[moment]
    nproc = LAYOUTS[layout][0]
    kill = step, draw.random() * longest, draw.randrange(nproc)
    whole = reference(layout)
    begin = time.monotonic()
    overrides = [*in_layout(layout), f"--training.async_save={str(asynchronous).lower()}"]
    overrides += ["--training.max_restarts=0"] if other else []
    exit_code, told = run_killed(path, output_dir, kill, overrides=overrides, nproc=nproc)
    ended_well = exit_code == 0 or "the results were saved before" in told
    if other:
        process = start(
            path, output_dir, *in_layout(other), "--training.resume=auto", nproc=LAYOUTS[other][0]
        )
        told = f"{told}\n{process.communicate(timeout=300)[1]}".strip()
        ended_well = process.returncode == 0
    difference = largest_difference(losses(output_dir), losses(whole))
    equal = ended_well and (
        difference <= TOLERANCE if other else trained(output_dir) == trained(whole)
    )
    return {
        "seed": seed,
        "layout": layout,
        "resumed_in": other,
        "async_save": asynchronous,
        "moment": moment,
        "killed_after_step": step,
        "exit_code": exit_code,
        "told": told,
        "largest_difference": difference,
        "joined": equal,
        "seconds": round(time.monotonic() - begin, 1),
    }


def undisturbed(path: Path, output_dir: Path, layout: str) -> Path:
    """The folder of the run that nobody kills."""
    process = start(path, output_dir, *in_layout(layout), nproc=LAYOUTS[layout][0])
    told = process.communicate(timeout=300)[1]
    assert process.returncode == 0, told
    return output_dir


def kill_config(folder: Path) -> RunConfig:
    """A run of STEPS short steps that saves every SAVE_EVERY; they are small, so that they do not
    enlarge rounding."""
    from tests.integration.test_train import config

    cfg = config(folder, "unused", "ddp", steps=STEPS, save_every=SAVE_EVERY, eval_every=0)
    return replace(cfg, optimizer=replace(cfg.optimizer, lr=1e-3))


def main() -> int:
    from tests.integration.conftest import make_corpus

    parser = argparse.ArgumentParser(prog="python -m tests.integration.kill", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kill.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder)
        path = run_file(folder, kill_config(folder))

        @functools.cache
        def reference(layout: str) -> Path:
            return undisturbed(path, folder / layout, layout)

        rows = []
        for seed in range(options.first, options.first + options.times):
            rows.append(kill_once(path, folder / f"run-{seed}", reference, seed))
            print(json.dumps(rows[-1]), flush=True)
    joined = sum(row["joined"] for row in rows)
    content = {"environment": environment(), "joined": joined, "times": options.times, "runs": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{options.out}: {joined} of {options.times}")
    return 0 if joined == options.times else 1


if __name__ == "__main__":
    sys.exit(main())
