"""Run a function on several gloo ranks: forked, so that they share what the parent has imported."""

from __future__ import annotations

import gc
import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import peft  # noqa: F401 (each rank would import it: a fifth of a second)
import torch
import torch.distributed as dist
import torch.distributed.pipelining
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

PATIENCE = 300
"""Seconds until something is called hung: far more than it takes on a machine that does much else.
"""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on each of `world_size` ranks with a gloo group up; the results in rank
    order.

    The first rank that fails ends the others, and its traceback is raised here.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, Path(folder) / "store", sender, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for i, pipe in enumerate(pipes) if i not in results]
        ready = wait(waiting, PATIENCE)
        if not ready:
            raise TimeoutError(
                f"ranks {[i for i in range(len(pipes)) if i not in results]} did not end"
            )
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if not ok:
                # Who loses a peer fails of it, and may be heard before the peer's end is.
                for other in wait([other for other in waiting if other is not pipe], 0.5):
                    if _is_dead(other):
                        raise RuntimeError(
                            f"rank {pipes.index(other)} died without a word:\n{value}"
                        )
                raise RuntimeError(f"rank {rank} of {len(pipes)}:\n{value}")
            results[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _is_dead(pipe: Connection) -> bool:
    try:
        pipe.recv()
    except EOFError:
        return True
    return False


def _rank_main(
    rank: int,
    world_size: int,
    store: Path,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    _forget_meshes()
    gc.freeze()  # what was inherited is not looked through whenever a test collects its own garbage
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE),
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        # Pickled here, as bytes: a tensor sent as it is would be shared memory that ends with this
        # process.
        buffer = io.BytesIO()
        torch.save(value, buffer)
        sender.send((True, buffer.getvalue()))
    except BaseException:  # whatever it was, the parent raises it
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()


def _forget_meshes() -> None:
    """Clear what DTensor has cached in the parent, which a forked rank inherits.

    A mesh equals another of the same ranks and names, so the result of an operator that the parent
    has run as rank 0 of a fake group would be this rank's, with rank 0's process groups and place
    in it.
    """
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
