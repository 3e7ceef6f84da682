"""What is asked of every recurrent core: documents, states, gradients, pieces, and saved bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.kernels.recurrence import Recurrence

Core = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def weighed(x: torch.Tensor) -> torch.Tensor:
    """A sum that weighs every element differently."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.linspace(-1, 1, x.numel(), dtype=wide.dtype).view(x.shape)).sum()


def run(
    core: Core, tensors: Sequence[torch.Tensor], *others: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The outputs, the last state, and the gradients of a weighed sum of both."""
    out, state = core(*tensors, *others)
    return out, state, *torch.autograd.grad(weighed(out) + weighed(state), tensors)


def assert_equal_to_naive(
    core: Core, naive: Core, tensors: Sequence[torch.Tensor], documents: torch.Tensor | None
) -> None:
    """In float64; of each result to 1e-10 of its largest element."""
    for mine, other in zip(run(core, tensors, documents), run(naive, tensors, documents)):
        scale = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10 * scale)


def in_pieces(
    core: Recurrence,
    inputs: Sequence[torch.Tensor],
    shared: Sequence[int],
    documents: torch.Tensor | None,
    grad_out: torch.Tensor,
    cuts: Sequence[int],
) -> list[torch.Tensor]:
    """The outputs and the gradients of all inputs, if each piece only knows its own tokens.

    Pieces pass the maps of the state on by hand, as ranks do. Inputs whose places are in `shared`
    have no tokens: their gradients are added up.
    """
    pieces = []
    for first, end in zip([0, *cuts], [*cuts, grad_out.shape[1]]):
        mine = [
            (x if place in shared else x[:, first:end]).detach().requires_grad_()
            for place, x in enumerate(inputs)
        ]
        # What a rank gets of the tokens before: whether a document begins with its first one.
        tokens = None if documents is None else documents[:, first:end]
        goes_on = torch.ones(grad_out.shape[0], dtype=torch.bool)
        if documents is not None and first:
            goes_on = documents[:, first] == documents[:, first - 1]
        pieces.append((mine, tokens, goes_on, grad_out[:, first:end]))
    with torch.no_grad():
        maps = [core.summary(*mine, tokens) for mine, tokens, _, _ in pieces]
        firsts = [core.grad_before(*mine, of_piece, tokens) for mine, tokens, _, of_piece in pieces]

    def only(goes_on: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return state * goes_on.view(-1, *[1] * (state.ndim - 1))

    states = [torch.zeros_like(maps[0].after)]
    for (transition, after), (_, _, goes_on, _) in zip(maps[:-1], pieces[1:]):
        states.append(only(goes_on, core.pass_on(transition, states[-1]) + after))
    grad_lasts = [torch.zeros_like(maps[0].after)]
    for place in reversed(range(1, len(pieces))):
        grad_first = core.pass_back(maps[place].transition, grad_lasts[0]) + firsts[place]
        grad_lasts.insert(0, only(pieces[place][2], grad_first))
    outs, gradients = [], []
    for (mine, tokens, _, of_piece), state, grad_last in zip(pieces, states, grad_lasts):
        out, last = core.run(*mine, state, tokens)
        outs.append(out)
        gradients.append(torch.autograd.grad([out, last], mine, [of_piece, grad_last]))
    return [
        torch.cat(outs, 1),
        *(
            sum(parts, torch.zeros_like(parts[0])) if place in shared else torch.cat(parts, 1)
            for place, parts in enumerate(zip(*gradients))
        ),
    ]


def saved_bytes(core: Core, tensors: Sequence[torch.Tensor], *others: Any) -> int:
    """The bytes of all storages that a forward keeps for its backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        core(*tensors, *others)
    return sum(kept.values())
