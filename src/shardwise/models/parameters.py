"""Weights on the tape of sizes (tape.py), and what products need that read or cast them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from shardwise.kernels.quantised import Format, read_bytes
from shardwise.models.tape import Tensor, parameter


@dataclass(frozen=True)
class Parameter:
    """A parameter as a rank has it."""

    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    form: Format | None = None
    """Format in which it is stored in few bits, if it is."""
    name: str = field(default="", compare=False)
    """Name of the parameter in the layer, as torch gives it."""
    copied: Tensor | None = field(default=None, compare=False)
    """Copy of `itemsize` bytes an element that is read in its place, where there is one."""

    @property
    def on_tape(self) -> Tensor:
        """The weight on a tape, or its copy."""
        return self.copied or parameter(prod(self.shape), self.itemsize, self.is_trained, self.name)

    def reading(self, itemsize: int) -> tuple[int, int]:
        """Return the bytes of the values that a product reads, and the most while they are read.

        0 for what is not stored in few bits.
        """
        if self.form is None:
            return 0, 0
        return prod(self.shape) * itemsize, read_bytes(self.form, self.shape, itemsize)


@dataclass(frozen=True)
class Adapter:
    """The factors of a LoRA adapter on a linear, as a rank has them."""

    a: Parameter
    b: Parameter
    magnitude: Parameter | None = None
    """DoRA's."""


def read_in_backward(
    cast: Sequence[int], read: Sequence[tuple[int, int]], x: Tensor, one_at_a_time: bool
) -> int:
    """Return the bytes of weights that the backward of linears needs, beside the gradient of x.

    `cast`: of copies in the dtype of products; `read`: of `Parameter.reading`. There is no gradient
    of x yet while the first weight is read. torch's backend, that of a CPU, reads one at a time;
    the operators of others take all.
    """
    values = [max(plain, stored) for plain, (stored, _) in zip(cast, read, strict=True)]
    first, rest = read[0][1] - x.num_bytes, [most for _, most in read[1:]]
    if one_at_a_time:
        return max(first, *values, *rest)
    return max(sum(values), sum(values[:-1]) + (rest or [first])[-1])
