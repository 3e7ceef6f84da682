"""Where the checkpoints of a run lie in host memory. Needs no torch.

A file in the output folder has a name drawn at random. On each node, a private folder of that name
in memory outlives the processes. Without the file, as in a new run, nobody finds it.
"""

import os
import re
import shutil
from pathlib import Path

from shardwise.base.process.ending import RunError
from shardwise.base.safety import write_atomically
from shardwise.checkpoint.folder import MEMORY_NAME


def root() -> Path:
    """Return the folder of this node's memory: SHARDWISE_MEMORY, or Linux's /dev/shm."""
    return Path(os.environ.get("SHARDWISE_MEMORY") or "/dev/shm")


def has_name(output_dir: str | Path) -> bool:
    """Return whether a run has kept checkpoints in memory, and has not ended since."""
    return (Path(output_dir) / MEMORY_NAME).exists()


def find(output_dir: str | Path) -> Path | None:
    """Return the folder of a run on this node, whether or not it exists; None without a name."""
    try:
        name = (Path(output_dir) / MEMORY_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    # Whoever may write in the output folder must not lead this anywhere else.
    return root() / f"shardwise-{name}" if re.fullmatch(r"[0-9a-f]{32}", name) else None


def draw_name(output_dir: str | Path) -> None:
    """Give the folders of a run a name, unless it has one."""
    if find(output_dir) is None:
        write_atomically(Path(output_dir) / MEMORY_NAME, os.urandom(16).hex())


def make_private(folder: Path) -> None:
    """Make the folder on this node; RunError where it is not this user's alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(f"{folder} is not a folder of this user alone; remove it")


def forget(output_dir: str | Path) -> None:
    """Remove what a run has in this node's memory."""
    if (folder := find(output_dir)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
