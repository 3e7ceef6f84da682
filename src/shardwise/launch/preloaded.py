"""A process that has imported what runs need, and forks itself for each: `python -m shardwise.launch.preloaded FD`.

Whoever starts it holds the other end of the socket FD, of messages in JSON. The first one from here says whether it
forks at all. Then each request, `{"arguments": ["train", "run.yaml", ...]}` with two file descriptors, a log and the
reading end of a pipe, is answered by `{"group": G}` as soon as the run has a process group, and by `{"code": C}` at its
end: its exit code, negative for a signal. The group lives until the pipe closes: as it does when its owner dies.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any, NoReturn

MODULES = ("shardwise.training.loop", "shardwise.parallel.mesh", "shardwise.cli")
"""What every run imports."""
LONGEST_MESSAGE = 2**16


def main() -> None:
    """Serve until standard input closes, or the other end of the socket does."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _leash(0, channel)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # as the command does, before torch is imported
    gc.disable()  # it would look through all that is imported again and again
    for module in MODULES:
        importlib.import_module(module)
    gc.enable()
    from shardwise.metrics.live_tensors import freeze_imports

    gc.collect()
    freeze_imports()
    _send(channel, forks=not _sees_gpu())
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, LONGEST_MESSAGE, 2)
        if not message:
            return
        log, lease = descriptors
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run(json.loads(message)["arguments"], channel, log, lease)
        os.close(log)
        os.close(lease)
        _send(channel, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _sees_gpu() -> bool:
    """Whether there is a GPU: a process that has looked may not fork others that use it, so another one looks."""
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda.is_available())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _run(arguments: list[str], channel: socket.socket, log: int, lease: int) -> NoReturn:
    """Become `shardwise` with these arguments, in a session and a process group of its own."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _leash(lease, channel)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.close(lease)
    _send(channel, group=os.getpid())
    channel.close()
    sys.argv[1:] = arguments
    runpy.run_module("shardwise", run_name="__main__", alter_sys=True)
    sys.exit()


def _leash(lease: int, channel: socket.socket) -> None:
    """Leave a process beside this one that kills their process group as soon as the pipe `lease` closes."""
    if os.fork() == 0:
        channel.close()
        os.read(lease, 1)  # nobody writes
        os.killpg(0, signal.SIGKILL)


def _send(channel: socket.socket, **message: Any) -> None:
    channel.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
