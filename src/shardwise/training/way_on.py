"""The way on after a run that has ended early: from which checkpoint, and with which keys."""

import re
import traceback
from dataclasses import replace

from shardwise.base.process.ending import USER_ERROR, Ending
from shardwise.checkpoint.folder import complete, step_of
from shardwise.checkpoint.output_dir import results
from shardwise.config import RunConfig
from shardwise.data.record import BadDocument

_PLACE = re.compile(r"(:\d+|: row \d+|: record \d+[^:]*): ")
"""The place of a document in an error, behind the name of its file."""


def after_save(cfg: RunConfig, ending: Ending, has_saved: bool) -> Ending:
    """Return an ending that says which step is saved, and how the run resumes from it.

    `has_saved`: a checkpoint was saved since the start. Without one a mistake of the user may have
    to do with the resume itself, so that it says nothing of this. Nor does an ending that names a
    way to resume, or one whose results were saved before.
    """
    folder = cfg.training.output_dir
    checkpoints = complete(folder)
    is_known = not ending.text or "--resume" in ending.text
    is_mistake = ending.exit_code == USER_ERROR and not has_saved
    if is_known or is_mistake or not checkpoints or results(folder):
        return ending
    way = f"step {step_of(checkpoints[0])} is saved: resume with --resume latest"
    mark = "\n" if "\n" in ending.text else "; "  # a traceback has lines
    return replace(ending, text=f"{ending.text}{mark}{way}", reason=f"{ending.reason}; {way}")


def after_document(cfg: RunConfig, ending: Ending, error: BaseException) -> Ending:
    """Return the ending of a run that cannot use a document: such documents may be left out."""
    if cfg.data.on_error == "skip" or not _is_of_document(error):
        return ending
    keys = "set data.on_error: skip"
    if complete(cfg.training.output_dir):
        keys = "--resume latest --data.on_error=skip"
    elif cfg.training.resume is not None:
        keys = f"--resume {cfg.training.resume} --data.on_error=skip"
    way = f", or leave such documents out: {keys}"
    return replace(ending, text=ending.text + way, reason=ending.reason + way)


def _is_of_document(error: BaseException) -> bool:
    """Return whether an error is of a document, which `data.on_error` could leave out."""
    cause = error.__context__
    if isinstance(error, BadDocument) or isinstance(cause, BadDocument):
        return True
    # The error of a worker process has lost its cause, and the loader raises it.
    trace = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    readers = ("shardwise.data.loader", "shardwise.data.dealing")
    is_read = bool(trace) and trace[-1].f_globals.get("__name__") in readers
    is_template = "the chat template needs too much" in str(error)
    return is_read and not is_template and _PLACE.search(str(error)) is not None
