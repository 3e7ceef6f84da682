"""How many optimizer steps a run has."""

import torch.distributed as dist

from shardwise.base.process.watchdog import paused
from shardwise.checkpoint.resume import Start
from shardwise.config import RunConfig, UserError
from shardwise.data.loader import Loaders
from shardwise.parallel.reduce import from_every_rank


def count_steps(cfg: RunConfig, loaders: Loaders, start: Start) -> int:
    """Return `training.num_steps`, or the steps that `training.epochs` come to.

    Each rank reads a share of the slots, and all learn where each slot stops to read its own share,
    a few bytes for each. A resume knows it from the checkpoint. UserError, the same on every rank,
    where nothing is left to read.
    """
    training = cfg.training
    if training.num_steps is not None:
        return training.num_steps
    slots = range(dist.get_rank(), training.global_batch_size, dist.get_world_size())
    with paused():  # tokenises all documents
        num_steps = loaders.num_steps(slots, from_every_rank)
    before = start.manifest.config["training"].get("epochs") if start.manifest else None
    if num_steps == start.step and before != training.epochs:
        if num_steps == 0:
            raise UserError(
                f"data.train: no document of training.epochs {training.epochs:g} has a target; "
                "give other documents, or a larger data.sequence_length for long ones"
            )
        raise UserError(
            f"training.epochs is {training.epochs:g}, which checkpoint {start.folder} has read "
            "already; give more"
        )
    return num_steps
