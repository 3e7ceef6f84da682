"""Tensor parallelism: the weights within each layer, of the embedding and of the head are dealt out over ranks.

Memory per rank: 1/n of the weights that are cut, of their gradients and optimizer states, and of the activations within
blocks; with sequence parallelism also of those between blocks. Communication per micro-batch and block: one all-reduce
of [B, T, D] in the forward and one in the backward, or, with sequence parallelism, an all-gather and a reduce-scatter
in the place of each, which move as many bytes. The embedding adds up one [B, T, D], the head its hidden states'
gradient and three numbers a token.

How a block is cut, its kind says (models/kinds). Weights are DTensors along `tp`, so that whatever
shards, counts or saves parameters sees whole ones; while a block runs, the model's own code finds plain shares under
their names. An adapter is cut as its base is.
Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel, ParameterFacts
from shardwise.models.causal_lm import CausalLM
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import BlockSplit, Cut
from shardwise.models.tensor_plan import parameter_cuts, split_blocks
from shardwise.parallel.place import axes_of, local
from shardwise.parallel.reduce import sum_gradients
from shardwise.parallel.tensor_axis import TensorAxis
from shardwise.parallel.tensor_modules import (
    around,
    as_it_is,
    compute_shares,
    split_embedding,
    split_head,
)


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Cut the model, or this rank's stages, while their parameters are on `meta`."""
    axis = TensorAxis.of(mesh, cfg.parallel.sequence_parallel)
    found = Found()
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        _Splitter(part, axis, found).split()
    assert {*found.summands, *found.reordered} <= {name for name, _ in pm.named_parameters()}

    def reduce() -> None:
        trained = {name: p for name, p in pm.named_parameters() if p.requires_grad}
        sum_gradients([p for name, p in trained.items() if name in found.summands], mesh, ("tp",))
        for name, cut in found.reordered.items():
            if cut.rows.shared and name in trained:
                _add_up_shared(trained[name], cut, axis)

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        for name, parameter in named:
            if name in found.reordered and (cut := found.reordered[name]).rows.shared:
                counted = tuple((cut.dim, *rows) for rows in cut.rows.counted(axis.rank))
                pm.parameter_facts[parameter] = ParameterFacts(counted=counted)
        return pm.make_optimizer(named)

    def to_portable(name: str, held: torch.Tensor) -> torch.Tensor:
        held = pm.to_portable(name, held)
        if name not in found.reordered:
            return held
        cut = found.reordered[name]
        return _with_rows(held, cut.rows.restore(_joined(held), cut.dim))

    def from_portable(name: str, held: torch.Tensor, portable: torch.Tensor) -> None:
        if name in found.reordered:
            cut = found.reordered[name]
            if isinstance(portable, DTensor):
                portable = _with_rows(portable, cut.rows.arrange(_joined(portable), cut.dim))
            else:
                portable = cut.rows.arrange(portable, cut.dim)
        pm.from_portable(name, held, portable)

    return replace(
        pm,
        reduce_grads=(*pm.reduce_grads, reduce),
        make_optimizer=make_optimizer,
        to_portable=to_portable,
        from_portable=from_portable,
    )


@dataclass
class Found:
    """What became of the parameters, by name."""

    reordered: dict[str, Cut] = field(default_factory=dict)
    """Those that are cut, and of which the shares joined in rank order are not the whole."""
    summands: set[str] = field(default_factory=set)
    """Those that are whole, of whose gradient each rank has a summand."""
    shares: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """By what each is a share of: tied parameters stay one, also where they are in the first and the last stage."""


@dataclass
class _Splitter:
    """Cuts one part."""

    part: CausalLM
    axis: TensorAxis
    found: Found
    blocks: list[str] = field(default_factory=list)

    def split(self) -> None:
        """Blocks, the embedding, the head, and where tokens are shared out."""
        hf, spec = self.part.hf, self.part.spec
        for path, used in (
            (spec.embed, spec.first or (spec.last and spec.tied)),
            (spec.head, spec.last),
        ):
            for name, parameter in list(hf.get_submodule(path).named_parameters()) if used else ():
                self._hold(
                    f"{path}.{name}",
                    parameter,
                    0,
                    -(-len(parameter) // self.axis.size),
                    len(parameter),
                )
        if spec.first:
            split_embedding(hf.get_submodule(spec.embed), self.axis)
        if spec.last:
            split_head(hf.get_submodule(spec.head), spec.vocab_size, self.axis)
        for layer in spec.layers:
            for path, split in split_blocks(hf, layer, self.axis.size).items():
                self._block(f"{layer.name}.{path}", split)
        if self.axis.sequence_parallel:
            self._share_tokens()

    def _block(self, path: str, split: BlockSplit | None) -> None:
        self.blocks.append(f"{path}.")
        block = self.part.hf.get_submodule(path)
        if split is None:  # every rank computes the same
            block.forward = around(block.forward, self.axis.gather_tokens, self.axis.share_tokens)
            return
        cuts = parameter_cuts(block, split)
        for name, parameter in list(block.named_parameters()):
            full_name = f"{path}.{name}"
            if name not in cuts:
                self.found.summands.add(full_name)
                continue
            most = cuts[name].rows.local_size
            self._hold(full_name, parameter, cuts[name].dim, most, most * self.axis.size)
            if not cuts[name].rows.in_order:
                self.found.reordered[full_name] = cuts[name]
        compute_shares(block, split, self.axis, self.part)

    def _hold(self, name: str, whole: nn.Parameter, dim: int, most: int, total: int) -> None:
        """Replace a parameter by this rank's share: `most` rows of `total`, or what is left of them for the last."""
        assert whole.is_meta, name
        if whole not in self.found.shares:
            joined, share = ([*whole.shape] for _ in range(2))
            joined[dim], share[dim] = total, min(most, total - self.axis.rank * most)
            like = whole.new_empty(joined)
            own, shape, stride = whole.new_empty(share), like.shape, like.stride()
            held = DTensor.from_local(
                own, self.axis.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
            )
            self.found.shares[whole] = nn.Parameter(held, whole.requires_grad)
        owner, _, own = name.rpartition(".")
        self.part.hf.get_submodule(owner)._parameters[own] = self.found.shares[whole]

    def _share_tokens(self) -> None:
        """From the first layer of this part to its last, or to the final norm, a rank holds its share of the tokens.

        The base model's own code, around its layers, sees all tokens: it makes masks and positions for them.
        """
        hf, spec, axis = self.part.hf, self.part.spec, self.axis
        paths = [layer.name for layer in spec.layers] + ([spec.norm] if spec.last else [])
        if not paths:
            return
        for path in paths:
            for name, _ in hf.get_submodule(path).named_parameters():
                if not f"{path}.{name}".startswith(tuple(self.blocks)):
                    self.found.summands.add(f"{path}.{name}")  # a rank's tokens give a summand
        first = hf.get_submodule(paths[0])
        first.forward = around(first.forward, axis.share_tokens, as_it_is)
        last = hf.get_submodule(paths[-1])
        # Into the head, or to the next stage, whose ranks do the same with it.
        last.forward = around(
            last.forward, as_it_is, axis.enter if spec.last else axis.gather_tokens
        )


def _joined(held: torch.Tensor) -> torch.Tensor:
    """Of a DTensor, what its ranks along `tp` hold, in rank order, to each of them; along other axes this rank's."""
    held = held.detach()
    assert isinstance(held, DTensor)
    whole = [
        Replicate() if name == "tp" else p
        for name, p in zip(axes_of(held), held.placements, strict=True)
    ]
    return held.redistribute(placements=whole).to_local()


def _with_rows(like: torch.Tensor, joined: torch.Tensor) -> DTensor:
    """The reverse of `_joined`, placed as `like` is, of which the cut dim may have had another size."""
    assert isinstance(like, DTensor)
    whole = [
        Replicate() if name == "tp" else p
        for name, p in zip(axes_of(like), like.placements, strict=True)
    ]
    return DTensor.from_local(joined, like.device_mesh, whole, run_check=False).redistribute(
        placements=like.placements
    )


def _add_up_shared(parameter: nn.Parameter, cut: Cut, axis: TensorAxis) -> None:
    """Add up what the ranks that hold the same rows have of their gradient."""
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    for segment, start, length, place in cut.rows.shared_segments(axis.rank):
        own = gradient.narrow(cut.dim, start, length)
        shape = [*own.shape]
        shape[cut.dim] = segment.size
        whole = torch.zeros(shape, dtype=torch.float32, device=own.device)
        whole.narrow(cut.dim, place, length).copy_(own)
        # The segment's rows, in float32, from every rank to all.
        dist.all_reduce(whole, group=axis.group)
        own.copy_(whole.narrow(cut.dim, place, length))
