"""What the units of a model cost on this machine: each distinct one is run with its weights, and timed.

Each is a pipeline stage of its own, and all are run as a pipeline runs its stages: forwards upwards, backwards down, so
that caches are as cold as there, in as many processes at a time as a run has, each at another unit, as there. A stage
with nothing but the embedding does what every stage does around its layers. That takes twice as long after a backward,
which is where a run does it, as after a forward, which is where most units stand here: so it is run once more before
every unit, and what it takes right after itself is taken off.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
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
from shardwise.config import Parallel, RunConfig
from shardwise.interfaces import Batch, Mesh, ParallelModel
from shardwise.layouts import HALVING
from shardwise.metrics.memory import PeakMemory
from shardwise.models import load, lora
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.stage import Stage, stages
from shardwise.parallel.place import fill
from shardwise.parallel.reduce import of_every_rank
from shardwise.process.watchdog import beat
from shardwise.process.world import threads_each

BUDGET_SECONDS, FEWEST, MOST = 20.0, 9, 41
"""Rounds go on for about so long, and are so many at least and at most."""


Start = Callable[[RunConfig, int, Callable[[RunConfig, Mesh], None]], int]
"""(run, number of processes, what each of them does with the mesh up) -> exit code."""


def measure(cfg: RunConfig, num_processes: int, start: Start) -> int:
    """Measure the units of a run's model on this machine, and keep the profile in the cache.

    As many new processes measure at a time as the run has, but no more than there are cores or GPUs. Returns their exit
    code; `start` has printed what went wrong then.
    """
    num = num_busy(cfg, num_processes)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        batch = num * cfg.training.micro_batch_size
        training = replace(cfg.training, output_dir=folder, global_batch_size=batch, max_restarts=0)
        alike = replace(cfg, parallel=Parallel(data="ddp"), training=training)
        return start(alike, num, partial(_rank, cfg, num_processes))


def _rank(cfg: RunConfig, num_processes: int, _: RunConfig, mesh: Mesh) -> None:
    torch.set_num_threads(threads_each(num_processes))
    facts = describe(cfg, num_processes, mesh.device)
    keys = unit_keys(facts.hf, facts.spec, cfg.parallel.schedule)
    profile = profile_units(cfg, mesh, facts, keys)
    if dist.get_rank() == 0:
        write(profile, path_of(cfg, facts.hf, keys, dist.get_world_size()))
    dist.barrier()


def profile_units(cfg: RunConfig, mesh: Mesh, facts: Description, keys: Sequence[str]) -> Profile:
    """Measure one unit of each key, on every rank at a time; the same on every rank."""
    distinct = {key: place for place, key in reversed(list(enumerate(keys)))}
    places = sorted(distinct.values())
    bench = make_bench(cfg, mesh, facts, places)
    for _ in range(2):
        bench.round()
    kept = [bench.kept_bytes(place) for place in range(len(places))]
    rounds = int(BUDGET_SECONDS / max(of_every_rank(bench.round())))
    alone = bench.means(FEWEST, together=False) if dist.get_rank() == 0 else None
    means = bench.means(min(max(rounds, FEWEST), MOST), together=True)
    slowdown = _total(means) / _total(alone) if alone else 1.0
    # Some numbers for each stage, from every rank to all.
    ranks = of_every_rank(means)
    mean = [
        {kind: statistics.mean(rank[i][kind] for rank in ranks) for kind in unit}
        for i, unit in enumerate(means)
    ]
    around = mean[0]["F"]
    units = {
        keys[place]: Measured(
            forward_seconds=max(0.0, seconds["F"] - around),
            backward_seconds=seconds.get("B", 0.0),
            input_seconds=seconds.get("I", 0.0),
            weight_seconds=seconds.get("W", 0.0),
            activation_bytes=num_bytes,
        )
        for place, seconds, num_bytes in zip(places, mean, kept, strict=True)
    }
    return Profile(
        units=units,
        stage_seconds=mean[0]["around"],
        output_seconds=_message_seconds(bench.carried),
        num_processes=len(ranks),
        slowdown=of_every_rank(slowdown)[0],
        spread=of_every_rank(bench.spread())[0],
        rounds=len(bench.rounds),
    )


def _total(units: list[dict[str, float]]) -> float:
    return sum(unit["F"] + unit.get("B", 0.0) for unit in units)


@dataclass
class _Bench:
    """Stages of one unit each, from the embedding up, and what they are run on."""

    stages: list[Stage]
    below: list[bool]  # the stage's input needs a gradient
    carried: torch.Tensor  # hidden states
    scale: float
    number: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: list[float] = field(default_factory=list)

    def means(self, rounds: int, together: bool) -> list[dict[str, float]]:
        """Of each stage, the seconds of its forward, of its backward in one go, and in two halves.

        Means, as a step is a sum: what now and then holds up one of them holds up a step of many more often.
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
        """Half the distance of the latest rounds' quartiles, over their median."""
        first, median, third = statistics.quantiles(self.rounds, n=4)
        return (third - first) / 2 / median

    def round(self, first: int = 0) -> float:
        """Seconds of all forwards and all backwards, once with backwards in one go and once in two halves.

        The first forward is that of the stage at place `first`, after the last one comes the lowest.
        """
        start = self.now()
        places = [(first + place) % len(self.stages) for place in range(len(self.stages))]
        for halves in (False, True):
            self.forward(0, "around")
            done = {}
            for place in places:
                self.forward(0, "again")
                done[place] = self.forward(place)
            for place in reversed(places):
                self.backward(place, *done.pop(place), halves)
        return self.now() - start

    def forward(self, place: int, kind: str = "F") -> tuple[torch.Tensor, torch.Tensor]:
        """The stage's input and output."""
        stage = self.stages[place]
        carried = (
            self.number
            if stage.spec.first
            else self.carried.detach().requires_grad_(self.below[place])
        )
        start = self.now()
        output = stage(carried, self.number)
        self.seconds[place, kind].append(self.now() - start)
        return carried, output

    def backward(
        self, place: int, carried: torch.Tensor, output: torch.Tensor, halves: bool
    ) -> None:
        """As torch's schedules do it; nothing where no gradient is needed."""
        stage = self.stages[place]
        if not output.requires_grad:
            return
        outputs = [output * self.scale] if stage.spec.last else [output]
        gradients = None if stage.spec.last else [self.carried]
        start = self.now()
        if not (halves and self.below[place]):
            # Given a tuple without gradients, torch would take it that there is nothing to do.
            _backward.stage_backward(
                outputs[0] if stage.spec.last else outputs, gradients, [carried]
            )
            self.seconds[place, "B"].append(self.now() - start)
            return
        with stage.backward_half.running("input"):
            _, groups = _backward.stage_backward_input(
                outputs, gradients, [carried], stage.parameters()
            )
        between = self.now()
        with stage.backward_half.running("weight"):
            _backward.stage_backward_weight(stage.parameters(), groups)
        self.seconds[place, "I"].append(between - start)
        self.seconds[place, "W"].append(self.now() - between)

    def kept_bytes(self, place: int) -> int:
        """What a forward leaves alive, with its input and without its output; nothing where there is no backward."""
        with PeakMemory(self.carried.device) as memory:
            carried, output = self.forward(place)
        if not output.requires_grad:
            return 0
        assert memory.exit_bytes is not None
        assert memory.entry_bytes is not None
        received = 0 if self.stages[place].spec.first else carried.nbytes
        return memory.exit_bytes - memory.entry_bytes - output.nbytes + received

    def now(self) -> float:
        """The moment at which the device has done what it was given."""
        if self.carried.is_cuda:
            torch.cuda.synchronize(self.carried.device)
        return time.perf_counter()


def make_bench(cfg: RunConfig, mesh: Mesh, facts: Description, places: list[int]) -> _Bench:
    """The stages with their weights, treated as in the run, except what data parallelism does."""
    hf, spec = facts.hf, facts.spec
    top = len(spec.layers) + 1
    made: list[Stage] = []
    for place in places:
        boundaries = sorted({0, place, place + 1, top + 1})
        made += stages(hf, spec, boundaries, [boundaries.index(place)], cfg)

    def load_parts(pm: ParallelModel) -> None:
        for part in made:
            wanted = {hf_name(name) for name in part.hf.state_dict() if not is_adapter(name)}
            weights = load.weights(part.hf, cfg.model, cfg.training.seed, wanted)
            load.fill(part.hf, chain(weights, lora.adapter_weights(part.hf, cfg.training.seed)))
            part.to(mesh.device)
            beat()

    pm = ParallelModel(
        tuple(made),
        run_in_turn,
        torch.optim.SGD,
        from_portable=lambda name, held, full: fill(held, full),
    )
    order.apply(pm, mesh, replace(cfg, parallel=Parallel()), spec, load_parts)
    shape = (cfg.training.micro_batch_size, cfg.data.sequence_length)
    generator = torch.Generator().manual_seed(cfg.training.seed)
    tokens = torch.randint(spec.vocab_size, shape, generator=generator)
    batch = Batch(tokens, tokens, torch.zeros_like(tokens), tuple(range(shape[0])), step=1).to(
        mesh.device
    )
    for part in made:
        part.train()
        part.microbatches, part.loss_scale = [batch], 1.0 / tokens.numel()
        part.gradient_below = cfg.parallel.schedule in HALVING
    number = torch.zeros(1, dtype=torch.int64)
    embedded = made[0](number, number).detach()
    below = needs_gradient(hf, spec, cfg.parallel.schedule)
    return _Bench(made, [below[place] for place in places], embedded, 1.0 / tokens.numel())


def _message_seconds(hidden: torch.Tensor) -> float:
    """From rank 0 to rank 1: half of the way there and back, the median of some; 0 with one process."""
    rank = dist.get_rank()
    if dist.get_world_size() == 1:
        return 0.0
    seconds: list[float] = []
    for _ in range(21 if rank < 2 else 0):
        start = time.perf_counter()
        # As pipelines do: [B, T, D] hidden states from rank 0 to 1, and back.
        for operation in (dist.isend, dist.irecv) if rank == 0 else (dist.irecv, dist.isend):
            for work in dist.batch_isend_irecv([dist.P2POp(operation, hidden, 1 - rank)]):
                work.wait()
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        seconds.append((time.perf_counter() - start) / 2)
    # One number, from every rank to all.
    return of_every_rank(statistics.median(seconds[1:]) if seconds else 0.0)[0]
