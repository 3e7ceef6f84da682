"""Which half of a backward runs, where a pipeline halves it."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

Half = Literal["full", "input", "weight"]


class BackwardHalf:
    """Which gradients the running backward computes: the input's, the weights', or both ("full").

    A pipeline may compute the gradient of a stage's input first and those of its weights later.
    autograd then runs a node in both halves and does not tell it which one is running, so that the
    second half would compute the first again. Therefore a stage and its linears share this object,
    and the stage sets it. A context variable would not do: on a GPU autograd runs backwards in a
    thread of its own.
    """

    def __init__(self) -> None:
        self.current: Half = "full"

    @contextmanager
    def running(self, half: Half) -> Generator[None]:
        """Set the half of the backwards that run within the context."""
        before, self.current = self.current, half
        try:
            yield
        finally:
            self.current = before
