"""Elementwise operators of layers, with sizes in place of numbers: see tape.py.

Each says what torch's own operator gives, what it keeps for its backward, and what it needs and
moves while it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from transformers import PretrainedConfig

from shardwise.base.schedule.context import Way
from shardwise.models.moves import WIDE, dropout
from shardwise.models.parameters import Adapter, Parameter
from shardwise.models.tape import Tape, Tensor


class SharedRows(NamedTuple):
    """How rows lie on several ranks, by `cp`, or on one whose attention the project computes."""

    way: Way
    """Way in which attention gets the keys of other ranks."""
    num_ranks: int
    """The number of ranks of `cp`."""
    pieces: tuple[tuple[int, int, bool], ...]
    """The queries and keys of a row that each operator takes, on the rank with the most, and
    whether with a mask."""
    is_capped: bool = False
    """Whether a cap changes scores, so that an operator has them in memory."""


@dataclass
class Elementwise:
    """A block of a layer: its weights, the tokens that go through it, and the tape."""

    tape: Tape
    parameters: dict[str, Parameter]
    """Parameters by their names in transformers."""
    adapters: dict[str, Adapter]
    """Adapters by the path of the linear."""
    config: PretrainedConfig
    rows: int
    length: int
    """Tokens of a row on this rank."""
    hidden: int
    """Bytes of a number of hidden states, between blocks."""
    cast: int | None
    """Bytes of a number in the dtype of autocast; None without it."""
    on_cpu: bool = True
    buffers: frozenset[str] = frozenset()
    is_transposed: bool = False
    """Whether its linears are transformers' Conv1D."""
    is_windowed: bool = False
    is_rotated: bool = True
    """False where a layer of a model with rotary positions says that it has none (`use_rope`)."""
    shares_rows: SharedRows | None = None
    """None: no other rank has tokens of the rows, and fused attention computes them."""
    spreads_experts: bool = False
    """Tokens go to the ranks of their experts, by `ep`."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this rank."""
        return self.rows * self.length

    def within(self, path: str) -> Self:
        """Return a block in this one."""
        start = f"{path}."
        parameters = {
            name.removeprefix(start): p
            for name, p in self.parameters.items()
            if name.startswith(start)
        }
        adapters = {
            name.removeprefix(start): a
            for name, a in self.adapters.items()
            if name.startswith(start)
        }
        buffers = [name.removeprefix(start) for name in self.buffers if name.startswith(start)]
        return replace(self, parameters=parameters, adapters=adapters, buffers=frozenset(buffers))

    def weight(self, name: str) -> Tensor:
        """Return a parameter by its name."""
        return self.parameters[name].on_tape

    def factors(self, name: str) -> list[Tensor]:
        """Return the factors of the adapter at a path; none without one."""
        if name not in self.adapters:
            return []
        return [self.adapters[name].a.on_tape, self.adapters[name].b.on_tape]

    @property
    def top_k(self) -> int:
        """Return the experts that a token is sent to."""
        return self.config.num_experts_per_tok

    def as_dtype(self, x: Tensor, itemsize: int) -> Tensor:
        """Return x in a dtype: x itself where it has that one."""
        if x.itemsize == itemsize:
            return x
        cast = self.tape.run([x], [(x.numel, itemsize)])[0]
        cast.parameter = x.parameter
        return cast

    def pointwise(self, x: Tensor, keeps: Sequence[Tensor] = (), **options: Any) -> Tensor:
        """Return a function of each number of x."""
        return self.tape.run([x], [(x.numel, x.itemsize)], keeps=keeps, **options)[0]

    def power(self, x: Tensor) -> Tensor:
        """Return x to a power, whose backward computes that power less 1, and two products."""
        size = x.num_bytes
        moves = (2 * size, 2 * size, 3 * size)
        return self.pointwise(x, [x], backward=2 * size, backward_moves=moves)

    def rescaled(self, x: Tensor, size: int) -> Tensor:
        """Return x over the root of the mean of its squares over `size` features."""
        squares = self.power(x)
        (mean,) = self.tape.run([squares], [(x.numel // size, WIDE)])
        del squares
        n = mean.num_bytes
        root = self.pointwise(
            mean,
            keeps_outputs=True,
            forward_moves=(2 * n, 2 * n),  # a number is added before
            backward_moves=(2 * n, 2 * n, 3 * n),
        )
        return self.product(x, root)

    def product(self, x: Tensor, y: Tensor, repeats: int = 1) -> Tensor:
        """Return x * y by elements, y of the same numel or broadcast to it.

        `repeats`: how often its gradient has each number, where a sum comes next.
        """
        pairs = [(x, y), (y, x)]
        keeps = [other for mine, other in pairs if mine.slot is not None]
        numel, itemsize = max(x.numel, y.numel), max(x.itemsize, y.itemsize)
        size, moves = numel * itemsize, list[int]()
        for mine, other in pairs:
            if mine.slot is not None:
                moves.append(size // repeats + other.num_bytes + size)
                moves += self._summed(mine, numel, itemsize)
        factors = [self.promoted(z, itemsize) for z in (x, y)]
        # The gradient of what was broadcast is a sum over one as large as the output.
        is_summed = any(z.slot is not None and z.numel < numel for z in (x, y))
        return self.tape.run(
            factors,
            [(numel, itemsize)],
            keeps=keeps,
            forward=self.promotion_bytes(x, y),
            backward=size if is_summed else 0,
            backward_moves=moves,
        )[0]

    def _summed(self, x: Tensor, numel: int, itemsize: int) -> list[int]:
        """Return the moves of the sum of a gradient of so many elements of what was broadcast."""
        is_summed = x.slot is not None and x.numel < numel
        return [(numel + x.numel) * itemsize] * is_summed

    def scaled(self, x: Tensor) -> Tensor:
        """Return x times a number."""
        return self.pointwise(x)

    def shifted(self, x: Tensor) -> Tensor:
        """Return x plus a number."""
        return self.pointwise(x, backward_moves=())

    def dropped(self, x: Tensor, key: str) -> Tensor:
        """Return x after a dropout of the config, which keeps a byte for each number of x."""
        if not getattr(self.config, key, 0.0):
            return x
        moves = dropout(x.numel, x.itemsize)
        mask = self.tape.tensor(x.numel, 1)
        return self.scaled(self.pointwise(x, [mask], forward_moves=moves[:-1]))

    def multiplied(self, x: Tensor, key: str) -> Tensor:
        """Return x times a number of the config; x itself where the family has none."""
        return self.scaled(x) if hasattr(self.config, key) else x

    def sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y."""
        numel, itemsize = max(x.numel, y.numel), max(x.itemsize, y.itemsize)
        terms = [self.promoted(z, itemsize) for z in (x, y)]
        scratch = self.promotion_bytes(x, y)
        moves = [move for z in (x, y) for move in self._summed(z, numel, itemsize)]
        size = [(numel, itemsize)]
        return self.tape.run(terms, size, passes=True, forward=scratch, backward_moves=moves)[0]

    def promoted(self, x: Tensor, itemsize: int) -> Tensor:
        """Return x as an operand of a wider dtype; its gradient is rounded to its own."""
        if x.itemsize == itemsize:
            return x
        wide = self.tape.run([x], [(x.numel, x.itemsize)], view=True)[0]
        wide.parameter = x.parameter
        if wide.slot is not None:
            wide.slot.num_bytes = x.numel * itemsize
        return wide

    def promotion_bytes(self, x: Tensor, y: Tensor) -> int:
        """Return the bytes of the copy that a CPU makes of an operand of the narrower dtype."""
        if x.itemsize == y.itemsize or not self.on_cpu:
            return 0
        return min((x, y), key=lambda z: z.itemsize).numel * max(x.itemsize, y.itemsize)

    def view(self, x: Tensor) -> Tensor:
        """Return x in another shape, whose gradient takes a copy: that of a transposed tensor."""
        return self.tape.run([x], [(x.numel, x.itemsize)], view=True)[0]

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return parts of x of so many elements per token each, in its memory."""
        tokens = x.numel // sum(sizes)
        parts = [(tokens * size, x.itemsize) for size in sizes]
        return self.tape.run([x], parts, view=True)

    def slice(self, x: Tensor, numel: int) -> Tensor:
        """Return a part of x, whose gradient is padded with zeros to that of x."""
        return self.tape.run([x], [(numel, x.itemsize)], view=True)[0]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return parts one after the other in new memory; their gradients are views of its."""
        numel, itemsize = sum(x.numel for x in parts), max(x.itemsize for x in parts)
        return self.tape.run(parts, [(numel, itemsize)], backward_moves=())[0]
