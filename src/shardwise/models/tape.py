"""A forward and its backward in which tensors have sizes and no numbers.

A kind of layer writes its forward down once more with the operations of this module
(`Kind.activations`). A `Tensor` here takes memory for as long as Python refers to it, as torch's
does, and what an operation keeps for its backward stays alive until that has run. So the same few
lines say what a layer keeps, and the most that is alive at once in its forward and its backward.
They say, too, how many operators torch runs one by one, the bytes that each reads and writes, and
the FLOPs of each core.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.models.chunks import CoreFlops

Moves = Sequence[int]
"""Bytes that eager operators read and write, one number an operator; 0 is a product or a core."""


class Memory:
    """Bytes on a tape that are alive for as long as something refers to this object."""

    __slots__ = ("num_bytes", "num_slots", "tape")

    def __init__(self, tape: "Tape", num_bytes: int) -> None:
        self.tape, self.num_bytes, self.num_slots = tape, num_bytes, 0
        tape.alive_bytes += num_bytes
        tape.touch()

    def __del__(self) -> None:
        self.tape.alive_bytes -= self.num_bytes


class Slot:
    """Where the gradient of one output of an operation is added up."""

    __slots__ = ("from_weights", "gradient", "is_leaf", "num_bytes")

    def __init__(self, num_bytes: int, is_leaf: bool = False, from_weights: bool = False) -> None:
        """Begin without a gradient; `from_weights`: nothing but weights went into the output."""
        self.gradient: Memory | None = None
        self.num_bytes, self.is_leaf = num_bytes, is_leaf
        self.from_weights = from_weights or is_leaf

    def add(self, gradient: Memory) -> None:
        """Add a gradient: in place, unless another slot has the same memory."""
        if self.is_leaf:
            return  # The gradients of weights count elsewhere: what is added to them goes.
        if self.gradient is not None:
            gradient.tape.backward_moves.append(3 * self.num_bytes)
            if self.gradient.num_slots == 1:
                return
            gradient = Memory(gradient.tape, self.num_bytes)
            self.clear()
        self.gradient = gradient
        gradient.num_slots += 1

    def clear(self) -> None:
        """Drop the gradient."""
        if self.gradient is not None:
            self.gradient.num_slots -= 1
            self.gradient = None


class Tensor:
    """A tensor by its elements and bytes per element, and the slot of its gradient, if it has one.

    `numel` of a view is less than what its memory has.
    """

    __slots__ = ("is_head_major", "itemsize", "memory", "numel", "parameter", "slot")

    def __init__(self, memory: Memory | None, numel: int, itemsize: int, slot: Slot | None) -> None:
        self.memory, self.numel, self.itemsize, self.slot = memory, numel, itemsize, slot
        self.is_head_major, self.parameter = False, ""

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.itemsize


def parameter(numel: int, itemsize: int, is_trained: bool, name: str = "") -> Tensor:
    """Return a weight, whose own bytes do not count here, and the name of the parameter."""
    slot = Slot(numel * itemsize, is_leaf=True) if is_trained else None
    weight = Tensor(None, numel, itemsize, slot)
    weight.parameter = name
    return weight


class Use(NamedTuple):
    """An operation on a parameter and on what is computed."""

    needs_input: bool
    """The backward gives the gradient of what is computed."""
    number: int
    """Index of this operation on the tape."""


@dataclass
class _Node:
    outputs: list[Slot]
    inputs: list[Slot]
    passes: bool
    kept: list[Memory | None]
    scratch_bytes: int
    read_bytes: int
    """Bytes that its backward reads beside gradients."""
    moves: Moves | None
    """Moves of its backward; None: of one operator that reads and writes all once."""


@dataclass
class Tape:
    """Record of what a forward has done, and of what is alive."""

    keeps: bool = True
    """False: nothing is kept for the backward, as in a layer that will be computed again."""
    alive_bytes: int = 0
    peak_bytes: int = 0
    forward_moves: list[int] = field(default_factory=list)
    """Moves of all operators in the forward."""
    backward_moves: list[int] = field(default_factory=list)
    """Moves of all operators in the backward, sums of gradients included."""
    core_flops: list[CoreFlops] = field(default_factory=list)
    """FLOPs of each core in the forward."""
    weight_bytes: int = 0
    """Bytes that operators on weights alone move in the forward: copies in another dtype."""
    is_halved: bool = False
    """A backward gives the gradients of inputs first: until those of weights, it frees nothing."""
    products: deque[Memory] = field(default_factory=deque)
    """Outputs of products that selective checkpointing keeps from the first forward."""
    keeps_products: bool = False
    takes_products: bool = False
    named: list[Tensor] = field(default_factory=list)
    """Tensors to which transformers' layer refers by a name until it returns."""
    uses: dict[str, Use] = field(default_factory=dict)
    """Operations on parameters that were met, by their names."""
    mixes_backward: bool = False
    """The backward goes through an operation in which tokens meet."""
    last_saving: int = 0
    """Number of the last operation that keeps something for the backward."""
    _nodes: list[_Node] = field(default_factory=list)
    _late: list[_Node] = field(default_factory=list)
    _late_gradients: list[Memory] = field(default_factory=list)
    _num_run: int = 0
    """Operations so far."""
    _last_needed: int = 0
    """The number of the last operation whose backward reads a tensor."""
    _untaken: list[Memory] = field(default_factory=list)

    def reads(self, x: Tensor) -> bool:
        """Return whether the backward of what has run reads a tensor."""
        return any(x.memory is memory for node in self._nodes for memory in node.kept)

    def touch(self, scratch_bytes: int = 0) -> None:
        """Count bytes that are alive only at this moment, beside all others."""
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes + scratch_bytes)

    def hold(self, x: Tensor) -> Tensor:
        """Return x, which lives until the layer returns."""
        self.named.append(x)
        return x

    def tensor(self, numel: int, itemsize: int, product: bool = False) -> Tensor:
        """Return a new tensor without a gradient."""
        return Tensor(self._memory(product, numel * itemsize), numel, itemsize, None)

    def run(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[int, int]],
        *,
        keeps: Sequence[Tensor] = (),
        forward: int = 0,
        backward: int = 0,
        view: bool = False,
        passes: bool = False,
        keeps_outputs: bool = False,
        product: bool = False,
        mixes: bool = False,
        flops: CoreFlops | None = None,
        read: Sequence[Tensor] = (),
        forward_moves: Moves | None = None,
        backward_moves: Moves | None = None,
    ) -> list[Tensor]:
        """Run an operation and return its outputs, given as (elements, bytes of each).

        `keeps`: what its backward reads. `forward` and `backward`: bytes that are alive only while
        it runs, beside inputs and outputs and their gradients. `view`: outputs lie in the memory of
        the first input. `passes`: the gradient of the output is that of every input.
        `product`: selective checkpointing keeps the outputs. `mixes`: tokens meet, as they do in
        a core, which has `flops`. `read`: frozen weights that it reads, beside the inputs.
        `forward_moves` and `backward_moves`: those of its operators; by default one of each, which
        reads all inputs (what is kept and the gradients of outputs) and writes all outputs (the
        gradients of inputs); none in the forward of a view and in a backward that passes on its
        gradient; and a product or a core moves 0 bytes.
        """
        self._num_run += 1
        self._note([*inputs, *read])
        self.core_flops += [flops] if flops else []
        if forward_moves is None and not view:
            moved = _total(inputs) + sum(numel * size for numel, size in outputs)
            forward_moves = (0 if product or flops else moved,)
        self.forward_moves += forward_moves or ()
        if all(x.parameter for x in inputs):
            self.weight_bytes += sum(forward_moves or ())
        self.touch(forward)
        if view:
            results = [Tensor(inputs[0].memory, *size, None) for size in outputs]
        else:
            results = [
                Tensor(self._memory(product, n * size), n, size, None) for n, size in outputs
            ]
        self.touch(forward)
        slots = [x.slot for x in inputs if x.slot is not None]
        if slots:
            from_weights = all(slot.from_weights for slot in slots)
            for y in results:
                y.slot = Slot(y.num_bytes, from_weights=from_weights)
            self.mixes_backward |= mixes or flops is not None
            if keeps or keeps_outputs:
                self.last_saving = self._num_run
            if keeps and self.keeps_products:
                self._last_needed = self._num_run
            kept = [x.memory for x in keeps] if self.keeps else []
            if keeps_outputs and self.keeps:
                kept += [y.memory for y in results]
            made = [y.slot for y in results if y.slot is not None]
            if backward_moves is None and (product or passes):
                backward_moves = (0,) * len(slots) * product
            elif backward_moves is None and flops:
                backward_moves = (0,)
            read_bytes = _total(keeps) + keeps_outputs * _total(results)
            self._nodes.append(
                _Node(made, slots, passes, kept, backward, read_bytes, backward_moves)
            )
        return results

    def _note(self, inputs: Sequence[Tensor]) -> None:
        """Note which parameters meet what is computed."""
        computed = [x for x in inputs if not x.parameter]
        if computed:
            use = Use(any(x.slot is not None for x in computed), self._num_run)
            self.uses |= {x.parameter: use for x in inputs if x.parameter}

    def products_within(
        self, num_bytes: int, output_bytes: int = 0, scratch_bytes: int = 0, at_once: int = 0
    ) -> int:
        """Keep or take the outputs of products within the next operation, as `run` does its own.

        Return the bytes that it needs while it runs, beside what is kept: `scratch_bytes`, of which
        `at_once` are outputs of products. When the first of them is taken again, all others and the
        operation's `output_bytes` are there.
        """
        if not (self.keeps_products or self.takes_products):
            return scratch_bytes
        products = self._memory(True, num_bytes)
        others = max(0, scratch_bytes - at_once)
        self.touch(output_bytes + others)
        del products
        return others

    def _memory(self, product: bool, num_bytes: int) -> Memory:
        if product and self.takes_products:
            memory = self.products.popleft()
            # torch stops computing again at the last tensor that the backward needs. So what the
            # product that needs it has given is not taken, and stays until the backward has run.
            if self._num_run >= self._last_needed:
                self._untaken.append(memory)
            return memory
        memory = Memory(self, num_bytes)
        if product and self.keeps_products:
            self.products.append(memory)
        return memory

    def backward(self, slot: Slot, gradient: Memory) -> None:
        """Run the backward of everything, from the gradient of one output."""
        slot.add(gradient)
        del gradient
        while self._nodes:
            node = self._nodes.pop()
            if self.is_halved:
                self._late.append(node)
                if any(slot.from_weights for slot in node.inputs):
                    self._leave([s.gradient for s in node.outputs if s.gradient])
            self._run_backward(node)
        self._untaken.clear()

    def _leave(self, gradients: Sequence[Memory]) -> None:
        """Keep gradients for the other half. Nothing more is added to them in place."""
        for gradient in gradients:
            gradient.num_slots += 1
        self._late_gradients += gradients

    @property
    def late_bytes(self) -> int:
        """The gradients that a halved backward has left for those of weights."""
        return sum({id(g): g.num_bytes for g in self._late_gradients}.values())

    def forget(self) -> None:
        """Drop the graph."""
        self._nodes.clear()
        self._num_run = 0

    def _run_backward(self, node: _Node) -> None:
        arrived = [slot.gradient for slot in node.outputs if slot.gradient is not None]
        if not arrived:
            return
        inputs = [slot for slot in node.inputs if not (self.is_halved and slot.from_weights)]
        if node.passes:
            gradients = [arrived[0]] * len(inputs)
        else:
            gradients = [Memory(self, slot.num_bytes) for slot in inputs]
            self.touch(node.scratch_bytes)
        if node.moves is None:
            given = sum(slot.num_bytes for slot in inputs)
            taken = sum(slot.num_bytes for slot in node.outputs if slot.gradient is not None)
            self.backward_moves.append(taken + node.read_bytes + given)
        else:
            self.backward_moves += node.moves
        for slot, gradient in zip(inputs, gradients, strict=True):
            slot.add(gradient)
        for slot in node.outputs:
            slot.clear()


def _total(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, of which one may be there twice."""
    return sum({id(x): x.num_bytes for x in tensors}.values())
