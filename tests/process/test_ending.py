"""What an exception comes to: exit code, reason, and what a person reads."""

from __future__ import annotations

import errno
import os
import signal
from functools import partial
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from shardwise.assembly import build
from shardwise.base.process.ending import Ending, Stopped, explain, report_error
from shardwise.config import UserError


def raised_by(call) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (each test checks what it is)
        call()
    return caught.value


def test_a_users_mistake_is_one_line():
    ending = explain(
        UserError("data.train: no file\n  matches x*; check the pattern"), " on rank 0 of 2"
    )
    message = "data.train: no file matches x*; check the pattern"
    assert ending == Ending(2, message, f"error: {message}", "unsupported")


def test_a_run_that_was_asked_to_stop_names_its_checkpoint_and_how_to_resume():
    ending = explain(Stopped(signal.SIGTERM, 12, "runs/x/checkpoints/step-12"))
    assert (ending.exit_code, ending.status, ending.text) == (128 + 15, "stopped", ending.reason)
    for fragment in ("SIGTERM", "step 12", "runs/x/checkpoints/step-12", "--resume latest"):
        assert fragment in ending.text


def test_the_cpus_allocator_is_recognised_for_real():
    # 2^48 float32 are 2^50 bytes, more than a process can address, so this fails on every machine.
    ending = explain(raised_by(lambda: torch.empty(2**48)), " on rank 1 of 2")
    assert ending.exit_code == 3
    assert ending.reason == f"out of memory on rank 1 of 2: tried to allocate {2**50} bytes"
    assert ending.text.startswith(f"error: {ending.reason}; lower training.micro_batch_size")


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
        (RuntimeError("can't start new thread"), "out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (
            RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
            "out of memory",
        ),
    ],
)
def test_out_of_memory(error, reason):
    assert (explain(error).exit_code, explain(error).reason) == (3, reason)


def test_a_model_that_does_not_fit_is_not_answered_by_smaller_batches():
    def no_memory() -> None:
        raise MemoryError

    any_run = mock.MagicMock()
    without_memory = partial(build.build, any_run, any_run, describe=lambda *_: no_memory())
    building = explain(raised_by(without_memory))
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
    assert ending.text.startswith(f"error: {ending.reason}; make room")
    assert "runs/x/metrics.jsonl" in ending.reason
    assert "--resume latest-good" in ending.text


def test_a_full_disk_is_recognised_whoever_writes():
    ending = explain(
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert "make room" in ending.text
    assert ending.text.count("\n") == 0


def test_ranks_that_wait_in_vain_are_one_line():
    error = RuntimeError("[unbound_buffer.cc:129] Timed out waiting 20000ms for send operation")
    ending = explain(error, " on rank 0 of 2")
    assert ending.status == "timeout"
    assert "20 seconds on rank 0 of 2; " in ending.text
    assert "\n" not in ending.text


def test_anything_else_comes_with_its_traceback():
    ending = explain(raised_by(lambda: {}["key"]), " on rank 1 of 2")
    assert (ending.exit_code, ending.reason) == (1, "KeyError on rank 1 of 2: 'key'")
    first, second, *_, last = ending.text.splitlines()
    assert first == "error on rank 1 of 2: KeyError: 'key'"
    assert second == "Traceback (most recent call last):"
    assert last == "KeyError: 'key'"


class NoException(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "exit_code", "last_line"),
    [
        (UserError("no file; give one"), 2, "error: no file; give one\n"),
        (NoException("as torch's checkpoints do"), 1, "NoException: as torch's checkpoints do\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_ends_a_command_with_its_exit_code(error, exit_code, last_line, capfd):
    assert report_error(error) == exit_code
    printed = capfd.readouterr().err
    assert printed.endswith(last_line)
    assert bool(printed) == bool(last_line)


def test_an_exit_is_raised_again():
    with pytest.raises(SystemExit) as raised:
        report_error(SystemExit(5))
    assert raised.value.code == 5


@pytest.mark.parametrize(("rank", "waits"), [("0", False), ("2", True)])
def test_rank_0_is_the_first_to_report_a_users_mistake(rank, waits, monkeypatch, capfd):
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setitem(os.environ, "RANK", rank)
    assert report_error(MemoryError()) == 3
    assert bool(waited) == waits
    assert capfd.readouterr().err.startswith("error: out of memory")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files", "x.jsonl"),
        RuntimeError("[gloo/transport/tcp/device.cc:84] socket: Too many open files"),
    ],
)
def test_too_many_open_files_are_one_line(error):
    ending = explain(error)
    assert (ending.exit_code, ending.reason) == (1, "too many open files")
    assert "ulimit -n" in ending.text
    assert "\n" not in ending.text
