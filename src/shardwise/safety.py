"""What keeps other people's files and folders from acting on this machine: docs/guides/security.md.

This file needs no torch.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from shardwise.config import Model, UserError


@functools.cache
def warn_of_code(model: Model) -> None:
    """Print on stderr, once a process, that code of the model's folder is about to run here."""
    if (
        not model.trust_remote_code
        or int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) > 0
    ):
        return
    folders = " and ".join(filter(None, (model.path, model.tokenizer)))
    print(
        f"warning: model.trust_remote_code is true: Python files of {folders} run here, with all "
        "that you may do on this machine",
        file=sys.stderr,
        flush=True,
    )


def cache_folder() -> Path:
    """Return the folder of this user for what was measured or compiled here; it may not exist."""
    return Path(os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise")


def private_folder(path: Path) -> Path:
    """Make a folder that only this user may write to; UserError where others may."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise UserError(
            f"{path}: cannot make the folder ({error.strerror}); set SHARDWISE_CACHE to another"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UserError(
            f"{path}: others may write to this folder, and what lies there is run; remove it, or "
            "set SHARDWISE_CACHE to a folder of your own"
        )
    return path


def check_no_links(folder: Path) -> None:
    """Raise UserError where a name in a folder is a link to a file, which a write would change."""
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, which would be written in its place; "
                "remove the link"
            )
