"""The batch script that runs a run file under Slurm, and starts it again until it is finished.

A job may end before its run: at its time limit, when it is preempted, or when a node dies. Slurm
queues it again after the latter two. Before the time limit it sends SIGUSR1 to the processes, which
finish their step, save and end; the script then queues the job again, as it does after a failure.
Each start resumes from the last whole checkpoint.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.config import RunConfig
from shardwise.process.ending import OUT_OF_MEMORY, USER_ERROR

SCRIPT = "job.sbatch"
"""The name of the script in the output folder."""
RAISED = 200
"""What a rank adds to its exit code after a mistake in the run file, or for lack of memory."""
_RANK = (
    'trap : USR1 TERM; "$@"; code=$?; '
    f"case $code in {USER_ERROR}|{OUT_OF_MEMORY}) exit $((code + {RAISED})) ;; esac; exit $code"
)
"""What a rank runs: the command given as arguments. Signals are for the command, not the shell."""


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the batch script of a run, whose folders and interpreter every node can read."""
    launch = cfg.launch
    folder = Path(cfg.training.output_dir).absolute()
    command = [sys.executable, "-m", "shardwise", "train", run_file, *overrides]
    lines = [
        "#!/bin/bash",
        "# Written by `shardwise launch`. Start it with `sbatch`, or by that command again.",
        *(f"#SBATCH --{option}" for option in _options(cfg, folder)),
        "",
        *(f"export {key}={shlex.quote(value)}" for key, value in launch.environment.items()),
        *launch.before,
        "",
        "# Slurm sends it where somebody cancels the job, or where it queues the job again itself.",
        "trap ended=1 TERM",
        "# With one process dead, all end by SIGTERM: none could go on. srun ends with the highest",
        f"# code, at least 143; a rank whose run would end alike again adds {RAISED} to its own.",
        f"rank={shlex.quote(_RANK)}",
        f'srun --kill-on-bad-exit=1 bash -c "$rank" rank {shlex.join(command)} --resume auto',
        "code=$?",
        '[ -z "${ended:-}" ] || exit "$code"',
        f'[ "$code" -lt {RAISED} ] || exit $((code - {RAISED}))',
        '[ "$code" -ne 0 ] || exit 0',
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {launch.restarts} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _options(cfg: RunConfig, folder: Path) -> Iterator[str]:
    """Yield the options of sbatch, without their dashes.

    Slurm reads `%` in a file's name as the start of a pattern, and splits a line at spaces outside
    quotes.
    """
    launch = cfg.launch
    yield f"job-name={_quoted(launch.options.get('job-name') or folder.name)}"
    yield f"nodes={'' if launch.min_nodes is None else f'{launch.min_nodes}-'}{launch.nodes}"
    yield f"ntasks-per-node={launch.processes}"
    yield f"chdir={_quoted(Path.cwd())}"
    yield f"output={_quoted(str(folder).replace('%', '%%'))}/slurm-%j.log"
    yield "open-mode=append"
    yield "requeue"
    if launch.time is not None:
        yield f"time={launch.time}"
        yield f"signal=USR1@{launch.ahead_seconds}"
    for name, value in launch.options.items():
        if name != "job-name":
            yield name if value is None else f"{name}={_quoted(value)}"


def _quoted(value: object) -> str:
    return shlex.quote(str(value))
