"""The screen: a live line in a terminal, a few plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from shardwise.training.progress import Progress


def report(progress: Progress) -> None:
    with progress:
        progress.message("start [bold]")
        progress.update(1, 3.14159)
        progress.update(2, 2.5, 12345.6, 3 * 2**29)


@pytest.mark.parametrize("force_colour", [False, True], ids=["", "FORCE_COLOR"])
def test_outside_a_terminal_only_messages_and_the_last_state(force_colour, monkeypatch):
    if force_colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    report(Progress(4, stream=stream))
    # 3 * 2^29 bytes are 1.5 GiB.
    assert re.sub(r"(?m)^[\d:]{8} ", "TIME ", stream.getvalue()).splitlines() == [
        "start [bold]",
        "TIME step 1/4  loss 3.1416",
        "TIME step 2/4  loss 2.5000 · 12,346 tokens/s · 1.50 GiB",
    ]


def timed(start: datetime, **options: Any) -> tuple[Progress, Callable[[float], None]]:
    """Progress whose clocks stand at `start` until the function that is returned moves them."""
    seconds = 0.0

    def move(by: float) -> None:
        nonlocal seconds
        seconds += by

    progress = Progress(
        **options, clock=lambda: seconds, now=lambda: start + timedelta(seconds=seconds)
    )
    return progress, move


def test_outside_a_terminal_a_line_is_printed_at_once_and_as_often_as_asked():
    stream, evening = io.StringIO(), datetime(2026, 5, 1, 19, 46, 0)
    progress, move = timed(evening, total_steps=8, stream=stream, every_seconds=30)
    move(10)  # the model was loaded, which no step takes
    with progress:
        for step in range(3, 9):  # a resumed run begins at step 3
            move(20)
            progress.update(step, step)
    # Of 20 seconds each: 5, 3 and 1 steps are left after the lines.
    assert stream.getvalue().splitlines() == [
        "19:46:30 step 3/8  loss 3.0000",
        "19:47:10 step 5/8  loss 5.0000 · ends about 19:48",
        "19:47:50 step 7/8  loss 7.0000 · ends about 19:48",
        "19:48:10 step 8/8  loss 8.0000",
    ]


def test_an_end_on_another_day_has_its_date():
    stream = io.StringIO()
    late = datetime(2026, 12, 31, 23, 0)
    progress, move = timed(late, total_steps=100, stream=stream, every_seconds=0)
    with progress:
        for step in (1, 2):
            move(1800)
            progress.update(step, 1.0)
    assert stream.getvalue().splitlines()[1] == (
        "00:00:00 step 2/100  loss 1.0000 · ends about 2027-01-03 01:00"
    )


def test_a_long_message_stays_one_line_outside_a_terminal():
    stream = io.StringIO()
    Progress(4, stream=stream).message("word " * 100)
    assert stream.getvalue() == "word " * 100 + "\n"


def test_a_run_without_a_step_has_no_last_state():
    stream = io.StringIO()
    with Progress(4, stream=stream):
        pass
    assert stream.getvalue() == ""


def test_other_ranks_are_silent():
    stream = io.StringIO()
    report(Progress(4, show=False, stream=stream))
    assert stream.getvalue() == ""


def test_the_last_state_is_shown_when_a_run_fails():
    def fail(progress: Progress) -> None:
        with progress:
            progress.update(1, 3.0)
            raise ValueError("broken")

    stream = io.StringIO()
    with pytest.raises(ValueError, match="broken"):
        fail(Progress(4, stream=stream))
    assert stream.getvalue().endswith(" step 1/4  loss 3.0000\n")


def on_a_terminal(code: str) -> str:
    """What a program writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "20"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, env=env) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # Linux's way to say that the other end is closed
                break
            if not chunk:
                break
            written += chunk
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


def test_a_terminal_has_a_live_line_that_stays():
    code = f"""
from shardwise.training.progress import Progress
with Progress(2) as progress:
    progress.update(1, 3.0, 1000.0, {2**30})
    progress.message("between")
    progress.update(2, 2.5, 2000.0, {2**31})
"""
    written = on_a_terminal(code)
    assert "between" in written
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is on at the end
    lines = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", written).replace("\r", "\n").split("\n")
    last = [line for line in lines if line.strip()][-1]
    assert re.fullmatch(
        r"step 2/2 ━+ loss 2\.5000 · 2,000 tokens/s · 2 GiB · time left 0:00:00 *", last
    )
