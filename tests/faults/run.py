"""Run one case: the run that is disturbed, those that go on, and what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file

from shardwise.checkpoint.folder import MANIFEST, complete, step_of
from shardwise.metrics import hardware
from tests.command import run_command
from tests.faults.cases import LAYOUTS, MODES, Case
from tests.faults.inject import AT_STEP, Fault
from tests.faults.table import SAME, STOPPED
from tests.integration.conftest import make_corpus
from tests.models.tiny import CONFIGS

STEPS = 3
LIMIT_SECONDS = 150.0
"""How long one command of a case may take: what takes longer hangs."""
ORPHAN_SECONDS = 30.0
"""How long ranks may live that have lost their launcher."""
TOLERANCE = 1e-6
"""Of a loss, relative to the undisturbed run's, where the layout changed on the way."""
RESULT_TOLERANCE = 1e-5
"""Of a tensor of the result, relative to its norm, there."""
ENDS_AT_ONCE = ("kill", "exit", "segmentation fault")
"""Faults after which a process says nothing."""
CLONE_NEWNS, CLONE_NEWUSER, MS_REC_PRIVATE = 0x20000, 0x10000000, 0x44000
NOT_ALLOWED = "this system lets nobody mount a disk of his own"


class Bad(Exception):
    """What came of a fault is not right."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    told: str


def write_run_file(folder: Path, model: str, mode: str) -> Path:
    """A run of STEPS steps that saves each, in a folder with a corpus and a tokenizer."""
    path = folder / f"{model}-{mode}.yaml"
    content = {
        "model": {
            "path": str(CONFIGS / model),
            "init": "random",
            "tokenizer": str(folder / "tokenizer"),
        },
        "lora": {"r": 4, "dropout": 0.1} if mode.endswith("lora") else None,
        "data": {"train": str(folder / "corpus.jsonl"), "validation": 0.07, "sequence_length": 32},
        "optimizer": {"lr": 1e-3},
        "training": {
            "output_dir": "unused",
            "steps": STEPS,
            "save_every": 1,
            "eval_every": AT_STEP,
            "eval_batches": 1,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "device": "cpu",
        },
        "measure": {"memory": False, "warmup_steps": 1},
    }
    if mode.startswith("dpo"):
        content["training"]["objective"] = "dpo"
        content["data"] |= {"train": str(folder / "pairs.jsonl"), "format": "preference"}
    path.write_text(yaml.safe_dump(content))
    return path


class Runs:
    """Runs of a case, in a folder of its own; undisturbed ones are shared by all cases."""

    def __init__(self, shared: Path, folder: Path, mode: str) -> None:
        self._shared, self._folder, self._mode = shared, folder, mode
        self.output_dir = folder / "out"

    def start(
        self,
        layout: str,
        *overrides: str,
        output_dir: Path | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Ended:
        """Run `shardwise train` to its end; Bad if it hangs, or leaves processes behind."""
        how = LAYOUTS[layout]
        file = self._shared / f"{how.model}-{self._mode}.yaml"
        settings = [f"parallel.{key}={json.dumps(value)}" for key, value in how.parallel.items()]
        settings += [f"training.output_dir={output_dir or self.output_dir}", *overrides]
        ranks = ["--nproc", str(how.num_ranks)] if how.num_ranks > 1 else []
        leader = self._folder / "leader"

        def begin() -> None:
            os.setpgid(0, 0)
            leader.write_text(str(os.getpid()))
            before()

        arguments = ["train", str(file), *(f"--{item}" for item in settings), *ranks]
        try:
            done = run_command(arguments, {"OMP_NUM_THREADS": "1"}, begin, patience=LIMIT_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(leader.read_text()), signal.SIGKILL)
            raise Bad(f"hangs: no end in {LIMIT_SECONDS:g} seconds") from None
        _wait_for_orphans(int(leader.read_text()))
        return Ended(done.returncode, done.stderr.strip())

    def undisturbed(self, layout: str, seed: int = 0) -> Path:
        """The output folder of the run that nobody disturbs, which whoever needs it first makes."""
        name = f"{layout}-{self._mode}-{seed}"
        with (self._shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder, unfinished = self._shared / name, self._shared / f"{name}.part"
            if not folder.is_dir():
                begin = time.monotonic()
                settings = [f"training.seed={seed}", "training.keep_last=9"]
                ended = self.start(layout, *settings, output_dir=unfinished)
                assert ended.exit_code == 0, ended.told
                (unfinished / "seconds").write_text(str(time.monotonic() - begin))
                unfinished.rename(folder)
        return folder

    def begin_at(self, layout: str, step: int) -> None:
        """Take the undisturbed run as it was after a step."""
        shutil.copytree(self.undisturbed(layout), self.output_dir)
        for saved in complete(self.output_dir):
            if step_of(saved) > step:
                shutil.rmtree(saved)
        for name in ("adapter", "model"):
            shutil.rmtree(self.output_dir / name, ignore_errors=True)
        for name in ("record.json", "seconds"):
            (self.output_dir / name).unlink()


def run_case(case: Case, shared: Path, folder: Path) -> dict[str, Any]:
    """The row of a case, from a process of its own that may mount disks and be killed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    begin = time.monotonic()

    def work() -> None:
        try:
            row: dict[str, Any] = _row(case, shared, folder)
        except BaseException:  # the program's own mistake
            row = {"outcome": "none", "told": traceback.format_exc()}
        sender.send(row)

    process = context.Process(target=work)
    process.start()
    sender.close()
    row = receiver.recv()
    process.join()
    what = {"kind": case.kind, "fault": case.fault, "phase": case.phase, "layout": case.layout}
    where = {"mode": case.mode, "rank": case.rank}
    return what | where | row | {"seconds": round(time.monotonic() - begin, 1)}


def _row(case: Case, shared: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    runs = Runs(shared, folder, case.mode)
    undisturbed = runs.undisturbed(case.layout)
    row: dict[str, Any] = {}
    try:
        if case.kind == "checkpoint":
            _damaged(case, runs, row)
        else:
            if case.kind == "disk":
                _mount_disk(folder)
            _disturbed(case, runs, float((undisturbed / "seconds").read_text()), row)
        # DDP groups gradients again after the first step of a start, and a sum over three or more
        # ranks depends on that: docs/guides/checkpoints.md.
        regrouped = case.layout == "ddp-4" and "resumed_from" in row
        row |= compare(runs.output_dir, undisturbed, bool(case.resumed_in) or regrouped)
    except Bad as bad:
        row["outcome"] = str(bad)
    return row


def _disturbed(case: Case, runs: Runs, seconds: float, row: dict[str, Any]) -> None:
    """Fill the row with what happens in the disturbed run, and in those that go on."""
    faults = [(case.fault, case.phase, case.rank), *([case.second] if case.second else [])]
    resumes = case.phase in ("resume", "restore")
    if resumes:
        runs.begin_at(case.layout, AT_STEP - 1)
    row |= {"outcome": SAME, "told": "", "exit_code": 0, "lost_steps": 0}
    overrides = list(case.overrides)
    for number, (name, phase, rank) in enumerate(faults):
        marker = runs.output_dir.parent / f"happened-{number}"
        ranks = LAYOUTS[case.layout].num_ranks
        fault = Fault(name, phase, rank, ranks, runs.output_dir, marker)
        fault.seed, fault.seconds = case.seed, seconds
        going_on = ["training.resume=auto"] if resumes or number else []
        ended = runs.start(case.layout, *overrides, *going_on, before=fault.install)
        while case.kind == "random" and not marker.exists():  # it came after the end
            shutil.rmtree(runs.output_dir)
            fault.seconds /= 2
            ended = runs.start(case.layout, *overrides, before=fault.install)
        assert marker.exists(), f"{name} did not happen: {ended}"
        row |= {"exit_code": ended.exit_code, "told": _short(ended.told)}
        content = json.loads(marker.read_text())
        newest = content["newest"]
        if case.kind == "numbers":
            _check_named(rank, ended, case.layout)
        if ended.exit_code != 0:
            _check_told(name, ended, runs.output_dir, ranks)
            _repair(case, runs.output_dir)
            row["outcome"] = STOPPED
            saved = max(map(step_of, complete(runs.output_dir)), default=0)
            row["lost_steps"] += max(0, newest - saved)
        elif "starting again" in ended.told:
            row["resumed_from"] = _resumed_from(runs.output_dir)
            if case.kind == "memory checkpoint":  # of each step that was done
                newest = content["step"] - 1
            row["lost_steps"] += max(0, newest - row["resumed_from"])
    if row["lost_steps"] > 0:
        raise Bad(f"lost {row['lost_steps']} steps")
    if row["outcome"] == STOPPED:
        _go_on(case, runs, row)


def _go_on(case: Case, runs: Runs, row: dict[str, Any]) -> None:
    saved = max(map(step_of, complete(runs.output_dir)), default=0)
    ended = runs.start(case.resumed_in or case.layout, "training.resume=auto")
    if ended.exit_code != 0:
        row["told"] = _short(ended.told)
        raise Bad(f"does not resume: exit code {ended.exit_code}")
    row["resumed_from"] = _resumed_from(runs.output_dir)
    row["lost_steps"] += saved - row["resumed_from"]
    if row["lost_steps"] > 0:
        raise Bad(f"lost {row['lost_steps']} steps")


def _resumed_from(output_dir: Path) -> int:
    """The step of the checkpoint from which a finished run has resumed; 0: from none."""
    resumed = json.loads((output_dir / "record.json").read_text())["resumed_from"]
    return resumed["step"] if resumed else 0


def _check_named(rank: int, ended: Ended, layout: str) -> None:
    """Bad unless a run ended that computed wrong numbers, and named the rank: of four copies that
    one alone, of two both.
    """
    named = re.search(r"differ (?:on rank|between ranks) ([\d, ]*\d)", ended.told)
    if ended.exit_code == 0 or named is None:
        raise Bad("wrong numbers are not found")
    if str(rank) not in named[1].replace(",", "").split():
        raise Bad(f"rank {named[1]} is named, and rank {rank} was wrong")
    if layout == "ddp-4" and named[1] != str(rank):
        raise Bad(f"ranks {named[1]} are named, and most of them were right")


def _short(text: str) -> str:
    """The lines that say why a run ended; where there are none, the end of what was printed.

    Folders of this machine are left out.
    """
    lines = [line for line in text.splitlines() if line.startswith(("error", "stopped by"))]
    return re.sub(r"/[^\s\"']*/(?=(lib/python|src/|tests/))", "", "\n".join(lines) or text)[-600:]


def _check_told(fault: str, ended: Ended, output_dir: Path, ranks: int) -> None:
    """Bad unless a run that ended said why, in one line."""
    if fault == "launcher-kill" or (ranks == 1 and fault in ENDS_AT_ONCE):
        return  # the command itself has ended, with nobody beside it
    lines = [line for line in ended.told.splitlines() if line.startswith(("error", "stopped by"))]
    interrupted = ended.exit_code in (130, 143)
    if not lines and not interrupted:
        raise Bad("ends without a line that says why")
    # Without memory Python itself may fail with any error, below a line that says so.
    if "Traceback" in ended.told and fault not in ("error", "no memory"):
        raise Bad("ends with a traceback")
    with contextlib.suppress(FileNotFoundError):
        status = json.loads((output_dir / "record.json").read_text())["status"]
        if status not in ("failed", "timeout", "stopped", "oom", "ok"):
            raise Bad(f"its record has status {status}")


def _repair(case: Case, output_dir: Path) -> None:
    """Undo what the fault did to the disk, as a user would before he starts the run again."""
    filler = output_dir.parent / "filler"
    if filler.is_dir():
        shutil.rmtree(filler)
    filler.unlink(missing_ok=True)
    if case.fault == "read-only":
        ctypes.CDLL(None).umount2(bytes(output_dir), 0)
    if case.fault == "folder moved":
        shutil.rmtree(output_dir, ignore_errors=True)
        output_dir.with_name("elsewhere").rename(output_dir)


def _damaged(case: Case, runs: Runs, row: dict[str, Any]) -> None:
    """Resume from a damaged checkpoint, then from the last whole one; fill the row."""
    runs.begin_at(case.layout, AT_STEP)
    newest, whole = complete(runs.output_dir)[:2]
    file = newest / case.file
    content = file.read_bytes()
    match case.fault:
        case "cut":
            file.write_bytes(content[: len(content) * 2 // 3])
        case "flipped":
            place = hash_of(case.key) % len(content)
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        case "of another run":
            other = runs.undisturbed(case.layout, seed=1) / newest.relative_to(runs.output_dir)
            assert (other / case.file).read_bytes() != content
            shutil.copy(other / case.file, file)
        case "missing":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
    ended = runs.start(case.layout, "training.resume=latest")
    if ended.exit_code == 0:
        raise Bad("resumes from a damaged checkpoint")
    # One that is of another run, and whole, blames the files that it lies beside.
    named = "is damaged" if case.file == MANIFEST and case.fault == "of another run" else case.file
    if ended.exit_code != 2 or named not in ended.told or len(ended.told.splitlines()) != 1:
        raise Bad(f"does not name the file: {ended.told[-300:]}")
    row |= {"outcome": STOPPED, "told": _short(ended.told), "exit_code": 2, "lost_steps": 0}
    _go_on_from(case, runs, row, step_of(whole))


def _go_on_from(case: Case, runs: Runs, row: dict[str, Any], step: int) -> None:
    ended = runs.start(case.layout, "training.resume=auto")
    if ended.exit_code != 0:
        raise Bad(f"does not go back to the last whole checkpoint: {ended.told[-300:]}")
    row["resumed_from"] = _resumed_from(runs.output_dir)
    row["lost_steps"] = step - row["resumed_from"]
    if row["resumed_from"] != step:
        raise Bad(f"resumed from step {row['resumed_from']}, and step {step} is whole")


def hash_of(text: str) -> int:
    """A number that is the same in every session."""
    return zlib.crc32(text.encode())


def compare(output_dir: Path, undisturbed: Path, to_rounding: bool) -> dict[str, Any]:
    """How a run's curve and result differ from the undisturbed one's; Bad where they may not."""
    ours, theirs = numbers_of(output_dir), numbers_of(undisturbed)
    if ours.keys() != theirs.keys():
        raise Bad(f"silently wrong: it has {sorted(ours)}")
    differences = [abs(ours[key] - theirs[key]) / (abs(theirs[key]) or 1) for key in theirs]
    largest = max(differences, key=_nan_is_largest)
    of_result = _difference(_result(output_dir), _result(undisturbed))
    if not largest <= (TOLERANCE if to_rounding else 0.0):
        raise Bad(f"silently wrong: losses differ by {largest:.1e}")
    if not of_result <= (RESULT_TOLERANCE if to_rounding else 0.0):
        raise Bad(f"silently wrong: the result differs by {of_result:.1e}")
    return {"largest_difference": largest, "result_difference": of_result}


def numbers_of(output_dir: Path) -> dict[tuple[str, int], float]:
    """Every loss and reward of a run, of steps and of evaluations."""
    rows = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return {
        (name, row["step"]): float(row[name])
        for row in rows
        for name in ("loss", "grad_norm", "eval_loss", "rewards/chosen", "rewards/rejected")
        if name in row
    }


def _result(output_dir: Path) -> dict[str, torch.Tensor]:
    files = [
        path for name in ("adapter", "model") for path in (output_dir / name).glob("*.safetensors")
    ]
    if not files:
        raise Bad("it has no result")
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm; Bad where they are not the same
    tensors.
    """
    if _kinds(ours) != _kinds(theirs):
        raise Bad(f"silently wrong: its result has {sorted(ours)}")
    differences = [
        0.0
        if _bits(ours[key]).equal(_bits(tensor))
        else float((ours[key] - tensor).double().norm() / tensor.double().norm()) or math.inf
        for key, tensor in theirs.items()
    ]
    return max(differences, key=_nan_is_largest)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _nan_is_largest(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _kinds(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}


def _wait_for_orphans(group: int) -> None:
    """Wait until no process of a command is left; Bad if that takes too long."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while _members(group):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            raise Bad("leaves processes behind")
        time.sleep(0.05)


def _members(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _mount_disk(folder: Path) -> None:
    """Make `folder` a disk of 16 MiB for this process and those that it starts.

    Not every system lets every user: namespaces, their ids and mounts can each be forbidden.
    """
    libc, ids = ctypes.CDLL(None, use_errno=True), {"uid_map": os.getuid(), "gid_map": os.getgid()}
    try:
        allowed = libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0
        if allowed:
            Path("/proc/self/setgroups").write_text("deny")
            for name, number in ids.items():
                Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
            allowed = libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
            options = b"size=16m,nr_inodes=400"
            allowed = allowed and libc.mount(b"none", bytes(folder), b"tmpfs", 0, options) == 0
    except PermissionError:
        allowed = False
    if not allowed:
        raise Bad(NOT_ALLOWED)


@contextlib.contextmanager
def shared_folder() -> Generator[Path]:
    """A folder in memory with a corpus, a tokenizer and run files, for undisturbed runs."""
    # Nobody reads the peak here, and each run would measure it anew.
    hardware.measured_flops = functools.cache(hardware.measured_flops)
    hardware.measured_flops(torch.device("cpu"), torch.float32)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        make_corpus(folder)
        pairs = [
            {"prompt": f"{n}: ", "chosen": "yes" * (n % 3 + 1), "rejected": "no"} for n in range(60)
        ]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        for model in {layout.model for layout in LAYOUTS.values()}:
            for mode in MODES:
                write_run_file(folder, model, mode)
        yield folder
