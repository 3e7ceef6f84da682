"""Time the units of a model, for `shardwise split --profile` and for `shardwise calibrate`.

Each unit becomes a pipeline stage of its own, laid out and run as the stages of a run are, with its
weights: forwards upwards and backwards down, so that caches are as cold as in a run.

A stage does something around its layers too, such as masks and positions. The stage of the
embedding alone does nothing else, so its seconds are subtracted from those of every other stage.
They depend on what ran before: after a backward they are about twice those after a forward. In a
run, forwards follow backwards; here, the forwards of most units follow forwards. So the bench runs
that stage once more right before every unit, and subtracts the time that it takes there.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.assembly.build import lay_out
from shardwise.assembly.describe import Description
from shardwise.assembly.profiles import Measured, needs_gradient
from shardwise.assembly.state import FRESH
from shardwise.base.batches import Batch
from shardwise.base.interfaces import Mesh
from shardwise.base.process.watchdog import beat
from shardwise.config import Parallel, RunConfig
from shardwise.metrics.memory import PeakMemory
from shardwise.metrics.stopwatch import Stopwatch
from shardwise.models.stage import Stage
from shardwise.parallel.pipeline_stage import Clock, ScheduledStage


@dataclass
class Bench:
    """Stages of one unit each, from the embedding up, and what they are run on."""

    stages: list[ScheduledStage]
    needs_input_gradient: list[bool]  # each stage's
    can_halve: bool  # backwards of compiled layers have no halves
    microbatches: list[Batch]  # one, which all stages look at
    hidden: torch.Tensor  # hidden states [B, T, D], the input of every stage but the first
    loss_scale: float
    watch: Stopwatch
    number: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds by stage and kind: F forward, B backward, I and W its halves, `around` and `again`
    the first stage after a backward and right before another stage."""
    rounds: list[float] = field(default_factory=list)

    def units(self, rounds: int, detailed: bool = False, together: bool = False) -> list[Measured]:
        """Return the median seconds of each unit, over so many rounds after one that is not timed.

        The embedding's forward has what a stage does around its layers, which no other has.
        `detailed`: the halves of backwards and the bytes that forwards keep, too; else they are 0.
        `together`: ranks begin each round together.
        """
        self.round(detailed)  # compiles kernels; from here on gradients are added up
        num = len(self.stages)
        kept_bytes = [self.kept_bytes(place) if detailed else 0 for place in range(num)]
        self.seconds.clear()
        self.rounds.clear()
        # Ranks are at different units at a time, as in a pipeline.
        offset = dist.get_rank() * num // dist.get_world_size()
        # A GPU that was not held back for long enough has given no time.
        while not self.seconds or min(map(len, self.seconds.values())) < rounds:
            if together:
                dist.barrier()
            self.rounds.append(self.round(detailed, len(self.rounds) + offset))
            beat()
        medians = {key: statistics.median(seconds) for key, seconds in self.seconds.items()}
        return [
            Measured(
                max(0.0, medians[place, "F"] - (medians[0, "F"] if place else 0.0)),
                *(medians.get((place, kind), 0.0) for kind in "BIW"),
                activation_bytes=kept_bytes[place],
            )
            for place in range(num)
        ]

    @property
    def around_seconds(self) -> float:
        """Seconds that a stage takes around its layers, after a backward."""
        return statistics.median(self.seconds[0, "around"])

    def round(self, detailed: bool, first: int = 0) -> float:
        """Run all forwards and all backwards, in detail once more with backwards in two halves, and
        return the seconds of all together.

        The first forward is that of stage `first`; after the highest stage comes the lowest.
        """
        self.watch.wait()
        start = time.perf_counter()
        places = [(first + place) % len(self.stages) for place in range(len(self.stages))]
        for halves in (False, True)[: 1 + (detailed and self.can_halve)]:
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
        if not stage.is_first:
            carried = self.hidden.detach().requires_grad_(self.needs_input_gradient[place])
        with self.watch.taking(self.seconds[place, kind]):
            output = stage.forward_maybe_with_nosync(carried, self.number)
        return carried, output

    def backward(
        self, place: int, carried: torch.Tensor, output: torch.Tensor, halves: bool
    ) -> None:
        """Run the backward of a stage as a pipeline does, unless no gradient is needed."""
        stage = self.stages[place]
        if not output.requires_grad:
            return
        given: dict[str, Any] = {
            "stage_output": (output,),
            "output_grads": (self.hidden,),
            "input_values": [carried],
        }
        if stage.is_last:
            given |= {"stage_output": output * self.loss_scale, "output_grads": None}
        if not (halves and self.needs_input_gradient[place]):
            with self.watch.taking(self.seconds[place, "B"]):
                stage.backward_maybe_with_nosync("full", given)
            return
        if stage.is_last:
            given["stage_output"] = (given["stage_output"],)
        with self.watch.taking(self.seconds[place, "I"]):
            _, groups = stage.backward_maybe_with_nosync("input", given)
        with self.watch.taking(self.seconds[place, "W"]):
            stage.backward_maybe_with_nosync("weight", {"param_groups": groups})

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
        received = 0 if self.stages[place].is_first else carried.nbytes
        return memory.exit_bytes - memory.entry_bytes - output.nbytes + received


def make_bench(cfg: RunConfig, mesh: Mesh, facts: Description, places: Sequence[int]) -> Bench:
    """Return a bench of the units at `places`, with weights, laid out as in the run.

    Only the strategies of `parallel` are left out. The lowest and the highest unit are among them.
    """
    hf, spec = facts.hf, facts.spec
    # Only the schedule is left of `parallel`: a patch looks at it.
    alone = replace(cfg, parallel=Parallel(schedule=cfg.parallel.schedule))
    boundaries = range(len(spec.layers) + 3)
    pm = lay_out(facts, alone, mesh, FRESH, torch.optim.SGD, boundaries, places)
    parts = [part for part in pm.parts if isinstance(part, Stage)]
    microbatches = [_random_batch(cfg, spec.vocab_size).to(mesh.device)]
    loss_scale = 1.0 / microbatches[0].input_ids.numel()
    for part in parts:
        part.train()
        part.microbatches, part.loss_scale = microbatches, loss_scale
    number = torch.zeros(1, dtype=torch.int64)
    hidden = parts[0](number, number).detach()
    clock, group = Clock(mesh.device), mesh.group("pp")
    stages = [
        ScheduledStage(part, place, len(parts), hidden, hidden, group, clock)
        for place, part in enumerate(parts)
    ]
    needed = needs_gradient(hf, spec, cfg.parallel.schedule)
    return Bench(
        stages,
        [needed[place] for place in places],
        not cfg.training.is_compiled,
        microbatches,
        hidden,
        loss_scale,
        Stopwatch(mesh.device),
    )


def _random_batch(cfg: RunConfig, vocab_size: int) -> Batch:
    """Return a micro-batch of random tokens, with a target at every position."""
    shape = (cfg.training.micro_batch_size, cfg.data.sequence_length)
    generator = torch.Generator().manual_seed(cfg.training.seed)
    tokens = torch.randint(vocab_size, shape, generator=generator)
    return Batch(tokens, tokens, torch.zeros_like(tokens), tuple(range(shape[0])), step=1)
