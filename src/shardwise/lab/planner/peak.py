"""The most memory that a rank needs in a step, as a sum of parts, by formulas.

A step is a list of moments: each unit's forward and backward, each reduction of gradients, the
clipping, and the update. The peak is the moment with the most bytes alive.
What a unit keeps and computes is in `models/activations.py`, what data parallelism holds beside it
in `parallel/strategies/`, and the states between steps in `memory.py`.
`tools/plan_grid.py` compares the peaks with measured ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from math import prod

from torch import nn

from shardwise.assembly.describe import Description
from shardwise.base.layouts import context_joins_of, num_microbatches, num_strategy_ranks
from shardwise.base.schedules import BATCHING, HALVING
from shardwise.config import RunConfig, way_of
from shardwise.lab.planner.memory import PeakBytes, state_bytes
from shardwise.lab.planner.messages import ChunkShare, Share
from shardwise.lab.planner.passes import (
    FORWARD,
    PASSES,
    Moment,
    Pass,
    PassProgress,
    backward,
    forward,
    progress_of,
)
from shardwise.lab.planner.share import boundaries_of, share_of
from shardwise.lab.planner.units import memory_of_unit, offloaded
from shardwise.lab.planner.update import summed_bytes
from shardwise.models.activations import UnitMemory
from shardwise.models.alike import first_alike
from shardwise.models.dtypes import hidden_dtype
from shardwise.parallel.holding import ChunkUnits, HeldUnit, Whole
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.strategies import strategy_of
from shardwise.parallel.weights import Weight, gradient_bytes, is_whole_expert

NORM_ELEMENTS = 2**16
"""Elements of a gradient that are squared together for the norm, on a CPU."""
CUDA_CONTEXT_BYTES = 1122 * 2**20
"""Bytes that a process takes of a GPU beside tensors: the driver's context, and kernels. Measured
on an H200 with driver 580 and torch 2.11: 518 MiB at the start, 692 with cuBLAS and attention,
1,250 with a group of one rank in NCCL 2.28, which has NCCL_BYTES in it."""
NCCL_BYTES = 32 * 4 * 2**20
"""Bytes that NCCL takes for a group of ranks: a buffer of 4 MiB (NCCL_BUFFSIZE) for each of at
most 32 channels (NCCL_MAX_NCHANNELS, the defaults in NVIDIA's documentation). *Unverified here.*"""


def memory_of_run(cfg: RunConfig, run: Description) -> PeakBytes:
    """Return the memory of the rank with the most.

    Ranks of a pipeline differ. Along the other axes the first rank has most: the last ones have
    fewer rows where a weight does not divide evenly.
    """
    boundaries = boundaries_of(cfg, run)
    first = dict.fromkeys(run.sizes, 0)
    ranks = [first | {"pp": stage} for stage in range(run.sizes["pp"])]
    return max(
        (memory_of_rank(cfg, run, rank, boundaries) for rank in ranks),
        key=lambda memory: memory.total,
    )


def memory_of_rank(
    cfg: RunConfig,
    run: Description,
    coordinates: Mapping[str, int],
    boundaries: Sequence[int] | None = None,
) -> PeakBytes:
    """Return the memory of the rank at these coordinates of the mesh, at the peak of a step.

    It is that of any step after the first, which has no states of the optimizer yet. `boundaries`:
    those of a pipeline's split (see `share_of`).
    """
    return memory_of_share(cfg, run, share_of(cfg, run, coordinates, boundaries), coordinates)


def memory_of_share(
    cfg: RunConfig,
    run: Description,
    share: Share,
    coordinates: Mapping[str, int],
    units: dict[object, UnitMemory] | None = None,
) -> PeakBytes:
    """Return the memory of a rank with these coordinates and share, at its peak.

    `units` are those of layouts of the same run that were computed before; others are added.
    """
    return Rank(cfg, run, share, coordinates, {} if units is None else units).peak()


@lru_cache(maxsize=1)
def _constant_bytes(hf: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in hf.buffers())


class Rank:
    """A rank and the moments of its step."""

    def __init__(
        self,
        cfg: RunConfig,
        run: Description,
        share: Share,
        coordinates: Mapping[str, int],
        memories: dict[object, UnitMemory],
    ) -> None:
        self.cfg, self.run, self.share, self.coordinates = cfg, run, share, coordinates
        self.strategy = strategy_of(cfg)
        self.is_gloo = cfg.training.device != "cuda"
        self.num_shards = num_strategy_ranks(cfg, run.sizes)
        self.shard = coordinates[context_joins_of(cfg)] * run.sizes["cp"] + coordinates["cp"]
        self.num_microbatches = num_microbatches(cfg, prod(run.sizes.values()))
        tokens = cfg.training.micro_batch_size * cfg.data.sequence_length
        width = run.spec.hidden_size * hidden_dtype(cfg).itemsize
        self.passed_on = tokens // cfg.parallel.cp * width
        """The bytes of hidden states between stages: those of all tokens, as Stage.passed_on."""
        between = run.sizes["tp"] if cfg.parallel.sequence_parallel else 1
        self.hidden = self.passed_on // between
        """The bytes of hidden states between layers, as large as their gradient."""
        self.states = state_bytes(cfg, share, run.sizes, coordinates)
        parts = {"optimizer": ("gradients", "optimizer"), "all": tuple(self.states)}
        moved = () if self.is_gloo else parts.get(cfg.parallel.offload, ())
        host = sum(self.states[part] for part in moved)
        self.states |= dict.fromkeys(moved, 0)
        # Ids, labels, documents, and the places of targets: int64.
        rows = 4 * 8 * tokens * self.num_microbatches
        constants = _constant_bytes(run.hf) + self._mask_bytes()
        self.base = PeakBytes(
            weights=self.states["weights"],
            optimizer=self.states["optimizer"],
            temporary=rows + constants,
            host=host,
        )
        if not self.is_gloo:
            groups = sum(size > 1 for size in run.sizes.values())
            self.base = self.base.plus(overhead=CUDA_CONTEXT_BYTES + groups * NCCL_BYTES)
        self.memories = memories
        self.chunks = [self._units(chunk) for chunk in share.chunks]

    def _units(self, chunk: ChunkShare) -> list[HeldUnit]:
        """Return the units of a chunk; those that are alike are computed once."""
        model, stage = self.run.spec, chunk.spec
        last = len(model.layers) + 1
        places = first_alike(self.run.hf, model, self.cfg.training.checkpointing)
        names = {layer.name: 1 + i for i, layer in enumerate(model.layers)}
        weights = {names[x.name]: chunk.by_layer[x.name] for x in stage.layers}
        for weight in chunk.ends:
            is_end = weight.name.startswith((f"{model.norm}.", f"{model.head}."))
            place = last if is_end or not stage.first else 0
            weights[place] = (*weights.get(place, ()), weight)
        first = names[stage.layers[0].name] if stage.layers else last
        numbers = [0] if stage.first else []
        numbers += [first + i for i in range(len(stage.layers))]
        numbers += [last] if stage.last else []
        units, is_trained = [], False
        training, parallel = self.cfg.training, self.cfg.parallel
        layout = training.micro_batch_size, parallel.schedule in HALVING, parallel.cp, parallel.ep
        layout = *layout, parallel.tp, parallel.sequence_parallel
        layout = *layout, training.casts_weights and self.strategy.gathers_copies
        for number in numbers:
            unit_weights = weights.get(number, ())
            layer = model.layers[number - 1] if 0 < number < last else None
            facts = tuple((w.shape, w.itemsize, w.is_trained) for w in unit_weights if not layer)
            has_whole_experts = any(map(is_whole_expert, unit_weights))
            kind = 1 + places[layer.name] if layer else number
            way = way_of(training.checkpointing, layer.number, layer.kind) if layer else "none"
            key = (layout, way, kind, is_trained or chunk.needs_input_gradient, facts)
            key = *key, has_whole_experts
            if key not in self.memories:
                self.memories[key] = memory_of_unit(
                    *(self.cfg, self.run.hf, model, number), has_whole_experts
                )
            ends = {0: "the embedding", last: "the head"}
            name = layer.name if layer else ends[number]
            units.append(HeldUnit(name, self.memories[key], unit_weights))
            is_trained |= any(weight.is_trained for weight in unit_weights)
        below = units[0].memory
        if not stage.first and not below.keeps_input:  # torch's stage holds its input
            kept = below._replace(kept=below.kept + self.hidden, keeps_input=True)
            units[0] = replace(units[0], memory=kept)
        if self._moves_activations:
            layers = slice(stage.first, len(units) - stage.last)
            moved = offloaded([unit.memory for unit in units[layers]])
            units[layers] = [
                replace(u, memory=m) for u, m in zip(units[layers], moved, strict=True)
            ]
        return units

    @property
    def _moves_activations(self) -> bool:
        return self.cfg.training.offload_activations and not self.is_gloo

    def _mask_bytes(self) -> int:
        """Return the bytes of a mask of windows, which recomputed layers read again."""
        is_windowed = any("sliding" in layer.kind for layer in self.run.spec.layers)
        is_read_again = self.cfg.training.checkpointing != "none" and self.cfg.parallel.cp == 1
        return self.cfg.data.sequence_length**2 if is_windowed and is_read_again else 0

    def moments(self) -> Iterator[PeakBytes]:
        """Yield every moment that may be the peak of a step."""
        kept = [sum(unit.memory.kept for unit in units) for units in self.chunks]
        passes, peaks = [*self.passes()], dict[int, PeakBytes]()
        for chunk, moments, in_flight, late, gradients, messages in passes:
            if self.run.pipeline is None:
                yield from self._memories(self.chunks[chunk], moments)
                continue
            if id(moments) not in peaks:  # what passes of the same moments add is the same
                peaks[id(moments)] = self._largest(self.chunks[chunk], moments)
            activations = sum(map(prod, zip(in_flight, kept))) + late
            yield peaks[id(moments)].plus(
                gradients=gradients, activations=activations, buffers=messages
            )
        yield from self.after()

    def kept_in_forwards(self) -> int:
        """Return the most bytes of activations that are alive as a unit runs forward."""
        kept = [[0, *accumulate(unit.memory.kept for unit in units)] for units in self.chunks]
        totals, most = [chunk_kept[-1] for chunk_kept in kept], 0
        for one in self.passes():
            own = [kept[one.chunk][m.below] for m in one.moments if m.kind == FORWARD]
            others = sum(map(prod, zip(one.in_flight, totals))) if self.run.pipeline else 0
            most = max(most, others + one.late + max(own)) if own else most
        return most

    def peak(self) -> PeakBytes:
        """Return the memory at the moment with the most bytes."""
        if self.run.pipeline is None:
            passes = [*self.passes()]
            in_turn = (self._largest(self.chunks[one.chunk], one.moments) for one in passes)
            return max(*in_turn, *self.after(), key=lambda memory: memory.total)
        return max(self.moments(), key=lambda memory: memory.total)

    def passes(self) -> Iterator[Pass]:
        """Yield the forwards and backwards of a step, of those that are alike the first."""
        self.holdings = [*map(self._holding, self.chunks, self.share.chunks)]
        yield from self._in_turn() if self.run.pipeline is None else self._pipeline()

    def after(self) -> Iterator[PeakBytes]:
        """Yield the moments after the last backward of `passes`."""
        others = sum(holding.total for holding in self.holdings)
        for holding in reversed(self.holdings):
            others -= holding.total
            for held in holding.last_reduction():
                yield self.base.plus(
                    gradients=held.gradients + others, buffers=held.buffers
                )._replace(moment=f"{held.moment} of gradients")
            others += holding.reduced
        yield from self._last_moments

    def _holding(self, units: Sequence[HeldUnit], chunk: ChunkShare) -> Whole:
        spec, name = chunk.spec, f"{chunk.spec.embed}.weight"
        is_tied = spec.tied and spec.first and spec.last
        tied = next((w for w in units[0].weights if w.name == name), None) if is_tied else None
        held = ChunkUnits(self.cfg, units, self.num_shards, self.is_gloo, tied)
        return self.strategy.holding(chunk, held)

    def _in_turn(self) -> Iterator[Pass]:
        """Yield the first, a middle and the last micro-batch of a model in one part."""
        ((units,), (holding,)) = self.chunks, self.holdings
        last = self.num_microbatches - 1
        for number in sorted({0, min(1, last), min(1, last) if holding.repeats else last}):
            holding.begin(number == 0, number == last)
            passes = (run(units, holding, self.hidden) for run in (forward, backward))
            yield Pass(0, tuple(chain(*passes)), (0,))

    def _memories(
        self, units: Sequence[HeldUnit], moments: Iterable[Moment]
    ) -> Iterator[PeakBytes]:
        kept = [0, *accumulate(unit.memory.kept for unit in units)]
        for held, place, below, beside, kind in moments:
            needed = units[place].memory[kind] if held.runs else 0
            yield self.base.plus(
                gradients=held.gradients,
                buffers=held.buffers,
                activations=kept[below],
                temporary=beside + needed,
            )._replace(moment=f"{held.moment} of {units[place].name}")

    def _largest(self, units: Sequence[HeldUnit], moments: Iterable[Moment]) -> PeakBytes:
        """Return the first of the moments with the most bytes."""
        kept = [0, *accumulate(unit.memory.kept for unit in units)]

        # All candidates of a search have as many moments as units: numbers are added up here.
        def num_bytes(moment: Moment) -> int:
            held, place, below, beside, kind = moment
            needed = units[place].memory[kind] if held.runs else 0
            return held.gradients + held.buffers + kept[below] + beside + needed

        return next(self._memories(units, [max(moments, key=num_bytes)]))

    def _pipeline(self) -> Iterator[Pass]:
        """Yield the actions of a rank that may hold most.

        A micro-batch in flight keeps the activations of a chunk, and its output until its backward.
        """
        assert self.run.pipeline is not None
        late = [sum(unit.memory.late for unit in units) for units in self.chunks]
        is_gathered = "weights" in self.strategy.sharded
        frees = is_gathered and self.cfg.parallel.reshard_after_forward
        actions = progress_of(self.run.pipeline, self.coordinates["pp"], tells_last=frees)
        for (kind, place, is_first), progress in actions.items():
            holding = self.holdings[place]
            holding.is_first = is_first
            by_gathered: dict[bool, tuple[Moment, ...]] = {}
            for now in progress:
                # torch's stage leaves weights gathered after a backward; a forward frees them.
                ran = map(max, now.in_flight, now.has_gradients)
                gathered = now.after_backward if frees else tuple(map(bool, ran))
                holding.is_gathered = gathered[place]
                if holding.is_gathered not in by_gathered:
                    moments = PASSES[kind](self.chunks[place], holding, self.hidden)
                    by_gathered[holding.is_gathered] = tuple(moments)
                left = sum(map(prod, zip(now.halved, late)))
                others = [
                    (h.total * has, h.gathered_bytes * there)
                    for h, has, there in zip(self.holdings, now.has_gradients, gathered)
                    if h is not holding
                ]
                gradients, buffers = map(sum, zip((0, self._messages(now)), *others))
                moments = by_gathered[holding.is_gathered]
                yield Pass(place, moments, now.in_flight, left, gradients, buffers)

    def _messages(self, now: PassProgress) -> int:
        """Return the bytes of hidden states and their gradients that a rank keeps at an action.

        A chunk's output stays until its backward, or the next output where it runs none; a gradient
        that was sent, until the next one. 1F1B also keeps an output of its warm-up until the last
        forward's backward. Under other schedules messages arrive before they are read.
        """
        number, is_batched = 0, self.cfg.parallel.schedule in BATCHING
        for place, chunk in enumerate(self.share.chunks):
            runs_backward = chunk.needs_input_gradient or any(w.is_trained for w in chunk.weights)
            if not chunk.spec.last:
                number += now.in_flight[place] if runs_backward else 1
            if chunk.receives_from is not None and chunk.needs_input_gradient:
                number += now.has_answered[place]
            number += now.early_inputs[place] + now.early_gradients[place] * runs_backward
            if is_batched and chunk.sends_to is not None:
                number += now.has_answered[place]
        return number * self.passed_on

    @cached_property
    def _last_moments(self) -> tuple[PeakBytes, ...]:
        return tuple(self._after())

    def _after(self) -> Iterator[PeakBytes]:
        """Yield the moments after the last backward: sums of gradients, clipping, the update."""
        base = self.base.plus(gradients=self.states["gradients"])
        trained = self.share.trained
        if self.strategy.sums_at_last(self.cfg, (weight.itemsize for weight in trained)):
            ep = self.cfg.parallel.ep
            copied = [w for w in trained if w.ep_dim is None or self.num_shards > ep]
            yield base.plus(buffers=summed_bytes(self.cfg, copied))._replace(
                moment="reduction of gradients"
            )
        partial = [weight for weight in trained if weight.has_partial_gradient]
        yield base.plus(buffers=summed_bytes(self.cfg, partial))._replace(
            moment="sum of gradients over tp"
        )
        if (tied := self.share.tied) is not None:
            size = gradient_bytes(self.cfg, self._local_numel(tied), tied.itemsize)
            yield base.plus(buffers=size)._replace(moment="sum of the tied weight's gradients")
        numels = {weight: self._local_numel(weight) for weight in trained}
        if not numels:
            return
        squares = min(NORM_ELEMENTS, max(numels.values()))
        yield base.plus(temporary=4 * squares)._replace(moment="clipping")
        update = update_rule_of(self.cfg).update_bytes(self.cfg, numels, self.is_gloo)
        yield base.plus(temporary=update)._replace(moment="update")
        for gathered in self.strategy.after_update(trained, self.is_gloo):
            yield base.plus(buffers=gathered)._replace(moment="gathering of updated weights")

    def _local_numel(self, weight: Weight) -> int:
        if "optimizer" not in self.strategy.sharded:
            return weight.numel
        shard = self.shard if weight.ep_dim is None else self.shard // self.cfg.parallel.ep
        return weight.shard_numel(shard)
