"""A sweep as an array of Slurm jobs, one for each cell, all of which write into one folder."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.base.process.ending import FAILED, OUT_OF_MEMORY, USER_ERROR
from shardwise.config import Launch, UserError, require
from shardwise.lab.benchmark.folder import locked
from shardwise.lab.benchmark.progress import result_table
from shardwise.lab.benchmark.runner import begin, select
from shardwise.lab.benchmark.sweep import Cell
from shardwise.launch import slurm


def script(path: str, out: str, only: Sequence[str], rerun: Sequence[str]) -> str:
    """Return the batch script of all selected cells. A cell that is done ends at once."""
    _, selected, _ = select(path, Path(out), only, rerun)
    cells = [cell for cell in selected if not cell.refusal]
    if not cells:
        raise UserError(f"none of the selected cells can run: {selected[0].refusal}")
    return _script(path, Path(out), cells)


def run(path: str, out: str, only: Sequence[str], rerun: Sequence[str]) -> int:
    """Submit a job for each selected cell that has rounds left; print what there is if none has."""
    folder = Path(out)
    sweep, selected, again = select(path, folder, only, rerun)
    with locked(folder):
        states = begin(folder, sweep, selected, again)
        left = [state.cell for state in states if state.remaining(sweep.record.rounds)]
        if not left:
            print(result_table([state.record for state in states if state.record is not None]))
            print(f"nothing is left to run; the page: shardwise report {out}")
            return 0
        number = slurm.submit(_script(path, folder, left), folder.absolute())
    print(
        f"submitted job {number}: {len(left)} cells, each in a job of its own; their output: "
        f"{folder.absolute()}/slurm-{number}_*.log; to end them: scancel {number}; "
        f"the page at any time: shardwise report {out}"
    )
    return 0


def name_of_job(environ: Mapping[str, str]) -> str:
    """Return how a record names the job and node that these variables of Slurm are of."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURMD_NODENAME")
    values = [environ.get(name) for name in names]
    require(None not in values, "--cell is what a job of --on slurm runs; leave it out")
    return "Slurm job {}_{} on {}".format(*values)


def _script(path: str, out: Path, cells: Sequence[Cell]) -> str:
    launches = [Launch(**cell.run.get("launch", {})) for cell in cells]
    launch = launches[0]
    if any(other != launch for other in launches):
        raise UserError(f"{path}: the keys of launch differ between cells; one script has them all")
    if "exclusive" not in launch.slurm:  # else two cells on a node would slow each other down
        launch = replace(launch, slurm={**launch.slurm, "exclusive": None})
    return slurm.job(
        launch,
        out.absolute(),
        ["-m", "shardwise", "bench", path, "--out", str(out), "--on=slurm", "--cell"],
        ["nodes=1", "ntasks=1"],
        final=(FAILED, USER_ERROR, OUT_OF_MEMORY),
        array=[cell.plan.id for cell in cells],
    )
