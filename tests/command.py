"""Run `shardwise ...` in a forked process, which need not import what this one has imported.

Beside a new interpreter it differs in nothing that a test here looks at: streams are files,
warnings and logging are as Python starts with, signals have their usual handlers. What is said of
the start itself needs a real command.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed import PATIENCE

_IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""By Python, where nothing is asked of it."""


def run_command(
    arguments: Sequence[str],
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
    patience: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """What `shardwise ARGUMENTS` prints and returns; its process has `env`, and calls `before` and
    `after`. TimeoutError if it does not end in `patience` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_main, args=(arguments, env or {}, before, after, streams))
        process.start()
        process.join(patience)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"shardwise {' '.join(arguments)} did not end in {patience} seconds")
        assert process.exitcode is not None
        out, err = (Path(stream).read_text(encoding="utf-8") for stream in streams)
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _main(
    arguments: Sequence[str],
    env: dict[str, str],
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    streams: Sequence[str],
) -> None:
    from shardwise.cli import main

    os.environ.update(env)
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Those of pytest write into what it captures.
    sys.stdin, sys.stdout, sys.stderr = (
        sys.__stdin__,
        *(os.fdopen(number, "w", buffering=1) for number in (1, 2)),
    )
    gc.freeze()  # what was inherited, such as process groups, is not this process's to collect
    sys.argv = ["shardwise", *arguments]
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for category in _IGNORED:
        warnings.simplefilter("ignore", category)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if before is not None:
        before()
    code = main(arguments)
    if after is not None:
        after()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
