"""Functions that every recurrent core offers, so that its tokens may lie on several ranks.

The state after some tokens is an affine map of the state before them: `transition(before) + after`,
where `after` is the state that these tokens leave if they begin from zero. Ranks that have the
tokens of one row between them exchange these two, whose size does not depend on the tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOG2_E = math.log2(math.e)


class Summary(NamedTuple):
    """The affine map of some tokens: the state after them is `pass_on(transition, before) + after`.

    A transition of 0 means that a document begins among the tokens.
    """

    transition: torch.Tensor
    """A matrix per head [B, N, S, S], or a factor that multiplies the state by elements."""
    after: torch.Tensor
    """[B, ...], the shape of a state, in float32 or float64."""


class Recurrence(NamedTuple):
    """A core by the functions that a rank needs which has only some tokens of its rows.

    `inputs` are the core's tensors in the order of its `run`; `documents` [B, T] int64 or None are
    the documents of the tokens: the state is 0 before a token whose document differs from that of
    the token before. `before` is the state before the first token, in its document.
    """

    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """run(*inputs, before, documents): return the outputs and the last state, with a backward."""
    summary: Callable[..., Summary]
    """summary(*inputs, documents): return the map of all these tokens, without a gradient."""
    grad_before: Callable[..., torch.Tensor]
    """grad_before(*inputs, grad_out, documents): return the gradient of `before` that the gradient
    of the outputs gives, if the last state has none. It does not depend on `before`."""
    pass_on: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """pass_on(transition, state): return the state [B, ...] that tokens leave of `state`."""
    pass_back: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """pass_back(transition, grad_after): return the gradient of the state before the tokens."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype of states: float32, or float64 if x is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def power_of_e(x: torch.Tensor) -> torch.Tensor:
    """Return e^x of an x in float32 or float64, as a new tensor.

    It is a power of 2: on a CPU torch calls MKL for e^x, which takes 50 times as long where powers
    are 0 or infinite, and many decays are.
    """
    return (x * LOG2_E).exp2_()


def begins(documents: torch.Tensor) -> torch.Tensor:
    """Return whether a document begins at each token, [B, T]; the first token of a row goes on."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))


def numbers_of(documents: torch.Tensor | None) -> torch.Tensor | None:
    """Return the number of each token's document in its row, from 0: [B, T]."""
    return None if documents is None else begins(documents).cumsum(1)


def by_matrix(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return matrices [B, N, S, S] times states [B, N, S, H]."""
    return transition @ state


def by_transposed_matrix(transition: torch.Tensor, grad_after: torch.Tensor) -> torch.Tensor:
    """Return the transposed matrices times gradients of states [B, N, S, H]."""
    return transition.mT @ grad_after


def by_factor(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return factors times states, or times their gradients: both are elementwise."""
    return transition * state


class Neighbours(Protocol):
    """The ranks that have the other tokens of this rank's rows, each a stretch of them.

    A method is called by all of these ranks, in the same order.
    """

    document_ids: torch.Tensor
    """[B, T] of complete rows."""
    size: int
    """The number of these ranks."""

    @property
    def documents(self) -> torch.Tensor | None:
        """The documents [B, T] of complete rows that are kept apart; None: none are."""
        ...

    def earlier(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return x [B, P, D] of the P tokens before this rank's, of x [B, T, D] of its own.

        It is 0 before a row begins. Its gradient goes to the ranks that have these tokens.
        """
        ...

    def documents_before(self, num_tokens: int) -> torch.Tensor:
        """Return the documents [B, P] of the P tokens before this rank's; -2 before a row."""
        ...

    def state_before(self, core: Recurrence, summary: Summary) -> torch.Tensor:
        """Return the state before this rank's tokens, 0 if a document begins with the first."""
        ...

    def grad_state_after(
        self, core: Recurrence, transition: torch.Tensor, grad_before: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the state after this rank's tokens, which later ranks give.

        `transition` and `grad_before` are what this rank's tokens give to it.
        """
        ...

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of what these ranks have in x, without a gradient."""
        ...


@dataclass
class Tokens:
    """Facts of the tokens beside a core's inputs; one object for all cores of a model."""

    documents: torch.Tensor | None = None
    """[B, T] int64 with `data.packing: isolated`: a state and a window end with a document."""
    neighbours: Neighbours | None = None
    """With context parallelism: the ranks that have the other tokens."""

    def earlier(
        self, x: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the tokens [B, P, D] before x, None for zeros, and documents [B, P + T]."""
        if self.neighbours is None:
            return None, self.documents
        before = self.neighbours.earlier(x, num_tokens)
        if self.documents is None:
            return before, None
        return before, torch.cat([self.neighbours.documents_before(num_tokens), self.documents], 1)

    def recur(self, core: Recurrence, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a core, with the state that the tokens before these have left."""
        if self.neighbours is None:
            return core.run(*inputs, None, self.documents)[0]
        with torch.no_grad():
            summary = core.summary(*inputs, self.documents)
            before = self.neighbours.state_before(core, summary)
        out, last = core.run(*inputs, before, self.documents)
        return _PassedOn.apply(
            core, self.neighbours, self.documents, summary.transition, out, last, *inputs
        )


class _PassedOn(torch.autograd.Function):
    """The outputs as they are; in the backward, the last state gets the gradient of later ranks.

    So the backward of the core, which comes next, has both of its gradients. The state before the
    first token gets none: what it gives to earlier ranks is in theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        core: Recurrence,
        neighbours: Neighbours,
        documents: torch.Tensor | None,
        transition: torch.Tensor,
        out: torch.Tensor,
        last: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.core, ctx.neighbours = core, neighbours
        ctx.save_for_backward(documents, transition, *inputs)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        documents, transition, *inputs = ctx.saved_tensors
        (grad_out,) = gradients
        grad_before = ctx.core.grad_before(*inputs, grad_out, documents)
        grad_last = ctx.neighbours.grad_state_after(ctx.core, transition, grad_before)
        return None, None, None, None, grad_out, grad_last, *(None for _ in inputs)
