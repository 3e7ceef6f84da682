"""How a run or a command that does not succeed is told: to the shell, to the person, in `record.json`."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.config import UserError
from shardwise.records.record import Status

USER_ERROR, OUT_OF_MEMORY, FAILED = 2, 3, 1
"""Exit codes."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a run to finish its step, save and end."""
PATIENCE_SECONDS = 2.0
"""How long a rank with an unexpected error waits before it ends: many times what a launcher takes to see an exit."""

MAKE_ROOM = "make room, then start again; a run that has saved goes on with --resume latest-good"
"""The way out of a full disk."""


STEP_WAY_OUT = (
    "lower training.micro_batch_size or data.sequence_length, or set training.checkpointing=full"
)
BUILD_WAY_OUT = (
    "the model does not fit, whatever the batch: lower lora.r, set model.dtype=bfloat16, or share it among more "
    "processes (parallel.data=fsdp2, parallel.tp, parallel.pp)"
)


class RunError(RuntimeError):
    """What ends a run though nobody made a mistake in code or config, such as a full disk: told in one line."""


@dataclass(frozen=True)
class Ending:
    """What an exception comes to."""

    exit_code: int
    reason: str  # one line, for the record
    text: str  # for stderr
    status: Status = (
        "failed"  # in the record; a run that is refused before it begins is `unsupported`
    )


class Stopped(Exception):
    """The run was asked to end by signal `number`, has finished step `step` and saved it as `checkpoint`."""

    def __init__(self, number: int, step: int, checkpoint: object) -> None:
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}, saved as {checkpoint}; go on with --resume latest"
        )
        self.number = number


def explain(error: BaseException, where: str = "") -> Ending:
    """The user's mistake and out of memory in one line, anything else with its traceback.

    `where` names the rank where there are several, as in " on rank 1 of 2".
    """
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return Ending(USER_ERROR, message, f"error: {message}", "unsupported")
    if isinstance(error, RunError):
        return Ending(FAILED, message, f"error: {message}")
    if isinstance(error, Stopped):
        return Ending(128 + error.number, message, message, "stopped")
    if is_full(error):
        return Ending(FAILED, message, f"error{where}: {message}; {MAKE_ROOM}")
    if is_out_of_memory(error):
        wanted = re.search(r"tried to allocate [\d.]+ \w+", message, re.IGNORECASE)
        reason = f"out of memory{where}" + (f": {wanted[0].lower()}" if wanted else "")
        way_out = BUILD_WAY_OUT if _was_building(error) else STEP_WAY_OUT
        return Ending(OUT_OF_MEMORY, reason, f"error: {reason}; {way_out}", "oom")
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = f"error{where}:\n{trace}" if where else trace
    return Ending(FAILED, f"{type(error).__name__}{where}: {message}", text)


def _was_building(error: BaseException) -> bool:
    """Whether the error comes from where a run is put together, not from a step."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = {(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames}
    return ("shardwise.assembly.build", "build") in places


def is_full(error: BaseException) -> bool:
    """Whether a disk has no room left, or a user none on it; safetensors' error has the system's as text alone."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return type(error).__name__ == "SafetensorError" and any(
        f"(os error {n})" in str(error) for n in full
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or the CPU's allocator had no more to give (the CPU's raises a plain RuntimeError)."""
    import torch  # not before something went wrong

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "CUDA error: out of memory",
        "std::bad_alloc",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def guarded(call: Callable[[], int]) -> int:
    """The exit code of `call()`: what goes wrong in it is told on stderr, and nothing but SystemExit is raised."""
    try:
        return call()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        raise
    except BaseException as error:  # torch has errors that are no Exception
        ending = explain(error)
        if (
            ending.exit_code != FAILED
            and int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) > 0
        ):
            time.sleep(
                PATIENCE_SECONDS / 4
            )  # rank 0 most likely has found the same, tells it, and this one is ended
        print(ending.text, file=sys.stderr, flush=True)
        return ending.exit_code
