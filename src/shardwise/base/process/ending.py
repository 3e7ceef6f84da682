"""How a run or a command ends without success: its exit code, its line on stderr, its record."""

import errno
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.records.record import Status
from shardwise.base.safety import write_atomically
from shardwise.config import UserError

USER_ERROR, OUT_OF_MEMORY, FAILED = 2, 3, 1
"""Exit codes."""
CODES = "SHARDWISE_CODES"
"""The environment variable with the folder in which torchrun's agent finds exit codes of ranks."""
PATIENCE_SECONDS = 2.0
"""How long a rank with an unexpected error waits before it ends.

It is many times what a launcher takes to notice that a process has ended.
"""

MAKE_ROOM = "make room, then start again; a run that has saved resumes with --resume latest-good"
"""The way out of a full disk."""
SMALLER_STEP = (
    "lower training.micro_batch_size or data.sequence_length, set training.checkpointing=full, or "
    "cut rows over more processes by parallel.cp"
)
"""The way out where a step needs too much memory."""
SMALLER_MODEL = (
    "the model does not fit, whatever the batch: lower lora.r, set model.dtype=bfloat16, or shard "
    "it over more processes (parallel.data=fsdp2, parallel.tp, parallel.pp)"
)
"""The way out where the model itself needs too much memory."""


class RunError(RuntimeError):
    """An error of the surroundings, such as a full disk; it is reported in one line."""


def nothing_to_save(number: int) -> RunError:
    """Return the error of a run that a scheduler asks to save before its first step.

    The signal's own exit code would be that of a run that has saved, and a job whose limit is too
    short would start again without end.
    """
    return RunError(
        f"{signal.Signals(number).name} asks to save, and the run has not begun to train; is the "
        "time limit longer than launch.ahead_seconds and the start of the run?"
    )


class Stopped(Exception):
    """A signal asked the run to end; it has finished step `step` and saved it as `checkpoint`.

    Before its first step nothing is saved: `checkpoint` is None.
    """

    def __init__(self, number: int, step: int, checkpoint: object) -> None:
        saved = f"after step {step}, saved as {checkpoint}; resume with --resume latest"
        if checkpoint is None:
            saved = "before its first step, and nothing is saved; start it again"
        super().__init__(f"stopped by {signal.Signals(number).name} {saved}")
        self.number = number


@dataclass(frozen=True)
class Ending:
    """How a run ends that does not succeed."""

    exit_code: int
    reason: str  # one line, for the record
    text: str  # for stderr; none where the user has ended the run himself
    status: Status = "failed"  # status in the record


INTERRUPTED = Ending(128 + signal.SIGINT, "interrupted by a signal", "", "stopped")
"""Ctrl-C, or a request to end from a terminal or a scheduler, outside of the training loop."""


def explain(error: BaseException, where: str = "") -> Ending:
    """Return the ending that an error means.

    The user's mistakes and lack of memory get one line, anything else a line and its traceback.
    `where` names the rank where there are several, as in " on rank 1 of 2".
    """
    message = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return INTERRUPTED
    if isinstance(error, UserError):
        return Ending(USER_ERROR, message, f"error: {message}", "unsupported")
    if isinstance(error, RunError):
        return Ending(FAILED, message, f"error: {message}")
    if isinstance(error, Stopped):
        return Ending(128 + error.number, message, message, "stopped")
    if is_full(error):
        return Ending(FAILED, message, f"error{where}: {message}; {MAKE_ROOM}")
    if "Too many open files" in message:  # of Python, or of gloo
        reason = f"too many open files{where}"
        return Ending(FAILED, reason, f"error: {reason}; raise the limit of them (ulimit -n)")
    if is_out_of_memory(error):
        request = re.search(r"tried to allocate [\d.]+ \w+", message, re.IGNORECASE)
        reason = f"out of memory{where}"
        if request:
            reason += f": {request[0].lower()}"
        way_out = SMALLER_MODEL if _was_building(error) else SMALLER_STEP
        return Ending(OUT_OF_MEMORY, reason, f"error: {reason}; {way_out}", "oom")
    if waited := re.search(r"Timed out waiting (\d+)ms", message):  # gloo
        reason = f"nothing came from other ranks in {int(waited[1]) / 1000:g} seconds{where}"
        way_out = "is one stopped, or its disk slower than launch.timeout_seconds allows?"
        return Ending(FAILED, reason, f"error: {reason}; {way_out}", "timeout")
    trace = "".join(traceback.format_exception(error)).rstrip()
    kind = type(error).__name__
    what = f"{kind}: {message}" if message else kind
    return Ending(FAILED, f"{kind}{where}: {message}", f"error{where}: {what}\n{trace}")


def _was_building(error: BaseException) -> bool:
    """Return whether the error comes from the assembly of a run, not from a step."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = {(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames}
    return ("shardwise.assembly.build", "build") in places


def is_full(error: BaseException) -> bool:
    """Return whether a disk has no room left, or the user's share of it has none."""
    cause = system_error(error)
    return cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException) -> OSError | None:
    """Return the system's error that an error is; None if it is another one.

    An error of safetensors holds it as text only.
    """
    if isinstance(error, OSError):
        return error
    if type(error).__name__ != "SafetensorError":
        return None
    number = re.search(r"\(os error (\d+)\)", str(error))
    path = re.search(r'at path "(.*)"', str(error))
    if number is None:
        return None
    return OSError(int(number[1]), os.strerror(int(number[1])), path[1] if path else None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the allocator of a GPU or of the CPU had no memory left.

    The CPU's allocator raises a plain RuntimeError, which only its text tells from others. What is
    not imported, or half, has raised nothing, and is not imported for the answer.
    """
    torch_error = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    if isinstance(error, MemoryError | torch_error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    signs = (
        "can't start new thread",  # Python's, where there is no memory for its stack
        "Cannot allocate memory",
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "CUDA error: out of memory",
        "std::bad_alloc",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def leave_code(code: int) -> None:
    """Leave the exit code of this process for the agent of torchrun that has started it."""
    if folder := os.environ.get(CODES):
        write_atomically(Path(folder, str(os.getpid())), str(code))


def report_error(error: BaseException) -> int:
    """Print why this process ends and return its exit code; raise SystemExit again."""
    if isinstance(error, SystemExit):
        raise error
    return report_ending(explain(error))


def report_ending(ending: Ending) -> int:
    """Print the text of an ending on stderr and return its exit code."""
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    if ending.exit_code != FAILED and rank > 0:
        # Rank 0 most likely prints the same line, and the launcher then ends this process.
        time.sleep(PATIENCE_SECONDS / 4)
    if ending.text:
        print(ending.text, file=sys.stderr, flush=True)
    return ending.exit_code
