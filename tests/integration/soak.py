"""A long run under random kills: nothing grows, and the curve is that of an undisturbed run.

`make soak` trains a tiny hybrid model with LoRA on two ranks for 10,000 steps, with a checkpoint
every 50, twice in each of LAYOUTS: undisturbed, and while a rank or, now and then, the command
itself is killed. After each checkpoint every rank writes down what it holds. An interrupted soak
resumes; what it has run lies in `runs/soak`. Outcomes: results/soak.json, and its curves as SVG.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch.distributed as dist
import yaml

from shardwise.base.interfaces import Mesh
from shardwise.base.records.record import RunRecord
from shardwise.config import RunConfig
from shardwise.config.run_file import load_config
from shardwise.lab.instruments import INSTRUMENTS
from shardwise.launch.local import launch
from tests.distributed import PATIENCE
from tests.integration.soak_outcome import (
    KEPT,
    MOST_BYTES_PER_STEP,
    SAVE_EVERY,
    SIDES,
    draw,
    outcome,
)

STEPS, NPROC = 10_000, 2
ROOT = Path(__file__).parents[2]
LAYOUTS = {"pp": {"data": "single", "pp": 2, "schedule": "1f1b"}, "fsdp2": {"data": "fsdp2"}}
"""The keys of `parallel`."""
LONGEST_GAP = 500
"""Steps between two kills, at most; they come at random, half as many in the mean."""
VICTIMS = {"rank 0": 9, "rank 1": 9, "command": 2}
"""Who is killed, and how often of 20 times."""
MOMENTS = {"step": 10, "save": 7, "start": 3}
"""When: in a step, while a checkpoint is written, or within START_SECONDS after a start."""
START_SECONDS = 6.0
SIZES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}


# ------------------------------------------------------------------------------- in the processes


def train(cfg: RunConfig, mesh: Mesh) -> RunRecord | None:
    """The training loop, which also writes a line of samples after each checkpoint."""
    from shardwise.checkpoint.checkpointer import Checkpointer
    from shardwise.training import loop

    after_step = Checkpointer.after_step
    samples = Path(cfg.training.output_dir).with_name("samples.jsonl")

    def and_sample(self: Checkpointer, step: int, *others: Any, **named: Any) -> None:
        after_step(self, step, *others, **named)
        if step % SAVE_EVERY == 0:
            with samples.open("a") as file:  # one short write, so lines of ranks do not mix
                file.write(f"{json.dumps(sample(cfg, dist.get_rank(), step))}\n")

    with mock.patch.object(Checkpointer, "after_step", and_sample):
        return loop.train(cfg, mesh, INSTRUMENTS)


def sample(cfg: RunConfig, rank: int, step: int) -> dict[str, Any]:
    """What this rank holds; rank 0 also says it of the launcher and of the disk."""
    from shardwise.metrics.live_tensors import live_tensors
    from shardwise.models.storages import storages

    gc.collect()
    tensor_bytes = sum(storage.nbytes() for storage in storages(live_tensors()).values())
    found = {"step": step, "process": f"rank {rank}", "tensor_bytes": tensor_bytes}
    found |= held(psutil.Process())
    if rank == 0:
        folder = Path(cfg.training.output_dir) / "checkpoints"
        found["checkpoints"] = sorted(path.name for path in folder.iterdir())
        found["command"] = held(psutil.Process(os.getppid()))
    return found


def held(process: psutil.Process) -> dict[str, int]:
    """Resident bytes, and numbers of what a process has open or has started."""
    return {
        "pid": process.pid,
        "resident_bytes": process.memory_info().rss,
        "file_handles": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }


# ---------------------------------------------------------------------------------------- outside


def start(path: Path, folder: Path, layout: str, steps: int) -> subprocess.Popen[bytes]:
    """The run in processes of its own, or what is left of it."""
    overrides = [
        *(f"--parallel.{key}={value}" for key, value in LAYOUTS[layout].items()),
        f"--training.output_dir={folder / 'run'}",
        f"--training.steps={steps}",
        "--training.resume=auto",
    ]
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    with (folder / "stderr.txt").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--run", str(path), *overrides],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def steps_done(folder: Path) -> int:
    """The last step that `metrics.jsonl` tells of, from its end alone."""
    try:
        with (folder / "run" / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            *lines, _ = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def has_done(folder: Path, step: int) -> bool:
    """Whether the run has come to this step."""
    return steps_done(folder) >= step


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "run" / "checkpoints").glob("*.tmp"))


class Ended(Exception):
    """The run is over."""


def wait(process: subprocess.Popen[bytes], condition: Any, seconds: float, pause: float) -> Any:
    """What `condition` returns as soon as it is true; raises Ended where the run ends first."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if process.poll() is not None:
            raise Ended
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain"
        time.sleep(pause)
    return value


def drawn(layout: str, number: int) -> dict[str, Any]:
    """The kill of this number: the same in every soak."""
    draw = random.Random(f"{layout} {number}")
    return {
        "victim": draw.choices(list(VICTIMS), list(VICTIMS.values()))[0],
        "moment": draw.choices(list(MOMENTS), list(MOMENTS.values()))[0],
        "gap": draw.randrange(1, LONGEST_GAP),
        "delay": draw.random(),
    }


def disturb(process: subprocess.Popen[bytes], folder: Path, layout: str, steps: int) -> None:
    """Kill processes of a run, again and again, until it ends or its command was killed."""
    kills = folder / "kills.jsonl"
    kills.touch()
    before: set[psutil.Process] = set()
    while True:
        kill = drawn(layout, len(kills.read_text().splitlines()))
        found = wait(process, partial(all_ranks, process, before), PATIENCE, 0.01)
        if kill["moment"] == "start":
            time.sleep(kill["delay"] * START_SECONDS)
        else:
            target = steps_done(folder) + kill["gap"]
            if target > steps - SAVE_EVERY:
                return
            wait(process, partial(has_done, folder, target), 4 * PATIENCE, 0.02)
            if kill["moment"] == "save":
                wait(process, partial(is_saving, folder), PATIENCE, 0.001)
            time.sleep(kill["delay"] * 0.1)
        step = steps_done(folder)
        if kill["victim"] == "command":
            process.kill()
        else:
            found[int(kill["victim"][-1])].kill()
        with kills.open("a") as file:
            file.write(f"{json.dumps(kill | {'step': step})}\n")
        if kill["victim"] == "command":
            _, alive = psutil.wait_procs(found, PATIENCE)
            assert not alive, "ranks have outlived the command"
            return
        before = set(found)


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks: children of the command beside a helper of multiprocessing's."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # they may be ending
        for child in psutil.Process(process.pid).children():
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def all_ranks(
    process: subprocess.Popen[bytes], before: Iterable[psutil.Process]
) -> list[psutil.Process]:
    """The ranks that were started after these; nothing until all are there."""
    found = [rank for rank in children_of(process) if rank not in before]
    return found if len(found) == NPROC else []


def finish(path: Path, folder: Path, layout: str, steps: int, kills: bool) -> float:
    """Run to the end, whatever happens on the way; the seconds that it took, this time."""
    begin = time.monotonic()
    while not (folder / "done").exists():
        process = start(path, folder, layout, steps)
        try:
            if kills:
                disturb(process, folder, layout, steps)
            code = process.wait()
        except Ended:
            code = process.wait()
        finally:
            process.send_signal(signal.SIGTERM)  # where this program was interrupted
        assert code in (0, -signal.SIGKILL), (folder / "stderr.txt").read_text()[-2000:]
        if code == 0:
            (folder / "done").touch()
    return time.monotonic() - begin


def soak_config(folder: Path) -> RunConfig:
    """The run: short rows, few of them, so that a step takes some milliseconds."""
    config = json.loads((ROOT / "configs/models/tiny-qwen3_5/config.json").read_text())
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config | SIZES))
    from tests.integration.test_train import config as run_config

    cfg = run_config(folder, "unused", "ddp", steps=STEPS, save_every=SAVE_EVERY, eval_every=0)
    # Small steps do not enlarge rounding.
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, lr=1e-3))
    return replace(
        cfg,
        model=replace(cfg.model, path=str(folder / "model")),
        data=replace(cfg.data, sequence_length=16),
        training=replace(
            cfg.training,
            global_batch_size=2,
            micro_batch_size=1,
            save_every=SAVE_EVERY,
            keep_last=KEPT,
        ),
        launch=replace(cfg.launch, restarts=1_000_000),
    )


def main() -> int:
    from shardwise.metrics.hardware import environment
    from tests.integration.conftest import make_corpus

    parser = argparse.ArgumentParser(prog="python -m tests.integration.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--sides", nargs="*", default=SIDES, choices=SIDES, help="to run now")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "soak.json")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "run.yaml").exists():
        make_corpus(folder)
        text = yaml.safe_dump(json.loads(json.dumps(soak_config(folder).to_dict())))
        (folder / "run.yaml").write_text(text)
    content = {"save_every": SAVE_EVERY, "ranks": NPROC, "most_bytes_per_step": MOST_BYTES_PER_STEP}
    rows: dict[str, dict[str, Any]] = {}
    if options.out.exists():  # of other layouts, which ran before
        rows = {row["layout"]: row for row in json.loads(options.out.read_text())["rows"]}
    for layout in options.layouts:
        for side in options.sides:
            seconds = finish(
                folder / "run.yaml", folder / layout / side, layout, options.steps, side == "killed"
            )
            print(f"{layout}, {side}: {seconds:.0f} s", flush=True)
        row = {"environment": environment()} | outcome(folder / layout, layout, options.steps)
        print(f"{layout}: {row['kills']} kills, {row['wrong'] or 'ok'}", flush=True)
        rows[layout] = row
        written = {**content, "rows": [*rows.values()]}
        options.out.write_text(f"{json.dumps(written, indent=1)}\n")
    curves = [row for row in rows.values() if "mean_losses" in row]  # earlier soaks kept none
    draw(curves, options.out.with_suffix(".svg"))
    return 0 if all(rows[layout]["ok"] for layout in options.layouts) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(launch(load_config(sys.argv[2], sys.argv[3:]), NPROC, train))
    sys.exit(main())
