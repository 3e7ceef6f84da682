"""The operations of layers, with sizes in place of numbers: see tape.py.

Each says what torch's or the project's own operation gives, what it keeps for its backward, and
what it needs and moves while it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.kernels.lora_linear.magnitude import CHUNK_ELEMENTS
from shardwise.models.chunks import ChunkFlops, CoreFlops
from shardwise.models.elementwise import Elementwise
from shardwise.models.moves import WIDE, gated_norm, rms_norm, rotation
from shardwise.models.parameters import Parameter, read_in_backward
from shardwise.models.tape import Tensor, parameter


@dataclass
class TapedBlock(Elementwise):
    """A block of a layer, with all that its forward may run."""

    # --------------------------------------------------------------------------------------- norms

    def rms_norm(self, name: str, x: Tensor, size: int) -> Tensor:
        """Return the root mean square norm of x over `size` features; see kernels/rms_norm.

        On a GPU one kernel computes it, and one its gradient.
        """
        weight, wide = self.weight(name), x.numel * WIDE
        root = self.tape.tensor(x.numel // size, WIDE)
        moves, back = rms_norm(x.numel, x.itemsize, _trained(weight), not self.on_cpu)
        forward, backward = (0, wide) if x.itemsize == WIDE else (wide, wide * 7 // 2)
        if not self.on_cpu:
            forward, backward = 0, 0
        return self.tape.run(
            [x, weight],
            [(x.numel, x.itemsize)],
            keeps=[x, root],
            forward=forward,
            backward=backward,
            forward_moves=moves,
            backward_moves=back,
        )[0]

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
        inputs = [weight, x]
        moves = [0] * sum(y.slot is not None for y in inputs)
        bias = self.parameters.get(f"{name}.bias" if name else "bias")
        if bias is not None and bias.is_trained:
            moves.append(size * x.itemsize)  # its gradient is a sum
        return self.tape.run(
            inputs, [(size, x.itemsize)], keeps=keeps, product=True, backward_moves=moves
        )[0]

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
        weights = [self.parameters[_weight_of(name)] for name in names]
        read = [w.reading(x.itemsize) for w in weights]
        # The kernels copy weights into the dtype of products, in each pass.
        is_cast = [w.form is None and w.itemsize != x.itemsize for w in weights]
        cast = [w.on_tape.numel * x.itemsize * i for w, i in zip(weights, is_cast, strict=True)]
        casts = [w.on_tape.num_bytes + c for w, c in zip(weights, cast, strict=True) if c]
        self.tape.weight_bytes += sum(casts)
        for i, (values, most) in enumerate(read):
            # One matrix is read at a time, beside the outputs of those before it.
            before, y = rows * sum(widths[:i]) * x.itemsize, rows * widths[i] * x.itemsize
            self.tape.touch(before + max(most, max(values, cast[i]) + 2 * y))
        forward += max(read[-1][0], cast[-1])
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
            forward_moves=(0, *casts),
            backward_moves=(0, *(casts if x.slot is not None else ())),
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

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return an activation of gate, times up."""
        if self.activation_name != "silu":
            return self.product(self.activation(gate), up)
        return self.gated_silu(gate, up)

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up; see kernels/gated_activation."""
        size = up.num_bytes
        forward = 2 * size, 3 * size  # the activation; it times the other
        backward = 2 * size, 3 * size, 3 * size, 3 * size
        if not self.on_cpu:  # fla's kernels
            forward, backward = (3 * size,), (5 * size,)
        return self.tape.run(
            [gate, up],
            [(up.numel, up.itemsize)],
            keeps=[gate, up],
            forward_moves=forward,
            backward_moves=backward,
        )[0]

    def clamped_gate(self, x: Tensor) -> Tensor:
        """Return half as many numbers of gates and products; see kernels/gated_activation."""
        half, mask = x.num_bytes // 2, x.numel // 2
        masked = (2 * half, half + mask, 2 * half + mask, 2 * half)
        again = (2 * half,) * 5
        backward = (*again, *(3 * half,) * 2, *masked)
        backward += (*(2 * half,) * 3, *(3 * half,) * 4, *masked[1:])
        return self.tape.run(
            [x],
            [(x.numel // 2, x.itemsize)],
            keeps=[x],
            forward=2 * half,
            backward=4 * half,
            forward_moves=(*again, 3 * half, 3 * half),
            backward_moves=backward,
        )[0]

    # ----------------------------------------------------------------------------- recurrent mixers

    def gated_norm(self, name: str, x: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of x times an activation of its gate; see kernels/gated_norm."""
        weight, wide = self.weight(name), x.numel * WIDE
        forward, backward = wide, wide
        if not self.on_cpu:
            forward, backward = 0, 0
        elif x.itemsize < WIDE:
            forward, backward = wide * 5 // 2, wide * 11 // 2
        root = self.tape.tensor(x.numel // self.parameters[name].shape[0], WIDE)
        moves, moves_back = gated_norm(x.numel, x.itemsize, _trained(weight), not self.on_cpu)
        return self.tape.run(
            [x, weight, gate],
            [(x.numel, x.itemsize)],
            keeps=[x, gate, root],
            forward=forward,
            backward=backward,
            forward_moves=moves,
            backward_moves=moves_back,
        )[0]

    # ------------------------------------------------------------------------------------ attention

    def copied(self, x: Tensor) -> Tensor:
        """Return a copy of x."""
        return self.pointwise(x, backward_moves=())

    def viewed(self, x: Tensor, is_copied: bool) -> Tensor:
        """Return x with heads before tokens: a view. `is_copied`: its gradient is copied back.

        That of attention lies as projections want it, where nothing is in between.
        """
        moves = None if is_copied else ()
        return self.tape.run([x], [(x.numel, x.itemsize)], view=True, backward_moves=moves)[0]

    def rotated(
        self, x: Tensor, size: int, share: float = 1, is_wide: bool = False, is_paired: bool = False
    ) -> Tensor:
        """Return x with a share of each head's features rotated by positions; see kernels/rotary.

        `size`: features of a head. `is_wide`: in 32 bits. `is_paired`: neighbours.
        """
        rotated, wide = int(x.numel * share), max(x.itemsize, WIDE if is_wide else self.hidden)
        angles = int(self.length * size * share)
        moves = rotation(x.numel, rotated, angles, x.itemsize, wide, is_paired)
        between = rotated * wide if rotated < x.numel or wide > x.itemsize else 0
        (y,) = self.tape.run(
            [x],
            [(x.numel, x.itemsize)],
            forward=between,
            backward=between,
            forward_moves=moves,
            backward_moves=moves,
        )
        y.is_head_major = share < 1
        return y

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
            forward_moves=[0, *[mask_numel * (1 + q.itemsize)] * (mask_numel > 0)],
            backward=scratch,
            backward_moves=(0,),
            product=True,
            flops=self.attention_flops(q, numel),
        )[0]
        # On a CPU the output may lie as the queries do; projections want tokens before heads.
        return self.copied(out) if is_copied else out

    def attention_flops(self, q: Tensor, numel: int) -> CoreFlops:
        """Return the FLOPs of fused attention, which gives as many numbers; see `Attention`.

        A window comes as a mask, and scores of all pairs are computed.
        """
        keys, values = q.numel // self.tokens, numel // self.tokens
        once = not self.is_windowed
        forward, backward = (
            ChunkFlops(width * once, width * (2 - once))
            for width in (keys + values, 3 * keys + 2 * values)
        )
        return CoreFlops(forward, backward, is_kept=True)

    @property
    def activation_name(self) -> str:
        """Return the name of a feed-forward's activation."""
        keys = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function")
        names = (getattr(self.config, key) for key in keys if hasattr(self.config, key))
        return next(names, "silu")  # which a forward without a key names itself

    def activation(self, x: Tensor) -> Tensor:
        """Return the activation of a feed-forward."""
        name = self.activation_name
        if name == "relu2":
            positive = self.pointwise(x, keeps_outputs=True)
            return self.power(positive)
        if name == "xielu":
            return self._xielu(x)
        if name == "gelu_new":  # in torch's single operators
            half = self.scaled(x)
            cube = self.power(x)
            inner = self.scaled(self.sum(x, self.scaled(cube)))
            del cube
            share = self.shifted(self.pointwise(inner, keeps_outputs=True))
            del inner
            return self.product(half, share)
        return self.pointwise(x, [x])

    def _xielu(self, x: Tensor) -> Tensor:
        """Return Apertus' activation, whose rates are trained: see models/patches/xielu.py."""
        above, below = (self.weight(f"act_fn.alpha_{sign}") for sign in "pn")
        above, below = (self.pointwise(weight, [weight]) for weight in (above, below))
        positive = self.pointwise(x, keeps_outputs=True)
        upper = self.product(above, self.power(positive))
        del positive
        grown, sizes = self.pointwise(x, [x]), [(x.numel, x.itemsize)]
        (rest,) = self.tape.run([grown, x], sizes, passes=True, backward_moves=(2 * x.num_bytes,))
        del grown
        lower = self.product(below, rest)
        del rest
        both = self.sum(upper, lower)
        del upper, lower
        return self.sum(both, self.scaled(x))

    def layer_norm(self, name: str, x: Tensor, size: int) -> Tensor:
        """Return torch's layer norm of x, which keeps x and two numbers a row."""
        # Autocast on a GPU computes it in 32 bits; on a CPU it has no rule for it.
        x = self.as_dtype(x, WIDE if self.cast and not self.on_cpu else x.itemsize)
        moments = self.tape.tensor(2 * x.numel // size, WIDE)
        names = (f"{name}weight", f"{name}bias")
        weights = [self.weight(name) for name in names if name in self.parameters]
        return self.tape.run([x, *weights], [(x.numel, x.itemsize)], keeps=[x, moments])[0]


def _trained(weight: Tensor) -> int:
    """Return the bytes of a number of a weight; 0 if it is frozen."""
    return weight.itemsize if weight.slot is not None else 0


def _weight_of(linear: str) -> str:
    """Return the name of the weight of a linear; "" is the block itself."""
    return f"{linear}.weight" if linear else "weight"
