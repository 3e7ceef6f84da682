"""Work that ranks do in a checkpoint, which fails on all of them if it fails on one."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.base.process.ending import MAKE_ROOM, RunError, is_full
from shardwise.base.process.watchdog import beat
from shardwise.parallel.reduce import from_every_rank


def together(
    work: Callable[[], Any], group: dist.ProcessGroup, name: str, make_room: str = MAKE_ROOM
) -> list[Any]:
    """Return what `work` returns on every rank; RunError on every rank if it failed on one.

    The watchdog times how long a rank waits here for others; it pauses only while the rank itself
    reads or writes files. `name` is that of what could not be written, `make_room` the way out
    where there is no room.
    """
    result, reason = None, None
    try:
        result = work()
    except Exception as error:
        reason = _reason(error, make_room)
    results = from_every_rank((result, reason), group)
    beat()
    if reasons := [reason for _, reason in results if reason is not None]:
        raise RunError(f"{name} could not be written: {min(reasons)[1]}")
    return [result for result, _ in results]


def _reason(error: Exception, make_room: str) -> tuple[int, str]:
    """Return why something could not be written, with a way out, behind a rank among reasons.

    Reasons of the operating system (0) come before others (1), which often follow from them.
    """
    if not isinstance(error, OSError):
        return 1, str(error) or type(error).__name__
    reason = str(error.strerror or error)
    if is_full(error):
        return 0, f"{reason}; {make_room}"
    file = f": {error.filename}" if error.filename else ""
    return 0, f"{reason}{file}; correct that, then resume with --resume latest-good"
