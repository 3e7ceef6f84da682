"""How modules compute with their shares of weights that tensor parallelism has sharded."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers.pytorch_utils import Conv1D

from shardwise.kernels.linear_cross_entropy import Vocabulary
from shardwise.models.names import in_use, is_lengths
from shardwise.models.slot_dropout import SlotDropout
from shardwise.models.tensor_cuts import BlockSplit, Rows
from shardwise.models.tensor_plan import rows_in, whole_biases
from shardwise.parallel.place import local, placed
from shardwise.parallel.tensor_axis import Move, TensorAxis


def around(forward: Callable[..., Any], before: Move, after: Move) -> Callable[..., Any]:
    """Return a forward that moves hidden states: its first argument and (first) result."""

    def moved(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (before(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = before(kwargs["hidden_states"])
        output = forward(*args, **kwargs)
        return (after(output[0]), *output[1:]) if isinstance(output, tuple) else after(output)

    return moved


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """Move nothing."""
    return x


class PlainShares:
    """Plain shares in place of DTensors, under their names, while a module and its children run."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.changed: dict[tuple[nn.Module, str], Move] = {}
        """Functions of the shares of some parameters, by owner and name, which are used instead."""

    @cached_property
    def _places(self) -> list[tuple[Any, str, Move]]:
        """Return owner, name and function of each such parameter. They outlive its replacement."""
        return [
            (owner, name, self.changed.get((owner, name), as_it_is))
            for owner in self.module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
            and (isinstance(parameter, DTensor) or (owner, name) in self.changed)
        ]

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Put the shares into the modules' `__dict__`, where attributes hide parameters.

        What a module around has put there stays.
        """
        places = [place for place in self._places if place[1] not in place[0].__dict__]
        try:
            for owner, name, change in places:
                owner.__dict__[name] = change(local(owner._parameters[name]))
            yield
        finally:  # Checkpointing may end a recomputation here, once it has all that it needs.
            for owner, name, _ in places:
                owner.__dict__.pop(name, None)

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward during which the shares are in place."""
        return self.in_place()(forward)


def compute_shares(block: nn.Module, split: BlockSplit, axis: TensorAxis) -> None:
    """Let a sharded block compute this rank's partial sum of its output, and add these up."""
    shares = PlainShares(block)
    for name, value in split.attributes.items():
        owner, _, attribute = name.rpartition(".")
        setattr(in_use(block.get_submodule(owner)), attribute, value)
    for name, cut in split.weights.items():
        owner = block.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and cut.dim == 1:
            for module in modules_of_type(owner, Conv1D):
                module.nf = cut.rows.local_size
    for name, cut in split.buffers.items():
        owner, _, buffer = name.rpartition(".")
        module = block.get_submodule(owner)
        module._buffers[buffer] = cut.rows.take(module.get_buffer(buffer), cut.dim, axis.rank)
    for name, norm in split.norms.items():
        module: Any = block.get_submodule(name)
        module.forward = norm(module, module.weight.numel(), axis.sum_within)
    for name in split.summed:
        module = block.get_submodule(name)
        module.forward = around(module.forward, as_it_is, axis.sum_within)
    for owner, name in whole_biases(block, split):
        shares.changed[owner, name] = lambda bias: bias / axis.size  # Each rank adds it.
    for name, cut in rows_in(block, split).items():
        _share_dropout(block, name, cut.rows, axis)
        adapter = block.get_submodule(name.removesuffix(".base_layer"))
        for magnitude in filter(is_lengths, adapter.modules()):
            assert not cut.rows.shared, "the squares of shared columns would count twice"
            magnitude.share_rows(axis.sum)  # 2 (n-1)/n of [out] float32 leave each rank.
    block.forward = around(shares.within(block.forward), axis.enter, axis.leave)


def modules_of_type(module: nn.Module, kind: type[nn.Module]) -> list[Any]:
    """Return the modules of a kind in a module: one, or two where PEFT has made a copy of it."""
    return [child for child in module.modules() if isinstance(child, kind)]


def split_embedding(embed: nn.Module, axis: TensorAxis) -> None:
    """Let each rank look up the tokens whose rows it holds, and add the results up."""
    for module in modules_of_type(embed, nn.Embedding):
        first = axis.rank * -(-module.weight.shape[0] // axis.size)
        rows = range(first, first + len(local(module.weight)))
        # The padding token's row has no gradient on the rank that holds it.
        module.padding_idx = rows.index(module.padding_idx) if module.padding_idx in rows else None
        look_up = PlainShares(module).within(module.forward)
        module.forward = partial(_look_up, look_up, rows, axis)


def _look_up(
    look_up: Callable[..., torch.Tensor], rows: range, axis: TensorAxis, tokens: torch.Tensor
) -> torch.Tensor:
    """Return [B, T, D]; `look_up` finds what a family makes of some rows of the weight."""
    is_here = (tokens >= rows.start) & (tokens < rows.stop)
    places = (tokens - rows.start).where(is_here, 0)
    # Of every rank, 0 where another one holds the row.
    return axis.sum_up(look_up(places) * is_here.unsqueeze(-1))


def split_head(head: nn.Module, vocab_size: int, axis: TensorAxis) -> None:
    """Let each rank compute the logits of its part of the vocabulary, and the loss over all of it.

    Logits alone are gathered.
    """
    most = -(-vocab_size // axis.size)
    vocabulary = Vocabulary(axis.rank * most, most, axis.sum, axis.largest)
    for module in modules_of_type(head, nn.Linear):
        with_shares = PlainShares(module).within(module.forward)
        module.forward = partial(_logits_or_loss, with_shares, vocabulary, vocab_size, axis)


def _logits_or_loss(
    inner: Callable[..., torch.Tensor],
    vocabulary: Vocabulary,
    vocab_size: int,
    axis: TensorAxis,
    hidden: torch.Tensor,
    labels: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    is_summed: bool = True,
) -> torch.Tensor:
    if not axis.shares_tokens:  # Otherwise the final norm has done it.
        hidden = axis.enter(hidden)
    if labels is not None:
        return inner(hidden, labels, vocabulary, rows, is_summed)
    logits = inner(hidden)  # [B, T, V/n]
    shape = [*logits.shape[:-1], vocab_size]
    sharded = placed(logits, axis.mesh, [Shard(len(shape) - 1)], shape)
    # All [B, T, V/n] go to all ranks: (n-1) times their bytes reach each. A sample needs few rows,
    # `training.loss: plain` all. A copy, since fsdp2 warns of a head that returns a view.
    return sharded.full_tensor().clone()


def _share_dropout(block: nn.Module, linear: str, rows: Rows, axis: TensorAxis) -> None:
    """Let PEFT's dropout on a linear's sharded features take this rank's part of the mask."""
    adapter = block.get_submodule(linear.removesuffix(".base_layer"))
    features = rows.take(torch.arange(rows.size, dtype=torch.int32), 0, axis.rank)
    for parent in list(adapter.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SlotDropout):
                setattr(parent, name, child.for_share(features.to(axis.mesh.device_type)))
