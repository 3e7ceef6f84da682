"""What fsdp1 and fsdp2 hold of weights, gradients and buffers at each moment of a micro-batch.

See holding.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from shardwise.config import RunConfig
from shardwise.planner.holding import Held, Unit, Whole
from shardwise.planner.units import Unit as Gathered
from shardwise.planner.units import flat_parameters, flat_spans
from shardwise.planner.weights import Weight


class Sharded(Whole):
    """What fsdp1 and fsdp2 share: a unit's weights are gathered around its forward and backward.

    In a backward the weights of the next unit come while one runs, and its gradients are
    reduce-scattered when it has ended. The root has the weights that are no unit's (`rest`). They
    are gathered for the complete forward, and until their gradients are reduced. Of others a rank
    has all (`whole`), with their gradients: experts that `ep` spreads over all shards, above all.
    """

    repeats = True

    def __init__(
        self,
        cfg: RunConfig,
        units: Sequence[Unit],
        num_shards: int,
        is_gloo: bool,
        tied: Weight | None = None,
        rest: Collection[Weight] = (),
        whole: Collection[Weight] = (),
    ) -> None:
        super().__init__(cfg, units, num_shards, is_gloo, tied)
        sharded = [[w for w in unit.weights if w not in whole] for unit in units]
        of_root = [weight for weights in sharded for weight in weights if weight in rest]
        of_units = [[w for w in weights if w not in rest] for weights in sharded]
        self.gathered = [self._gathered(weights) for weights in of_units]
        self.sent = [self._sent(weights) for weights in of_units]
        self.root = self._gathered(of_root)
        self.last = len(units) - 1 if tied is None else 0
        """The unit after whose backward the gradients of the root are complete."""
        self.sent[self.last] += self._sent(of_root)
        self.sums = [self._summed(weights) for weights in of_units]
        """The bytes of a rank's part of the sums of a unit's gradients."""
        self.sums[self.last] += self._summed(of_root)
        self.kept = [self._kept(weights) for weights in of_units]
        """The bytes that stay of them: a rank's shards of a unit's gradients."""
        self.kept[self.last] += self._kept(of_root)
        self.of_whole = [
            sum(self._gradient(w) for w in unit.trained if w in whole) for unit in units
        ]
        """The bytes of the gradients of weights of which a rank has all."""
        self.is_root_trained = any(weight.is_trained for weight in of_root)
        self.shards = 0
        """Bytes of the shards' gradients."""
        self.has_shards = is_gloo or cfg.parallel.offload != "all"
        """Whether they stay on the device."""
        self.is_kept = not cfg.parallel.reshard_after_forward
        """Whether units stay gathered from their forward to their backward."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of these weights when they are gathered."""
        raise NotImplementedError

    def _kept(self, weights: Sequence[Weight]) -> int:
        """Return the bytes of the shards of these weights' gradients, in the weights' dtype."""
        trained = [weight for weight in weights if weight.is_trained]
        return sum(w.padded_numel // w.num_shards * w.itemsize for w in trained)

    def _in_backward(self, place: int) -> tuple[int, int]:
        """Return the gathered bytes of a unit and the root, and those of the unit below, or of
        all units below that were kept.
        """
        is_freed = self.is_root_trained and place < self.last
        root = 0 if is_freed else self.root
        below = self.gathered[:place] if self.is_kept else self.gathered[:place][-1:]
        return root + self.gathered[place], sum(below)

    def _complete(self, place: int) -> int:
        """Return the bytes of new complete gradients after the backward of a unit."""
        added = 0 if self.is_first else self.of_whole[place]
        return self.gradients[place] - added + (self.early if place else 0)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own, below = self._in_backward(place)
        copy = below if self.is_gloo and not self.is_kept else 0
        gradients = self.shards + self.early
        partial_sums = self._partial_sums()
        yield Held("gather", gradients, own + below + copy + partial_sums, runs=False)
        yield Held("backward", gradients + self.largest[place], own + below + partial_sums)

    def _partial_sums(self) -> int:
        """Return the bytes of what was reduce-scattered last, where it is kept."""
        return 0


class Fsdp2(Sharded):
    """parallel/fsdp2.py: each weight is gathered into a flat tensor, and copied out of it.

    In a forward the flat tensor of a unit stays until the next unit is gathered; in a backward that
    of the next unit comes early. The partial sums of a reduce-scatter stay until the next one.
    Under `accumulation: float32` shards in 16 bits are moved to float32 after each micro-batch.
    """

    sent_last = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.cfg.parallel.dp_replicate > 1:  # added up over replicas only at last, in float32
            self.kept = self.sums
        in_float32 = self.sums if self.cfg.training.accumulation == "float32" else self.kept
        self.is_moved = in_float32 != self.kept
        self.after_backward = sum(in_float32) + sum(self.of_whole)
        """The bytes of the shards' gradients after the backward of a micro-batch."""

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return sum(w.padded_numel * w.itemsize for w in weights)

    def _partial_sums(self) -> int:
        return self.sent_last

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own, before = self.gathered[place], self.gathered[place - 1] if place else 0
        copy = own if self.is_gloo else 0
        kept = self.root + (sum(self.gathered[:place]) if self.is_kept else 0)
        yield Held("gather", self.shards, kept + before + own + copy, runs=False)
        yield Held("forward", self.shards, kept + 2 * own)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield what is held while gradients are copied and sent, and their sums come back."""
        sent = self.sent[place]
        _, below = self._in_backward(place)
        if sent:
            copy, part = sent if self.is_gloo else 0, self.sums[place]
            gradients = self.shards + self._complete(place)
            yield Held("reduction", gradients, below + sent, runs=False)
            whole = self.of_whole[place] if self.is_first else 0
            yield Held("reduction", self.shards + part + whole, below + sent + copy, runs=False)
            is_new = self.is_first or self.is_moved
            self.shards += self.kept[place] if is_new and self.has_shards else 0
            self.sent_last = sent
        self.shards += self.of_whole[place] if self.is_first else 0
        if place == 0:
            self.sent_last = 0
            if self.is_moved and self.has_shards:
                self.shards = self.after_backward


class Fsdp1(Sharded):
    """parallel/fsdp1.py: the weights of a unit are views into a flat parameter.

    Its gradient is reduced in float32, and the shard of it gets the dtype of the weights.
    """

    def _gathered(self, weights: Sequence[Weight]) -> int:
        return sum(self._flat_bytes(flat) for flat in self._flat(weights))

    def _sent(self, weights: Iterable[Weight]) -> int:
        """Return the bytes of all of a flat parameter of which something is trained."""
        return sum(4 * self._numel(flat) for flat in self._flat(weights) if _is_trained(flat))

    def _kept(self, weights: Sequence[Weight]) -> int:
        joined = sum(self._flat_bytes(flat) for flat in self._flat(weights) if _is_trained(flat))
        return joined // self.num_shards

    def _flat(self, weights: Iterable[Weight]) -> list[tuple[Weight, ...]]:
        return flat_parameters(Gathered(tuple(weights), False), self.cfg.parallel.fsdp1_wrap)

    def _flat_bytes(self, flat: Sequence[Weight]) -> int:
        return self._numel(flat) * flat[0].itemsize

    def _numel(self, flat: Sequence[Weight]) -> int:
        return -(-flat_spans(flat)[-1][1] // self.num_shards) * self.num_shards

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        own = self.root + self.gathered[place]
        copy = self.gathered[place] if self.is_gloo else 0
        yield Held("gather", self.shards, own + copy, runs=False)
        yield Held("forward", self.shards, own)

    def reduction(self, place: int) -> Iterator[Held]:
        """Yield the joining of a unit's gradients into a flat one, and its reduction."""
        sent = self.sent[place]
        if sent:
            own, below = self._in_backward(place)
            copy, part = sent if self.is_gloo else 0, sent // self.num_shards
            joined = self.kept[place] * self.num_shards
            # What autograd has joined in 16 bits lies beside what is sent in float32.
            cast = joined if sent > joined else 0
            complete = self.shards + cast + sent
            yield Held("reduction", complete + self._complete(place), own + below, runs=False)
            root = own - self.gathered[place]
            yield Held("reduction", complete + part, root + below + copy, runs=False)
            self.shards += self.kept[place] if self.is_first else 0


class Fsdp2Stage(Fsdp2):
    """fsdp2 in a pipeline: torch's stage keeps complete gradients until the end of a step.

    It frees no weights after a backward. So they are there in what comes next, in which a forward
    frees one unit after the other, unless they are kept.
    """

    @property
    def gathered_bytes(self) -> int:
        """See Whole."""
        return self.root + sum(self.gathered)

    def forward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        gradients = 0 if self.is_first else self.total
        if self.is_gathered:
            there = self.gathered if self.is_kept else self.gathered[place:]
            yield Held("forward", gradients, self.root + sum(there))
        else:
            for held in super().forward(place):
                yield held._replace(moment="forward", gradients=gradients)

    def backward(self, place: int) -> Iterator[Held]:
        """See Whole."""
        below, copy = sum(self.gathered[:place]), 0
        if not (self.is_gathered or self.is_kept):  # it gathers one unit ahead
            below = sum(self.gathered[:place][-1:])
            copy = below if self.is_gloo else 0
        there = self.root + sum(self.gathered[place:]) + below
        for held in Whole.backward(self, place):
            yield held._replace(buffers=there + copy, runs=False)
            yield held._replace(buffers=there)

    def reduction(self, place: int) -> Iterator[Held]:
        """See Whole."""
        yield from ()

    def last_reduction(self) -> Iterator[Held]:
        """Yield what is held while one unit after the other is reduced."""
        left, gathered = self.total, self.root + sum(self.gathered)
        for place in reversed(range(len(self.units))):
            sent = self.sent[place]
            copy, part = sent if self.is_gloo else 0, self.sums[place]
            yield Held("reduction", left, gathered + sent, runs=False)
            left -= self.gradients[place] - self.of_whole[place]
            yield Held("reduction", left + part, gathered + sent + copy, runs=False)
            left += self.kept[place] if self.has_shards else 0


def _is_trained(flat: Sequence[Weight]) -> bool:
    return any(weight.is_trained for weight in flat)
