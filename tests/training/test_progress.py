"""The screen: a live line in a terminal, a few plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

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
    assert stream.getvalue() == "start [bold]\nstep 2/4  loss 2.5000 · 12,346 tokens/s · 1.50 GiB\n"


def test_outside_a_terminal_a_line_is_printed_as_often_as_asked():
    now = 100.0
    stream = io.StringIO()
    progress = Progress(8, stream=stream, every_seconds=30, clock=lambda: now)
    now = 110.0  # the model was loaded for ten seconds, which no step takes
    with progress:
        for step in range(3, 9):  # a resumed run begins at step 3
            now += 20
            progress.update(step, step)
    # Of 20 seconds each: 4, 2 and 0 steps are left after steps 4, 6 and 8.
    assert stream.getvalue().splitlines() == [
        "step 4/8  loss 4.0000 · time left 1 min 20 s",
        "step 6/8  loss 6.0000 · time left 40 s",
        "step 8/8  loss 8.0000 · time left 0 s",
    ]


def test_after_the_last_line_the_end_says_what_came_later():
    now = 0.0
    stream = io.StringIO()
    with Progress(2, stream=stream, every_seconds=30, clock=lambda: now) as progress:
        now = 30.0
        progress.update(1, 3.0)
        progress.update(2, 2.0)
    assert stream.getvalue() == "step 1/2  loss 3.0000 · time left 30 s\nstep 2/2  loss 2.0000\n"


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
    assert stream.getvalue() == "step 1/4  loss 3.0000\n"


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
