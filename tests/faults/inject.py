"""Faults from within: patches a phase of a run, in the process whose forks become the ranks.

A fault happens once in a case, on one rank, and leaves a marker that says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.checkpoint import checkpointer, export, folder, saved_state
from shardwise.launch import local, rank
from shardwise.parallel.place import local as local_of
from shardwise.training import loop, session, step

AT_STEP = 2
"""The step in which it happens, or after which."""
FREEZE_SECONDS, SLOW_SECONDS = 1.0, 0.3
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096


class Fault:
    """One fault of a run: `install` it before the run forks its ranks."""

    def __init__(
        self, name: str, phase: str, on_rank: int, num_ranks: int, output_dir: Path, marker: Path
    ) -> None:
        self.name, self.phase, self.on_rank, self.num_ranks = name, phase, on_rank, num_ranks
        self.output_dir, self.marker = output_dir, marker
        self.seed = 0
        self.seconds = 0.0  # of an undisturbed run
        self._rank, self._step = 0, 0
        self._job: Any = None

    def install(self) -> None:
        """Patch the phase."""
        run_rank, step_of = rank.run_rank, session.Session.step

        def with_rank(cfg: Any, world: Any, *others: Any) -> Any:
            self._rank = world.rank
            if self.phase == "later":
                self._schedule()
            return run_rank(cfg, world, *others)

        def with_step(this: Any, microbatches: Any) -> Any:
            self._step, self._job = this.done + 1, this.job
            with self._within_step():
                return step_of(this, microbatches)

        local.run_rank = rank.run_rank = with_rank
        session.Session.step = with_step
        self._patch()

    def _patch(self) -> None:
        first, before, after = self._rank_0, self._before, self._after
        match self.phase:
            case "start":
                before(rank, "_init_process_group")
            case "load":
                before(loop, "build")
            case "clip":
                before(step, "clip_by_global_norm", self._in_step)
            case "stepped":
                after(session, "training_step", self._in_step)
            case "optimizer":
                register_optimizer_step_pre_hook(self._at_update)
            case "evaluation":
                before(session, "evaluate", lambda pm, batches, mesh, done: done == AT_STEP)
            case "save":
                before(checkpointer.checkpoint_tensors, "write", _is_saving)
            case "written":
                after(checkpointer.checkpoint_tensors, "write", _is_saving)
            case "rename":
                before(folder, "publish", lambda source, to: first() and _is_saving(None, to))
                before(checkpointer.Checkpointer, "_on_main", self._finishes)
            case "named":
                after(folder, "publish", lambda source, to: first() and _is_saving(None, to))
                after(checkpointer.Checkpointer, "_on_main", self._finishes)
            case "export":
                before(session, "save_result")
            case "gathering":
                calls: list[int] = []
                before(export, "full_tensor", lambda _: calls.append(1) or len(calls) == 2)
            case "exported":
                before(export, "save_for_generation", lambda *_: first())
                after(session, "save_result", lambda *_: not first())
            case "record":
                before(session, "write_record")
            case "resume":
                before(loop, "find_start")
            case "restore":
                before(saved_state.SavedState, "read")

    def _within_step(self) -> contextlib.AbstractContextManager[Any]:
        mine = self._in_step() and self._rank == self.on_rank
        if mine and self.phase in ("reference", "forward", "backward"):
            return register_module_forward_hook(self._at_output)
        if mine and self.phase == "collective":
            return _Messages(self.act)
        return contextlib.nullcontext()

    def _at_output(self, module: Any, inputs: Any, output: Any) -> None:
        if self.phase == "reference" and not torch.is_grad_enabled():
            self.act()
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            if self.phase == "forward":
                self.act()
            elif self.phase == "backward":
                output.register_hook(lambda gradient: self.act())

    def _at_update(self, *_: Any) -> None:
        if self._in_step():
            self.act()

    def _in_step(self, *_: Any) -> bool:
        return self._step == AT_STEP

    def _rank_0(self) -> bool:
        return self._rank == 0

    def _finishes(self, this: Any, work: Any, to: Path) -> bool:
        return self._rank > 0 and work.__name__ == "finish" and _is_saving(None, to)

    def _before(self, owner: Any, name: str, when: Callable[..., Any] = lambda *_: True) -> None:
        self._wrap(owner, name, when, is_before=True)

    def _after(self, owner: Any, name: str, when: Callable[..., Any] = lambda *_: True) -> None:
        self._wrap(owner, name, when, is_before=False)

    def _wrap(self, owner: Any, name: str, when: Callable[..., Any], is_before: bool) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            happens = when(*args)
            if happens and is_before:
                self.act()
            result = function(*args, **kwargs)
            if happens and not is_before:
                self.act()
            return result

        setattr(owner, name, wrapped)

    def _schedule(self) -> None:
        """Let it happen at a random moment."""
        if self._rank == self.on_rank:
            delay = random.Random(self.seed).random() * self.seconds
            timer = threading.Timer(delay, self.act)
            timer.daemon = True
            timer.start()

    def act(self) -> None:
        """Do it, if this is the rank and it was not done."""
        if self._rank != self.on_rank:
            return
        try:
            file = os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        saved = folder.complete(self.output_dir)
        content = {"newest": folder.step_of(saved[0]) if saved else 0, "step": self._step}
        os.write(file, json.dumps(content).encode())
        os.close(file)
        self._happen()

    def _happen(self) -> None:
        launcher = os.getppid() if self.num_ranks > 1 else os.getpid()
        out = self.output_dir
        match self.name:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "launcher-kill":
                os.kill(launcher, signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "freeze":
                _freeze(os.getpid())
            case "launcher-freeze":
                _freeze(launcher)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "launcher-terminate":
                os.kill(launcher, signal.SIGTERM)
            case "launcher-interrupt":
                os.kill(launcher, signal.SIGINT)
            case "exit":
                os._exit(7)
            case "exit as if done":
                os._exit(0)
            case "segmentation fault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "slow":
                self._slow_down()
            case "error":
                raise AssertionError if self.phase == "exported" else RuntimeError("injected")
            case "full":
                _fill(out.parent / "filler")
            case "no inodes":
                _fill(out.parent / "filler", files=True)
            case "read-only":
                _mount(out, out, MS_BIND)
                _mount(None, out, MS_REMOUNT | MS_BIND | MS_RDONLY)
            case "file too large":
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
            case "quota":
                _fail_to_sync(errno.EDQUOT)
            case "I/O error":
                _fail_to_sync(errno.EIO)
            case "slow disk":
                sync = os.fsync
                os.fsync = lambda file: (time.sleep(SLOW_SECONDS), sync(file))[1]
            case "folder moved":
                out.rename(out.with_name("elsewhere"))
            case "checkpoints removed":
                shutil.rmtree(out / "checkpoints")
            case "no memory":
                used = psutil.Process().memory_info().vms
                resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
            case "MemoryError":
                raise MemoryError
            case "CUDA out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            case "an hour forth" | "an hour back" | "ten years back" | "back to 1970":
                _set_clock(self.name)
            case _:
                _flip(self.name, self._job)

    def _slow_down(self) -> None:
        """Take longer from now on, at every message and every write."""
        sync, run = os.fsync, session.training_step

        def slow_step(*args: Any) -> Any:
            time.sleep(SLOW_SECONDS)
            return run(*args)

        session.training_step = slow_step
        os.fsync = lambda file: (time.sleep(SLOW_SECONDS), sync(file))[1]
        time.sleep(SLOW_SECONDS)


class _Messages(TorchDispatchMode):
    """Calls `act` before the second message of a step."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act, self._count = act, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count += 1
            if self._count == 2:
                self._act()
        return func(*args, **(kwargs or {}))


def _is_saving(_: Any, to: Path, *others: Any) -> bool:
    return to.name.removesuffix(folder.UNFINISHED) == f"step-{AT_STEP}"


def _freeze(process: int) -> None:
    command = f"sleep {FREEZE_SECONDS}; kill -CONT {process}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)
    os.kill(process, signal.SIGSTOP)


def _fill(path: Path, files: bool = False) -> None:
    """Leave no room where `path` is: no byte, or no further file."""
    try:
        if files:
            path.mkdir()
            for number in range(10**6):
                (path / str(number)).touch()
        for size in (2**16, 1):
            with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
                while file.write(bytes(size)):
                    pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _mount(source: Path | None, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    name = None if source is None else bytes(source)
    if libc.mount(name, bytes(target), None, flags, None) != 0:
        raise AssertionError(f"mount: {os.strerror(ctypes.get_errno())}")


def _fail_to_sync(number: int) -> None:
    def fail(file: int) -> None:
        raise OSError(number, os.strerror(number))

    os.fsync = fail


def _set_clock(name: str) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    shift = {"an hour forth": 3600, "an hour back": -3600, "ten years back": -315_000_000}
    change = shift.get(name, -int(seconds()))
    time.time = lambda: seconds() + change
    time.time_ns = lambda: nanoseconds() + change * 10**9


def _flip(name: str, job: Any) -> None:
    """Flip a bit of the largest number in a weight or a gradient of this rank."""
    weights = dict(job.pm.named_parameters())
    if name == "bit of a norm's weight":
        weight = next(w for n, w in weights.items() if "norm" in n)
    else:
        weight = next(iter(job.pm.trained().values()))
    tensor = weight.grad if name == "bit of a gradient" else weight.detach()
    numbers = local_of(tensor).view(-1)
    numbers[int(numbers.abs().argmax())].view(torch.int32).bitwise_xor_(1 << 22)
