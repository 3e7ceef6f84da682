"""Start the processes of a run, or join those that torchrun or Slurm started, and end in one way whatever happens."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig, UserError

# torch and all that needs it are imported inside the functions: the user's mistakes are told before that costs seconds.
if TYPE_CHECKING:
    import torch

    from shardwise.interfaces import Mesh

Train = Callable[[RunConfig, "Mesh"], object]
"""What each rank runs, with the process group up."""

RECORD_FILES = ("record.json", "metrics.jsonl")
"""An output folder that has one of these holds a run."""
RESULT_FOLDERS = ("adapter", "model", "checkpoints", "tensorboard")
"""What else a run writes."""
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in a collective: longer than rank 0 may take to read weights or tokenise."""
PATIENCE_SECONDS = 2.0
"""How long a rank with an unexpected error waits before it ends: much longer than a launcher needs to see an exit."""


@dataclass(frozen=True)
class World:
    """This process's place among the processes of a run."""

    rank: int
    size: int
    local_rank: int  # index of its GPU among those that it sees
    init_method: str | None  # where the processes meet; None: there is only this one

    @property
    def where(self) -> str:
        """For messages: nothing where there is only one process."""
        return f" on rank {self.rank} of {self.size}" if self.size > 1 else ""


ALONE = World(rank=0, size=1, local_rank=0, init_method=None)


@dataclass(frozen=True)
class Ending:
    """How a run that did not succeed is told: to the shell, in record.json and to the person."""

    exit_code: int
    status: str
    reason: str
    text: str


# ---------------------------------------------------------------------------------------------------- how a run ends


def explain(error: BaseException, where: str = "") -> Ending:
    """What an exception means: 2 the user's mistake and 3 out of memory in one line, 1 anything else in full."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return Ending(2, "unsupported", message, f"error: {message}")
    if is_out_of_memory(error):
        wanted = re.search(r"tried to allocate [\d.]+ \w+", message, re.IGNORECASE)
        reason = f"out of memory{where}" + (f": {wanted[0].lower()}" if wanted else "")
        way_out = "lower training.micro_batch_size or data.sequence_length, or set training.checkpointing=full"
        return Ending(3, "oom", reason, f"{reason}; {way_out}")
    reason = f"{type(error).__name__}{where}: {message}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Ending(1, "failed", reason, f"error{where}:\n{trace}" if where else trace)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU's or the CPU's allocator had no more memory (a CPU tensor's is a plain RuntimeError)."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    signs = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in (*signs, "CUDA error: out of memory"))


def guarded(call: Callable[[], int]) -> int:
    """The exit code of `call()`; what goes wrong in it is told on stderr, and nothing but SystemExit is raised."""
    try:
        return call()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        raise
    except BaseException as error:  # some of torch's errors are no Exception
        ending = explain(error)
        if ending.exit_code != 1 and _rank_from(os.environ) > 0:
            time.sleep(PATIENCE_SECONDS / 4)  # rank 0 has most likely found the same and tells it; then this one is ended
        print(ending.text, file=sys.stderr, flush=True)
        return ending.exit_code


def _rank_from(env: Mapping[str, str]) -> int:
    return int(env.get("RANK") or env.get("SLURM_PROCID") or 0)


# ------------------------------------------------------------------------------------------------------- the processes


def launch(cfg: RunConfig, nproc: int | None = None, train: Train | None = None) -> int:
    """Run `cfg` on `nproc` (default 1) new processes of this machine, or as one of those a launcher started.

    Returns the exit code: 0 ok, 2 the user's mistake, 3 out of memory, 1 anything else; it has been told on stderr.
    `train` (default: `shardwise.training.loop.train`) must be importable by name: new processes look it up.
    """
    return guarded(lambda: _launch(cfg, nproc, train))


def _launch(cfg: RunConfig, nproc: int | None, train: Train | None) -> int:
    world = find_world(os.environ)
    if world is not None and nproc is not None:
        raise UserError(f"--nproc {nproc}: a launcher has started {world.size} processes already; leave --nproc out")
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc is {nproc}; give at least 1")
    claim_output_dir(cfg, clear=world is None or world.rank == 0)
    if nproc is not None and nproc > 1:
        return _start_processes(cfg, nproc, train)
    run_rank(cfg, world or ALONE, train)
    return 0


def find_world(env: Mapping[str, str]) -> World | None:
    """The place that torchrun's or srun's environment variables give this process, or None."""
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(
                f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; start with torchrun, or unset them"
            )
        return World(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"]), "env://")
    # Only srun sets a step: a batch script has SLURM_PROCID and SLURM_NTASKS too, and would wait for tasks that never
    # start. Slurm counts negative steps (batch, interactive) down from 2^32.
    size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    step = int(env.get("SLURM_STEP_ID", "-1"))
    if "SLURM_PROCID" not in env or size == 1 or not 0 <= step < 2**31:
        return None
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
    port = env.get("MASTER_PORT") or 15000 + (16 * int(env["SLURM_JOB_ID"]) + step) % 15000
    one_gpu_per_task = env.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
    local_rank = 0 if one_gpu_per_task else int(env["SLURM_LOCALID"])
    return World(int(env["SLURM_PROCID"]), size, local_rank, f"tcp://{host}:{port}")


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `node01` of `node[01-03,07],gpu5`."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _start_processes(cfg: RunConfig, nproc: int, train: Train | None) -> int:
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if _device_type(cfg) == "cuda" and nproc > torch.cuda.device_count():
        raise UserError(
            f"--nproc is {nproc} but this machine has {torch.cuda.device_count()} GPUs; "
            "lower it, or set training.device=cpu"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        # More threads than cores spin against each other: 2 ranks with 2 threads each on 2 cores take 5 times as long.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // nproc))),
        # Or workers meet in the launcher's store, where addresses of workers that are gone remain (pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder, _environment(environment), _own_words():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="shardwise",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C stays Python's KeyboardInterrupt
        )
        try:
            elastic_launch(config, _process_main)(cfg, train, folder)
        except SignalException as signalled:
            return 128 + signalled.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            report = _report_path(folder, rank)
            if report.exists():
                print(report.read_text(encoding="utf-8"), file=sys.stderr, flush=True)
                return failure.exitcode
            reason = f"rank {rank} {_how_it_died(failure.exitcode)}"
            print(f"error: {reason}", file=sys.stderr, flush=True)
            write_ending(cfg, "failed", reason)
            return 1
    return 0


def _process_main(cfg: RunConfig, train: Train | None, folder: str) -> None:
    world = find_world(os.environ)
    assert world is not None, "torch elastic sets RANK and the rest"
    try:
        run_rank(cfg, world, train)
    except Exception as error:
        ending = explain(error, world.where)
        _report_path(folder, world.rank).write_text(ending.text, encoding="utf-8")
        sys.exit(ending.exit_code)


def _report_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.txt")


def _how_it_died(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} without a word"
    hint = "; the system does that when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    """Without torch elastic's log lines and tables: this process does nothing else meanwhile, and tells the end itself."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------------------------------------ one rank


def run_rank(cfg: RunConfig, world: World, train: Train | None = None) -> None:
    """Bring up this rank's process group and mesh, train, and take the group down; an error is recorded and raised."""
    import torch.distributed as dist

    try:
        device = pick_device(cfg, world)
        _init_process_group(device, world)
        from shardwise.parallel.mesh import build_mesh

        if train is None:
            from shardwise.training.loop import train
        train(cfg, build_mesh(cfg, device))
    except Exception as error:
        ending = explain(error, world.where)
        if ending.exit_code == 1 and world.size > 1:
            # A rank that loses a peer raises what is no different from an error of its own. So each waits before it ends
            # (its connections stay open, nobody fails of it): the launcher sees the cause first and ends the others.
            time.sleep(PATIENCE_SECONDS)
        write_ending(cfg, ending.status, ending.reason)
        if world.size == 1 and dist.is_initialized():  # with peers it could wait for them
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def pick_device(cfg: RunConfig, world: World) -> torch.device:
    """The device this rank computes on. Raises UserError where there is no such GPU."""
    import torch

    if _device_type(cfg) == "cpu":
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {world.rank} wants GPU {world.local_rank} but sees {torch.cuda.device_count()}; "
            "start fewer processes, or set training.device=cpu"
        )
    return torch.device("cuda", world.local_rank)


def _device_type(cfg: RunConfig) -> str:
    import torch

    if cfg.training.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.training.device == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device is cuda but torch finds no GPU; set it to cpu or auto")
    return cfg.training.device


def _init_process_group(device: torch.device, world: World) -> None:
    import torch
    import torch.distributed as dist

    place: dict[str, Any] = {"init_method": world.init_method} if world.init_method else {"store": dist.HashStore()}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        place["device_id"] = device
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=TIMEOUT, **place)
    dist.barrier()  # nobody writes into the output folder before everybody has looked at it


# --------------------------------------------------------------------------------------------------- the output folder


def claim_output_dir(cfg: RunConfig, clear: bool) -> None:
    """Make the output folder. Raises UserError where it holds a run that may not be replaced; `clear` removes that run.

    Only what a run writes is removed, and only where there is a run. A record that says a run was refused (status
    `unsupported`) is no run: the next try replaces it.
    """
    folder = Path(cfg.training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"training.output_dir {folder}: cannot make the folder ({error.strerror})") from None
    if not any((folder / name).exists() for name in RECORD_FILES):
        return
    if not cfg.training.overwrite and not _was_refused(folder):
        raise UserError(
            f"training.output_dir {folder} holds another run; choose another folder, or set training.overwrite=true"
        )
    inputs = [Path(path).resolve() for path in (cfg.model.path, cfg.model.tokenizer) if path is not None]
    for name in RESULT_FOLDERS:
        if any(path.is_relative_to((folder / name).resolve()) for path in inputs):
            raise UserError(
                f"training.overwrite would remove {folder / name}, which the run reads; choose another output_dir"
            )
    if clear:
        for name in RECORD_FILES:
            (folder / name).unlink(missing_ok=True)
        for name in RESULT_FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)


def _was_refused(folder: Path) -> bool:
    if (folder / "metrics.jsonl").exists():
        return False
    try:
        return json.loads((folder / "record.json").read_text(encoding="utf-8"))["status"] == "unsupported"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_ending(cfg: RunConfig, status: str, reason: str) -> None:
    """Record how a run ended that did not succeed, unless another rank did so already."""
