"""A server that has imported what runs need and forks a process for each run.

`python -m shardwise.lab.preloaded FD` speaks JSON over the socket FD, whose other end the
process that started it holds. The first message says whether the server forks at all. A request is
`{"arguments": ["train", "run.yaml", ...]}` with two file descriptors, a log and the reading end of
a pipe. The answers are `{"group": G}` as soon as the run has a process group, and `{"code": C}` at
its end, the exit code (negative for a signal). The group is killed when the pipe closes, which
also happens when its owner dies.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any, NoReturn

MODULES = (
    *("shardwise.training.loop", "shardwise.lab.instruments"),
    *("shardwise.parallel.mesh", "shardwise.commands.cli"),
)
"""The modules that every run imports."""
LONGEST_MESSAGE = 2**16
"""Bytes of a message; longer than any command line of a bench."""


def main() -> None:
    """Serve until standard input or the other end of the socket closes."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _kill_when_closed(0, channel)
    # As the command does, before torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    gc.disable()  # it would look through all imported modules again and again
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
        log, pipe = descriptors
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run(json.loads(message)["arguments"], channel, log, pipe)
        os.close(log)
        os.close(pipe)
        _send(channel, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _sees_gpu() -> bool:
    """Return whether there is a GPU.

    A fork looks, since CUDA does not work in the forks of a process that has looked.
    """
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda.is_available())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _run(arguments: list[str], channel: socket.socket, log: int, pipe: int) -> NoReturn:
    """Become `shardwise` with these arguments, in a session and a process group of its own."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _kill_when_closed(pipe, channel)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.close(pipe)
    _send(channel, group=os.getpid())
    channel.close()
    sys.argv[1:] = arguments
    runpy.run_module("shardwise", run_name="__main__", alter_sys=True)
    sys.exit()


def _kill_when_closed(pipe: int, channel: socket.socket) -> None:
    """Fork a watcher that kills its process group, this process's too, when `pipe` closes."""
    if os.fork() == 0:
        channel.close()
        os.read(pipe, 1)  # nobody writes to it
        os.killpg(0, signal.SIGKILL)


def _send(channel: socket.socket, **message: Any) -> None:
    channel.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
