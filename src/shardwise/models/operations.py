"""The operations of layers, with sizes in place of numbers: see tape.py.

Each says what torch's or the project's own operation gives, what it keeps for its backward, and
what it needs while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from shardwise.base.schedule.context import Way
from shardwise.kernels.lora_linear.magnitude import CHUNK_ELEMENTS
from shardwise.models.parameters import Adapter, Parameter, read_in_backward
from shardwise.models.tape import Tape, Tensor, parameter

WIDE = 4
"""Bytes of a number in float32, in which norms, states and softmax are computed."""


class SharedRows(NamedTuple):
    """How rows lie on several ranks, by `cp`."""

    way: Way
    """Way in which attention gets the keys of other ranks."""
    num_ranks: int
    """The number of ranks of `cp`."""
    repeats: float
    """Operators that compute a query's output, each on some of its keys: on average, on the rank
    with the most."""


@dataclass
class TapedBlock:
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
    rounds_last: bool = False
    """Norms multiply by their weight in 32 bits, and round after it."""
    buffers: frozenset[str] = frozenset()
    is_transposed: bool = False
    """Its linears are transformers' Conv1D."""
    is_windowed: bool = False
    shares_rows: SharedRows | None = None
    """None: no other rank has tokens of the rows."""
    spreads_experts: bool = False
    """Tokens go to the ranks of their experts, by `ep`."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this rank."""
        return self.rows * self.length

    def within(self, path: str) -> TapedBlock:
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

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x * y by elements, y of the same numel or broadcast to it."""
        keeps = [other for mine, other in ((x, y), (y, x)) if mine.slot is not None]
        numel, itemsize = max(x.numel, y.numel), max(x.itemsize, y.itemsize)
        factors = [self.promoted(z, itemsize) for z in (x, y)]
        # The gradient of what was broadcast is a sum over one as large as the output.
        is_summed = any(z.slot is not None and z.numel < numel for z in (x, y))
        scratch = numel * itemsize if is_summed else 0
        size, copied = [(numel, itemsize)], self.promotion_bytes(x, y)
        return self.tape.run(factors, size, keeps=keeps, forward=copied, backward=scratch)[0]

    def scaled(self, x: Tensor) -> Tensor:
        """Return x times a number."""
        return self.pointwise(x)

    def dropped(self, x: Tensor, key: str) -> Tensor:
        """Return x after a dropout of the config, which keeps a byte for each number of x."""
        if not getattr(self.config, key, 0.0):
            return x
        return self.scaled(self.pointwise(x, [self.tape.tensor(x.numel, 1)]))

    def multiplied(self, x: Tensor, key: str) -> Tensor:
        """Return x times a number of the config; x itself where the family has none."""
        return self.scaled(x) if hasattr(self.config, key) else x

    def sum(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y."""
        numel, itemsize = max(x.numel, y.numel), max(x.itemsize, y.itemsize)
        terms = [self.promoted(z, itemsize) for z in (x, y)]
        scratch = self.promotion_bytes(x, y)
        return self.tape.run(terms, [(numel, itemsize)], passes=True, forward=scratch)[0]

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
        return self.tape.run(parts, [(numel, itemsize)])[0]

    def rms_norm(self, name: str, x: Tensor, size: int, *, rounds_last: bool = False) -> Tensor:
        """Return the root mean square norm of x over `size` features.

        `rounds_last`: the product with the weight is in 32 bits too.
        """
        weight = self.weight(name)
        wide = self.as_dtype(x, WIDE)
        rounds_last = rounds_last or self.rounds_last
        squares = self.pointwise(wide, [wide], backward=2 * wide.num_bytes)
        (mean,) = self.tape.run([squares], [(wide.numel // size, WIDE)])
        del squares
        root = self.pointwise(mean, keeps_outputs=True)
        normed = self.product(wide, root)
        if rounds_last:
            return self.as_dtype(self.product(normed, self.as_dtype(weight, WIDE)), x.itemsize)
        return self.product(weight, self.as_dtype(normed, x.itemsize))

    # ------------------------------------------------------------------------------ matrix products

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return what a linear gives, with its adapter if it has one."""
        return self.linears((name,), x)[0]

    def linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        """Return what linears give that are called one after the other with x."""
        adapted = [name for name in names if name in self.adapters]
        outputs: dict[str, Tensor] = {}
        for name in names:
            if name in outputs:
                continue
            if name in self.adapters:
                outputs |= zip(adapted, self._lora_linears(adapted, x))
            else:
                outputs[name] = self._plain_linear(name, x)
        return [outputs[name] for name in names]

    def _plain_linear(self, name: str, x: Tensor) -> Tensor:
        weight, num_out = self.weight(_weight_of(name)), self.num_out(name)
        x = self.as_dtype(x, self.cast or x.itemsize)
        size = x.numel // self.num_in(name) * num_out
        values, most = self.parameters[_weight_of(name)].reading(x.itemsize)
        if most:
            self.tape.touch(most)
            back = max(values, most - x.num_bytes)
            sizes = [(size, x.itemsize)]
            return self.tape.run(
                [x], sizes, forward=values, backward=back, read=[weight], product=True
            )[0]
        weight = self.as_dtype(weight, self.cast or weight.itemsize)
        keeps = [x] if weight.slot is not None else []
        if x.slot is not None:
            keeps.append(weight)
        return self.tape.run([weight, x], [(size, x.itemsize)], keeps=keeps, product=True)[0]

    def _lora_linears(self, names: Sequence[str], x: Tensor) -> list[Tensor]:
        """Return what linears with adapters give, in one node; see kernels/lora_linear/fused.py."""
        x = self.as_dtype(x, self.cast or x.itemsize)
        adapters = [self.adapters[name] for name in names]
        rank, num_in = adapters[0].a.shape[0], adapters[0].a.shape[1]
        rows = x.numel // num_in
        itemsize = self.cast or adapters[0].a.itemsize
        h = self.tape.tensor(rows * rank * len(names), itemsize, product=True)
        if itemsize != x.itemsize and self.on_cpu:
            self.tape.touch(rows * num_in * itemsize)  # x in the dtype of the factors
        widths = [self.num_out(name) for name in names]
        factors = [factor for name in names for factor in self.factors(name)]
        # The product with W comes first, then a new one with the adapter's added.
        self.tape.products_within(rows * sum(widths) * x.itemsize)
        forward = 0 if self.tape.keeps_products else rows * widths[-1] * x.itemsize
        read = [self.parameters[_weight_of(name)].reading(x.itemsize) for name in names]
        for i, (values, most) in enumerate(read):
            # One matrix is read at a time, beside the outputs of those before it.
            before, y = rows * sum(widths[:i]) * x.itemsize, rows * widths[i] * x.itemsize
            self.tape.touch(before + max(most, values + 2 * y))
        forward += read[-1][0]
        cast = [num_in * width * x.itemsize if self.cast else 0 for width in widths]
        backward = 2 * h.num_bytes + read_in_backward(cast, read, x, one_at_a_time=self.on_cpu)
        if itemsize != x.itemsize:
            forward = 2 * rows * widths[-1] * itemsize
            backward += max(rows * num_in * (itemsize + x.itemsize), rows * max(widths) * itemsize)
        outputs = self.tape.run(
            [x, *factors],
            [(rows * width, x.itemsize) for width in widths],
            keeps=[x, h],
            forward=forward,
            backward=backward,
            read=[self.weight(_weight_of(name)) for name in names],
        )
        pairs = zip(names, [adapter.magnitude for adapter in adapters], outputs)
        return [y if m is None else self._with_magnitude(n, m, num_in, y) for n, m, y in pairs]

    def _with_magnitude(self, name: str, magnitude: Parameter, num_in: int, y: Tensor) -> Tensor:
        """Return y with the lengths of rows; see kernels/lora_linear/magnitude.py."""
        num_out, wide = magnitude.shape[0], y.numel * WIDE
        inputs = [y, parameter(num_out, magnitude.itemsize, magnitude.is_trained)]
        row_bytes = min(num_out, max(1, CHUNK_ELEMENTS // num_in)) * num_in * WIDE
        copied = wide if y.itemsize < WIDE else 0
        size, keeps = [(y.numel, y.itemsize)], [y, self.tape.tensor(num_out, WIDE)]
        weight = self.parameters[_weight_of(name)]
        values, reading = weight.reading(weight.itemsize)
        most, back = max(values + row_bytes, reading, copied), wide + copied
        return self.tape.run(inputs, size, keeps=keeps, forward=most, backward=back)[0]

    def num_out(self, name: str) -> int:
        """Return the features that come out of a linear [out, in], or a Conv1D [in, out]."""
        return self.parameters[_weight_of(name)].shape[1 if self.is_transposed else 0]

    def num_in(self, name: str) -> int:
        """Return the features that go into a linear [out, in], or a Conv1D [in, out]."""
        return self.parameters[_weight_of(name)].shape[0 if self.is_transposed else 1]

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up; see kernels/gated_activation."""
        return self.tape.run([gate, up], [(up.numel, up.itemsize)], keeps=[gate, up])[0]

    # ----------------------------------------------------------------------------- recurrent mixers

    def gated_norm(self, name: str, x: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of x times an activation of its gate; see kernels/gated_norm.

        It computes in 32 bits, the backward with four tensors of x's size beside the gradients.
        """
        weight = self.weight(name)
        wide = x.numel * WIDE
        copies = 0 if x.itemsize == WIDE else wide * 5 // 2
        root = self.tape.tensor(x.numel // self.parameters[name].shape[0], WIDE)
        return self.tape.run(
            [x, weight, gate],
            [(x.numel, x.itemsize)],
            keeps=[x, gate, root],
            forward=wide + copies,
            backward=4 * wide + copies,
        )[0]

    # ------------------------------------------------------------------------------------ attention

    def copied(self, x: Tensor) -> Tensor:
        """Return a copy of x."""
        return self.pointwise(x)

    def viewed(self, x: Tensor) -> Tensor:
        """Return x with heads before tokens: a view, whose gradient is copied back."""
        return self.tape.run([x], [(x.numel, x.itemsize)], view=True)[0]

    def rotated(self, x: Tensor, share: float) -> Tensor:
        """Return x with a share of each head's features rotated by positions."""
        if share == 1:
            return self.turned(x)
        first = self.slice(x, int(x.numel * share))
        rest = self.slice(x, int(x.numel * (1 - share)))
        return self.beside_turned(self.turned(first), rest)

    def turned(self, x: Tensor) -> Tensor:
        """Return x rotated by positions."""
        angles = parameter(0, self.hidden, is_trained=False)
        direct = self.product(x, angles)
        first, second = (self.slice(x, x.numel // 2) for _ in range(2))
        half = self.joined([self.pointwise(second), first])
        del first, second
        return self.sum(direct, self.product(half, angles))

    def beside_turned(self, turned: Tensor, rest: Tensor) -> Tensor:
        """Return rotated features of heads and the rest of them."""
        total = self.joined([turned, self.as_dtype(rest, turned.itemsize)])
        total.is_head_major = True
        return total

    def fused_attention(
        self, q: Tensor, k: Tensor, v: Tensor, numel: int, size: int, mask_numel: int = 0
    ) -> Tensor:
        """Return the output of scaled_dot_product_attention, by heads of a size.

        A mask is kept by each layer, as numbers of the dtype of q.
        """
        is_copied = self.on_cpu and (q.is_head_major or mask_numel > 0)
        q, k, v = (self.as_dtype(x, self.cast or x.itemsize) for x in (q, k, v))
        lse = self.tape.tensor(numel // size, WIDE, product=True)
        mask = self.tape.tensor(mask_numel, q.itemsize)
        # On a CPU gradients are added up in 32 bits, for all heads of queries.
        scratch = numel * WIDE * (WIDE // q.itemsize) if self.on_cpu else 0
        out = self.tape.run(
            [q, k, v],
            [(numel, v.itemsize)],
            keeps=[q, k, v, lse, mask],
            keeps_outputs=True,
            backward=scratch,
            product=True,
            mixes=True,
        )[0]
        # On a CPU the output may lie as the queries do; projections want tokens before heads.
        return self.copied(out) if is_copied else out

    def activation(self, x: Tensor) -> Tensor:
        """Return the activation of an MLP without a gate."""
        keys = ("mlp_hidden_act", "hidden_act", "activation_function")
        name = next(getattr(self.config, key) for key in keys if hasattr(self.config, key))
        if name == "relu2":
            positive = self.pointwise(x, keeps_outputs=True)
            return self.pointwise(positive, [positive], backward=2 * x.num_bytes)
        if name == "gelu_new":  # in torch's single operators
            half = self.scaled(x)
            cube = self.pointwise(x, [x], backward=2 * x.num_bytes)
            inner = self.scaled(self.sum(x, self.scaled(cube)))
            del cube
            share = self.scaled(self.pointwise(inner, keeps_outputs=True))
            del inner
            return self.product(half, share)
        return self.pointwise(x, [x])

    def layer_norm(self, name: str, x: Tensor, size: int) -> Tensor:
        """Return torch's layer norm of x, which keeps x and two numbers a row."""
        x = self.as_dtype(x, WIDE if self.cast else x.itemsize)
        moments = self.tape.tensor(2 * x.numel // size, WIDE)
        weights = [self.weight(f"{name}{part}") for part in ("weight", "bias")]
        return self.tape.run([x, *weights], [(x.numel, x.itemsize)], keeps=[x, moments])[0]


def _weight_of(linear: str) -> str:
    """Return the name of the weight of a linear; "" is the block itself."""
    return f"{linear}.weight" if linear else "weight"
