"""What an exception comes to: exit code, reason, and what a person reads."""

from __future__ import annotations

import errno
import os
import signal
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from shardwise.assembly import build
from shardwise.config import UserError
from shardwise.process.ending import Ending, Stopped, explain, guarded


def raised_by(call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (each case says below what it must come to)
        call()
    return caught.value


def test_a_users_mistake_is_one_line():
    ending = explain(
        UserError("data.train: no file\n  matches x*; check the pattern"), " on rank 0 of 2"
    )
    message = "data.train: no file matches x*; check the pattern"
    assert ending == Ending(2, message, f"error: {message}", "unsupported")


def test_a_run_that_was_asked_to_stop_says_how_to_go_on():
    ending = explain(Stopped(signal.SIGTERM, 12, "runs/x/checkpoints/step-12"))
    message = "stopped by SIGTERM after step 12, saved as runs/x/checkpoints/step-12; go on with --resume latest"
    assert ending == Ending(128 + 15, message, message, "stopped")


def test_the_cpus_allocator_is_recognised_for_real():
    # 2^48 float32 are 2^50 bytes, more than a process can address, so this fails on every machine.
    ending = explain(raised_by(lambda: torch.empty(2**48)), " on rank 1 of 2")
    assert ending.exit_code == 3
    assert ending.reason == f"out of memory on rank 1 of 2: tried to allocate {2**50} bytes"
    way_out = "lower training.micro_batch_size or data.sequence_length, or set training.checkpointing=full"
    assert ending.text == f"error: {ending.reason}; {way_out}"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out of memory"),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has 79.10 GiB in all."
            ),
            "out of memory: tried to allocate 20.50 mib",
        ),
        (RuntimeError("std::bad_alloc"), "out of memory"),
        (
            RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
            "out of memory",
        ),
    ],
)
def test_out_of_memory(error, reason):
    assert (explain(error).exit_code, explain(error).reason) == (3, reason)


def test_a_model_that_does_not_fit_is_not_answered_by_smaller_batches(monkeypatch):
    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(build, "describe", lambda *_: no_memory())
    building = explain(raised_by(lambda: build.build(None, mock.MagicMock())))
    step = explain(raised_by(no_memory))
    assert (
        (building.exit_code, building.reason)
        == (step.exit_code, step.reason)
        == (3, "out of memory")
    )
    assert "lora.r" in building.text
    assert "micro_batch_size" not in building.text
    assert "micro_batch_size" in step.text


@pytest.mark.parametrize(
    "error", [RuntimeError("no memory of it"), ValueError("CUDA error: out of memory"), OSError()]
)
def test_other_errors_are_not_out_of_memory(error):
    assert explain(error).exit_code == 1


def test_a_full_disk_is_one_line():
    ending = explain(OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"))
    assert (ending.exit_code, ending.status) == (1, "failed")
    assert ending.text == (
        "error: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'; "
        "make room, then start again; a run that has saved goes on with --resume latest-good"
    )


def test_a_full_disk_is_told_as_such_whoever_writes():
    ending = explain(
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert "make room" in ending.text
    assert ending.text.count("\n") == 0


def test_anything_else_comes_with_its_traceback():
    ending = explain(raised_by(lambda: {}["key"]), " on rank 1 of 2")
    assert (ending.exit_code, ending.reason) == (1, "KeyError on rank 1 of 2: 'key'")
    first, second, *_, last = ending.text.splitlines()
    assert (first, second) == ("error on rank 1 of 2:", "Traceback (most recent call last):")
    assert last == "KeyError: 'key'"


def interrupt() -> int:
    raise KeyboardInterrupt


class NoException(BaseException):
    pass


def raise_no_exception() -> int:
    raise NoException("as torch's checkpoints do")


def test_guarded_returns_what_the_call_returns(capfd):
    assert guarded(lambda: 7) == 7
    assert capfd.readouterr().err == ""


def test_guarded_says_nothing_of_ctrl_c(capfd):
    assert guarded(interrupt) == 130
    assert capfd.readouterr().err == ""


def test_guarded_catches_what_is_no_exception_but_lets_an_exit_pass(capfd):
    assert guarded(raise_no_exception) == 1
    assert capfd.readouterr().err.endswith("NoException: as torch's checkpoints do\n")
    with pytest.raises(SystemExit):
        guarded(lambda: exit(0))


@pytest.mark.parametrize(("rank", "waits"), [("0", False), ("2", True)])
def test_rank_0_is_the_first_to_tell_a_users_mistake(rank, waits, monkeypatch, capfd):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setitem(os.environ, "RANK", rank)
    assert guarded(lambda: int(torch.empty(2**48)[0])) == 3
    assert bool(waited) == waits
    assert capfd.readouterr().err.startswith("error: out of memory")
