"""One run at a time in an output folder.

The system frees the lock when the last process of the run has ended.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from shardwise.base.process.ending import RunError, is_full
from shardwise.base.process.world import World
from shardwise.config import UserError

LOCK = ".lock"
"""The file in the output folder that is locked. It is never removed: two runs could lock two."""
WAIT_SECONDS = 10.0
"""How long a run waits for the lock: ranks of a run that was just killed may still be ending."""
LEASE_SECONDS = 150.0
"""How long it waits for another host: a file server keeps the locks of one that has died, NFS 4 for
90 seconds by default."""
_LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Lock:
    """The open file of a lock.

    A process that is forked, or gets this when it is spawned, holds the lock too.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, duplicate: Any) -> None:
        self._descriptor = duplicate.detach()

    def close(self) -> None:
        """Release the lock in this process only."""
        os.close(self._descriptor)


@contextlib.contextmanager
def locked(folder: Path, world: World | None, env: Mapping[str, str]) -> Generator[Lock | None]:
    """Keep other runs out of a folder that exists; UserError names a run that holds the lock.

    RunError names one on another host, which may have died: a later start may get the lock.
    `world`: this process's place among ranks, where a launcher gave it one. The first rank holds
    the lock, or the launcher and with it the ranks that it starts. The other ranks of torchrun or
    srun yield None after they have seen that no other run holds it.
    """
    group = ""
    if world is not None:
        group = f"{world.init_method} {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    if world is not None and world.rank > 0:
        _check_is_ours(folder, group)
        yield None
        return
    descriptor = _open(folder)
    try:
        _acquire(descriptor, folder)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({**holder, "group": group}).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise _cannot_write(folder, error) from None
    except BaseException:
        os.close(descriptor)
        raise
    lock = Lock(descriptor)
    try:
        yield lock
    finally:
        lock.close()  # not unlocked: a rank that has not ended still holds it


def _open(folder: Path) -> int:
    try:
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _cannot_write(folder, error) from None


def _acquire(descriptor: int, folder: Path) -> None:
    """Lock an open file, which others may hold for a while; the error of `_in_use` after that.

    Where the file system has no locks, the run continues without one and prints a line.
    """
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            is_here = _holder(folder).get("host") == socket.gethostname()
            if time.monotonic() - start > (WAIT_SECONDS if is_here else LEASE_SECONDS):
                raise _in_use(folder) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _LOCKS_UNSUPPORTED:
                raise
            print(
                f"note: the file system of {folder} has no locks ({error.strerror}): nothing keeps "
                "a second run out",
                file=sys.stderr,
                flush=True,
            )
            return


def _check_is_ours(folder: Path, group: str) -> None:
    """Raise the error of `_in_use` if another run holds the lock.

    If this run's first rank has not come yet, nobody holds it.
    """
    # Later than the first rank raises the same, on whatever host it is.
    deadline = time.monotonic() + LEASE_SECONDS + 1
    while _holder(folder).get("group") != group and is_held(folder):
        if time.monotonic() > deadline:
            raise _in_use(folder)
        time.sleep(0.1)


def is_held(folder: str | Path) -> bool:
    """Return whether a run is writing in a folder."""
    try:
        with (Path(folder) / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _holder(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):  # it is just being written
        return {}
    return content if isinstance(content, dict) else {}


def _in_use(folder: Path) -> UserError | RunError:
    holder = _holder(folder)
    host = holder.get("host")
    who = ""
    if holder:
        who = f" (process {holder.get('pid')} on {host}, since {holder.get('started')})"
    reason = f"training.output_dir {folder}: another run is writing there{who}"
    if host in (None, socket.gethostname()):
        return UserError(f"{reason}; wait for its end, or choose another folder")
    return RunError(
        f"{reason}; wait for its end, or choose another folder. If {host} has died, the file "
        "server still keeps its locks: NFS 3 does until that host is up again"
    )


def _cannot_write(folder: Path, error: OSError) -> OSError | UserError:
    if is_full(error):
        return error  # `ending.explain` gives the way out
    return UserError(
        f"training.output_dir {folder}: cannot write there ({error.strerror}); choose another "
        "folder"
    )
