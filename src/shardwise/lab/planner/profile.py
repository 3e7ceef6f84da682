"""Measure what the units of a run's model cost on this machine, for `shardwise split --profile`.

The bench runs in as many processes as a run keeps busy, each of them at another unit at a time.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
import torch.distributed as dist

from shardwise.assembly.describe import Description, describe
from shardwise.assembly.profiles import Measured, Profile, num_busy, path_of, unit_keys, write
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import replicated
from shardwise.base.process.world import threads_each
from shardwise.config import Recomputation, RunConfig
from shardwise.lab.planner.bench import Bench, make_bench
from shardwise.lab.planner.measure_messages import transfer
from shardwise.lab.planner.recompute import allowed_ways, as_way
from shardwise.parallel.reduce import from_every_rank

BUDGET_SECONDS = 20.0
"""About as long rounds are repeated, within FEWEST and MOST."""
FEWEST, MOST = 9, 41

Start = Callable[[RunConfig, int, Callable[[RunConfig, Mesh], None]], int]
"""Starts so many processes of a run, each of which calls the function, and returns an exit code."""


def measure(cfg: RunConfig, num_processes: int, start: Start) -> int:
    """Measure the units of a run's model on this machine, and keep the profile in the cache.

    As many new processes measure at a time as the run has, but no more than there are cores or
    GPUs. Where layers differ in what is computed again of them, all are measured in each way.
    Returns their exit code; `start` has printed what went wrong.
    """
    if isinstance(cfg.training.checkpointing, Recomputation):
        ways = (as_way(cfg, way) for way in allowed_ways(cfg, num_processes))
        return next(filter(None, (measure(way, num_processes, start) for way in ways)), 0)
    num = num_busy(cfg, num_processes)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        rows = num * cfg.training.micro_batch_size
        training = replace(cfg.training, output_dir=folder, global_batch_size=rows)
        launch = replace(cfg.launch, restarts=0)
        alike = replace(cfg, parallel=replicated(), training=training, launch=launch)
        return start(alike, num, partial(_measure_on_rank, cfg, num_processes))


def _measure_on_rank(cfg: RunConfig, num_processes: int, _: RunConfig, mesh: Mesh) -> None:
    torch.set_num_threads(threads_each(num_processes))
    facts = describe(cfg, num_processes, mesh.device)
    keys = unit_keys(facts.hf, facts.spec, cfg.parallel.schedule)
    profile = profile_units(cfg, mesh, facts, keys)
    if dist.get_rank() == 0:
        write(profile, path_of(cfg, facts.hf, keys, dist.get_world_size()))
    dist.barrier()


def profile_units(cfg: RunConfig, mesh: Mesh, facts: Description, keys: Sequence[str]) -> Profile:
    """Measure one unit of each key, on every rank at a time; return the same on every rank."""
    distinct = {key: place for place, key in reversed(list(enumerate(keys)))}
    places = sorted(distinct.values())
    bench = make_bench(cfg, mesh, facts, places)
    bench.round(detailed=True)
    num_rounds = int(BUDGET_SECONDS / max(from_every_rank(bench.round(detailed=True))))
    num_rounds = min(max(num_rounds, FEWEST), MOST)
    # Some numbers for each stage, from every rank to all.
    ranks = from_every_rank(bench.units(num_rounds, detailed=True, together=True))
    units = {keys[place]: _mean(measured) for place, *measured in zip(places, *ranks, strict=True)}
    # It is nothing but what each stage does around its layers.
    units[keys[0]] = replace(units[keys[0]], forward_seconds=0.0)
    first, median, third = statistics.quantiles(bench.rounds, n=4)
    return Profile(
        units=units,
        stage_seconds=statistics.mean(from_every_rank(bench.around_seconds)),
        output_seconds=_message_seconds(bench),
        num_processes=len(ranks),
        spread=from_every_rank((third - first) / 2 / median)[0],
        rounds=num_rounds,
    )


def _mean(ranks: Sequence[Measured]) -> Measured:
    names = [field.name for field in fields(Measured)]
    return Measured(*(statistics.mean(getattr(rank, name) for rank in ranks) for name in names))


def _message_seconds(bench: Bench) -> float:
    """Return the seconds of sending hidden states [B, T, D] from rank 0 to rank 1.

    It is half of a median round trip; 0 with one process.
    """
    if dist.get_world_size() == 1:
        return 0.0

    def there_and_back() -> list[list[dist.Work]]:
        return [transfer(bench.hidden, {sender}, into=bench.hidden) for sender in (0, 1)]

    # One number, from every rank to all.
    return from_every_rank(bench.watch.median_seconds(there_and_back, rounds=20) / 2)[0]
