"""The batch script that runs a run file under Slurm, and starts it again until it is finished.

A job may end before its run: at its time limit, when it is preempted, or when a node dies. Slurm
queues it again after the latter two. Before the time limit it sends SIGUSR1 to the processes, which
finish their step, save and end; the script then queues the job again, as it does after a failure.
Each start resumes from the last whole checkpoint. `launch.restarts` bounds the failures.
"""

import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.base.process.ending import OUT_OF_MEMORY, USER_ERROR
from shardwise.base.safety import check_no_links, write_atomically
from shardwise.config import Launch, RunConfig, UserError, require

SCRIPT = "job.sbatch"
"""The name of the script in the output folder."""
_FORGET = (
    "import sys; from shardwise.checkpoint import memory_folder as memory, output_lock as lock; "
    "lock.is_held(sys.argv[1]) or memory.forget(sys.argv[1])"
)
"""Each node runs this in Python when a run has failed for good. If another run holds the folder,
which is why this one was refused, nothing is removed."""
RAISED = 200
"""Number that a rank adds to its exit code where the job must not be queued again."""
SAVED = 199
"""The exit code of a rank that has saved because its time is nearly up. Like RAISED it is above the
codes of all that ends by a signal."""


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the batch script of a run, whose folders and interpreter every node can read."""
    launch = cfg.launch
    tasks = f"ntasks-per-node={launch.processes}"
    if launch.min_nodes is None:
        size, srun_options = [f"nodes={launch.nodes}", tasks], []
    else:  # sbatch would take so many tasks for the fewest nodes, and give no node beyond them
        size, srun_options = [f"nodes={launch.min_nodes}-{launch.nodes}"], [f"--{tasks}"]
        # Without a number of tasks there is room for them on whole nodes only.
        size += [] if "exclusive" in launch.slurm else ["exclusive"]
    return job(
        launch,
        Path(cfg.training.output_dir).absolute(),
        ["-m", "shardwise", "train", run_file, *overrides, "--resume", "auto"],
        size,
        final=(USER_ERROR, OUT_OF_MEMORY),
        srun_options=srun_options,
        at_end=_FORGET if cfg.training.memory_checkpoint_every else None,
        saves=True,
    )


def run(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> int:
    """Write the script into the output folder, and submit it."""
    folder = Path(cfg.training.output_dir).absolute()
    number = submit(script(cfg, run_file, overrides), folder)
    print(f"submitted job {number}: {folder}/slurm-{number}.log; to end it: scancel {number}")
    return 0


def submit(text: str, folder: Path) -> str:
    """Write a script into a folder, submit it and return the job's number.

    UserError where there is no sbatch, or where it refuses the script.
    """
    require(
        shutil.which("sbatch") is not None,
        "no command sbatch here: is this a node of a Slurm cluster? --dry-run prints the script",
    )
    file = folder / SCRIPT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_no_links(folder)  # Slurm would follow one with the name of its log
        write_atomically(file, text)
    except OSError as error:
        raise UserError(
            f"{file}: cannot write it ({error.strerror}); --dry-run prints it"
        ) from None
    submitted = subprocess.run(
        ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
    )
    if submitted.returncode:
        raise UserError(
            f"sbatch refused {file}: {submitted.stderr.strip()}; change the section "
            "launch, or see whether `sinfo` finds a cluster"
        )
    number = submitted.stdout.strip().partition(";")[0]
    require(number.isdigit(), f"sbatch took {file} and gave no number of a job: {number!r}")
    return number


def job(
    launch: Launch,
    folder: Path,
    arguments: Sequence[str],
    size: Sequence[str],
    final: Sequence[int],
    array: Sequence[str] = (),
    srun_options: Sequence[str] = (),
    at_end: str | None = None,
    saves: bool = False,
) -> str:
    """Return a batch script that runs Python with these arguments as one task or many.

    `size` are the options of sbatch for nodes and tasks, `srun_options` further ones of srun. The
    job is queued again after every exit code but 0 and `final`: after `launch.restarts` failures at
    most and, where it `saves` when its time is nearly up, as often as it does so. With `array` it
    is one job for each of its words, which the command gets as its last argument. When it fails for
    good, every node runs `at_end` in Python, with the folder as argument.
    """
    require(
        "\n" not in f"{Path.cwd()}{folder}",
        f"{Path.cwd()} or {folder} has a line break, with which a line of the script would end; "
        "rename it",
    )
    options = [*size, f"array=0-{len(array) - 1}"] if array else size
    log = "slurm-%A_%a.log" if array else "slurm-%j.log"
    container_options, before_python = _container(launch, folder)
    command = shlex.join([*before_python, *arguments])
    number = "$SLURM_JOB_ID"  # of an array, that of the last job is the array's own
    if array:
        command += ' "${words[SLURM_ARRAY_TASK_ID]}"'
        number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    leave, at_last = "exit", []
    if at_end is not None:
        python = shlex.join([*before_python, "-c", at_end, str(folder)])
        node_options = '--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'
        clean = f"srun {node_options} {shlex.join(container_options)} {python}"
        leave, at_last = "fail", [f'fail() {{ {clean}; exit "$1"; }}']
    lines = [
        "#!/bin/bash",
        "# Written by shardwise. Start it with `sbatch`, or by the same command again.",
        *(f"#SBATCH --{option}" for option in _options(launch, folder, options, log)),
        "",
        *(f"export {key}={shlex.quote(value)}" for key, value in launch.environment.items()),
        "# srun takes no --cpus-per-task from sbatch (since Slurm 22.05), but this variable. It",
        "# gives the processes all variables, whatever --export kept from this script.",
        "export SLURM_EXPORT_ENV=ALL",
        'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then',
        '  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        "fi",
        # A line that fails ends the job before a process has started.
        *(["set -e", *launch.before, "set +e"] if launch.before else []),
        "",
        "# Slurm sends it where somebody cancels the job, or where it queues the job again itself.",
        "trap ended=1 TERM",
        "# With one process dead, all end by SIGTERM: none could go on. srun ends with the highest",
        f"# code, at least 143; a rank whose run would end alike again adds {RAISED} to its own.",
        f"rank={shlex.quote(_rank(final, saves))}",
        *([f"words=({shlex.join(array)})"] if array else []),
        f'failures={shlex.quote(str(folder))}/"slurm-{number}.failures"',
        f'srun {shlex.join([*srun_options, *container_options])} bash -c "$rank" rank {command}',
        "code=$?",
        *at_last,
        '[ -z "${ended:-}" ] || exit "$code"',
        f'[ "$code" -lt {RAISED} ] || {leave} $((code - {RAISED}))',
        '[ "$code" -ne 0 ] || exit 0',
        f'if [ "$code" -ne {SAVED} ]; then  # counted; without room to count, the job ends',
        f'  echo "exit code $code" >> "$failures" || {leave} "$code"',
        f'  [ "$(wc -l < "$failures")" -le {launch.restarts_of_launch} ] || {leave} "$code"',
        "fi",
        f'scontrol requeue "{number}"',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _rank(final: Sequence[int], saves: bool) -> str:
    """Return what a rank runs: the command given as arguments. Signals are for the command."""
    codes = "|".join(map(str, final))
    stopped = f"{128 + signal.SIGUSR1}) exit {SAVED} ;; " if saves else ""
    return (
        'trap : USR1 TERM; "$@"; code=$?; '
        f"case $code in {codes}) exit $((code + {RAISED})) ;; {stopped}esac; exit $code"
    )


def _options(launch: Launch, folder: Path, size: Sequence[str], log: str) -> Iterator[str]:
    """Yield the options of sbatch, without their dashes.

    Slurm reads `%` in a file's name as the start of a pattern, and splits a line at spaces outside
    quotes.
    """
    yield f"job-name={_quoted(launch.slurm.get('job-name') or folder.name)}"
    yield from size
    yield f"chdir={_quoted(Path.cwd())}"
    yield f"output={_quoted(str(folder).replace('%', '%%'))}/{log}"
    yield "open-mode=append"
    yield "requeue"
    if launch.time is not None:
        yield f"time={launch.time}"
    yield f"signal=USR1@{launch.ahead_seconds}"  # of the partition's limit, if there is no other
    for name, value in launch.slurm.items():
        if name != "job-name":
            yield name if value is None or value is True else f"{name}={_quoted(value)}"


def _container(launch: Launch, folder: Path) -> tuple[list[str], list[str]]:
    """Return the options of srun, and the words that end with Python's command.

    A container sees the current folder and the output folder under their own names.
    """
    options, image = ["--kill-on-bad-exit=1"], launch.container
    if image is None:
        return options, [sys.executable]
    here = Path.cwd()
    mounts = {str(here): str(here), str(folder): str(folder), **launch.mounts}
    binds = ",".join(f"{source}:{path}" for path, source in mounts.items())
    if image.endswith(".sif"):
        apptainer = ["apptainer", "exec", "--nv", "--bind", binds, "--pwd", str(here), image]
        return options, [*apptainer, "python"]
    options += [f"--container-image={image}", f"--container-mounts={binds}"]
    return [*options, f"--container-workdir={here}"], ["python"]


def _quoted(value: object) -> str:
    return shlex.quote(str(value))
