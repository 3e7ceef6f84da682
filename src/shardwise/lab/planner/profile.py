"""Measure what the units of a model cost on this machine.

Each distinct unit becomes a pipeline stage of its own, with its weights. The bench runs these
stages as a pipeline does, forwards upwards and backwards down, so that caches are as cold as in a
run. It runs in as many processes as a run keeps busy, each of them at another unit at a time.

A stage does something around its layers too, such as masks and positions. The stage of the
embedding alone does nothing else, so its seconds are subtracted from those of every other stage.
They depend on what ran before: after a backward they are about twice those after a forward. In a
run, forwards follow backwards; here, the forwards of most units follow forwards. So the bench runs
that stage once more right before every unit, and subtracts the time that it takes there.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import _backward

from shardwise.assembly import order
from shardwise.assembly.build import run_in_turn
from shardwise.assembly.describe import Description, describe
from shardwise.assembly.profiles import (
    Measured,
    Profile,
    needs_gradient,
    num_busy,
    path_of,
    unit_keys,
    write,
)
from shardwise.assembly.state import FRESH, load_initial_weights
from shardwise.base.batches import Batch
from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.base.process.watchdog import beat
from shardwise.base.process.world import threads_each
from shardwise.config import Parallel, Recomputation, RunConfig
from shardwise.lab.planner.recompute import allowed_ways, as_way
from shardwise.lab.planner.stopwatch import Stopwatch
from shardwise.metrics.memory import PeakMemory
from shardwise.models.stage import Stage
from shardwise.parallel.place import fill, materialise
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
        alike = replace(cfg, parallel=Parallel(data="ddp"), training=training, launch=launch)
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
    for _ in range(2):
        bench.round()
    kept_bytes = [bench.kept_bytes(place) for place in range(len(places))]
    num_rounds = int(BUDGET_SECONDS / max(from_every_rank(bench.round())))
    alone = bench.means(FEWEST, together=False) if dist.get_rank() == 0 else None
    together = bench.means(min(max(num_rounds, FEWEST), MOST), together=True)
    slowdown = _total(together) / _total(alone) if alone else 1.0
    # Some numbers for each stage, from every rank to all.
    ranks = from_every_rank(together)
    means = [
        {kind: statistics.mean(rank[i][kind] for rank in ranks) for kind in stage}
        for i, stage in enumerate(together)
    ]
    around_seconds = means[0]["F"]
    units = {
        keys[place]: Measured(
            forward_seconds=max(0.0, seconds["F"] - around_seconds),
            backward_seconds=seconds.get("B", 0.0),
            input_seconds=seconds.get("I", 0.0),
            weight_seconds=seconds.get("W", 0.0),
            activation_bytes=num_bytes,
        )
        for place, seconds, num_bytes in zip(places, means, kept_bytes, strict=True)
    }
    return Profile(
        units=units,
        stage_seconds=means[0]["around"],
        output_seconds=_message_seconds(bench.hidden),
        num_processes=len(ranks),
        slowdown=from_every_rank(slowdown)[0],
        spread=from_every_rank(bench.spread())[0],
        rounds=len(bench.rounds),
    )


def _total(stages: list[dict[str, float]]) -> float:
    return sum(seconds["F"] + seconds.get("B", 0.0) for seconds in stages)


@dataclass
class Bench:
    """Stages of one unit each, from the embedding up, and what they are run on."""

    stages: list[Stage]
    needs_input_gradient: list[bool]  # of each stage
    hidden: torch.Tensor  # hidden states [B, T, D], the input of every stage but the first
    loss_scale: float
    watch: Stopwatch
    number: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by stage and kind: F forward, B backward, I and W its halves, `around` and `again`
    the first stage after a backward and right before another stage."""
    rounds: list[float] = field(default_factory=list)

    def means(self, rounds: int, together: bool) -> list[dict[str, float]]:
        """Return the mean seconds of each stage by kind, over so many rounds.

        Means, not medians, as a step is a sum: what disturbs one action now and then disturbs a
        step of many actions more often.
        """
        self.seconds.clear()
        self.rounds = []
        offset = dist.get_rank() * len(self.stages) // dist.get_world_size()
        for number in range(rounds):
            if together:
                dist.barrier()
            self.rounds.append(self.round(number + offset))
            beat()
        means: list[dict[str, float]] = [{} for _ in self.stages]
        for (place, kind), seconds in self.seconds.items():
            means[place][kind] = statistics.mean(seconds)
        return means

    def spread(self) -> float:
        """Return half the distance of the latest rounds' quartiles, over their median."""
        first, median, third = statistics.quantiles(self.rounds, n=4)
        return (third - first) / 2 / median

    def round(self, first: int = 0) -> float:
        """Run all forwards and all backwards twice, and return the seconds of both together.

        Backwards run in one go, then in two halves. The first forward is that of stage `first`;
        after the highest stage comes the lowest.
        """
        self.watch.wait()
        start = time.perf_counter()
        places = [(first + place) % len(self.stages) for place in range(len(self.stages))]
        for halves in (False, True):
            self.forward(0, "around")
            outputs = {}
            for place in places:
                self.forward(0, "again")
                outputs[place] = self.forward(place)
            for place in reversed(places):
                self.backward(place, *outputs.pop(place), halves)
        self.watch.wait()
        return time.perf_counter() - start

    def forward(self, place: int, kind: str = "F") -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward of a stage and return its input and output."""
        stage = self.stages[place]
        carried = self.number
        if not stage.spec.first:
            carried = self.hidden.detach().requires_grad_(self.needs_input_gradient[place])
        with self.watch.taking(self.seconds[place, kind]):
            output = stage(carried, self.number)
        return carried, output

    def backward(
        self, place: int, carried: torch.Tensor, output: torch.Tensor, halves: bool
    ) -> None:
        """Run the backward of a stage as torch's schedules do, unless no gradient is needed."""
        stage = self.stages[place]
        if not output.requires_grad:
            return
        outputs = [output * self.loss_scale] if stage.spec.last else [output]
        gradients = None if stage.spec.last else [self.hidden]
        if not (halves and self.needs_input_gradient[place]):
            # Given a tuple without gradients, torch would take it that there is nothing to do.
            output_or_outputs = outputs[0] if stage.spec.last else outputs
            with self.watch.taking(self.seconds[place, "B"]):
                _backward.stage_backward(output_or_outputs, gradients, [carried])
            return
        input_half, weight_half = self.seconds[place, "I"], self.seconds[place, "W"]
        with stage.backward_half.running("input"), self.watch.taking(input_half):
            _, groups = _backward.stage_backward_input(
                outputs, gradients, [carried], stage.parameters()
            )
        with stage.backward_half.running("weight"), self.watch.taking(weight_half):
            _backward.stage_backward_weight(stage.parameters(), groups)

    def kept_bytes(self, place: int) -> int:
        """Return what a stage's forward leaves alive: its input, but not its output.

        Without a backward nothing is kept for one.
        """
        with PeakMemory(self.hidden.device) as memory:
            carried, output = self.forward(place)
        if not output.requires_grad:
            return 0
        assert memory.exit_bytes is not None
        assert memory.entry_bytes is not None
        received = 0 if self.stages[place].spec.first else carried.nbytes
        return memory.exit_bytes - memory.entry_bytes - output.nbytes + received


def make_bench(cfg: RunConfig, mesh: Mesh, facts: Description, places: list[int]) -> Bench:
    """Return a bench of the units at `places`, with weights, made as in the run.

    Only the strategies of `parallel` are left out.
    """
    hf, spec = facts.hf, facts.spec
    num_units = len(spec.layers) + 2
    parts: list[Stage] = []
    for place in places:
        boundaries = sorted({0, place, place + 1, num_units})
        for part in facts.parts(cfg, boundaries, [boundaries.index(place)]):
            assert isinstance(part, Stage)
            parts.append(part)

    def load_parts(pm: ParallelModel) -> None:
        materialise(nn.ModuleList(parts), mesh.device)
        load_initial_weights(pm, cfg, FRESH)

    pm = ParallelModel(
        tuple(parts),
        run_in_turn,
        torch.optim.SGD,
        from_portable=lambda name, held, portable: fill(held, portable),
    )
    # Only the schedule is left of `parallel`: a patch looks at it.
    alone = replace(cfg, parallel=Parallel(schedule=cfg.parallel.schedule))
    order.apply(pm, mesh, alone, spec, load_parts)
    batch = _random_batch(cfg, spec.vocab_size).to(mesh.device)
    loss_scale = 1.0 / batch.input_ids.numel()
    for part in parts:
        part.train()
        part.microbatches, part.loss_scale = [batch], loss_scale
    number = torch.zeros(1, dtype=torch.int64)
    hidden = parts[0](number, number).detach()
    needed = needs_gradient(hf, spec, cfg.parallel.schedule)
    watch = Stopwatch(mesh.device)
    return Bench(parts, [needed[place] for place in places], hidden, loss_scale, watch)


def _random_batch(cfg: RunConfig, vocab_size: int) -> Batch:
    """Return a micro-batch of random tokens, with a target at every position."""
    shape = (cfg.training.micro_batch_size, cfg.data.sequence_length)
    generator = torch.Generator().manual_seed(cfg.training.seed)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    return Batch(tokens, tokens, torch.zeros_like(tokens), tuple(range(shape[0])), step=1)


def _message_seconds(hidden: torch.Tensor) -> float:
    """Return the seconds of sending hidden states [B, T, D] from rank 0 to rank 1.

    It is half of a median round trip; 0 with one process.
    """
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        return 0.0
    seconds: list[float] = []
    for _ in range(21 if rank < 2 else 0):
        start = time.perf_counter()
        # As pipelines do: hidden states from rank 0 to 1, and back.
        for operation in (dist.isend, dist.irecv) if rank == 0 else (dist.irecv, dist.isend):
            for work in dist.batch_isend_irecv([dist.P2POp(operation, hidden, 1 - rank)]):
                work.wait()
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        seconds.append((time.perf_counter() - start) / 2)
    # One number, from every rank to all.
    return from_every_rank(statistics.median(seconds[1:]) if seconds else 0.0)[0]
