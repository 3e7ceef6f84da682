"""Tensor parallelism: weights of layers, of the embedding and of the head are sharded over ranks.

Memory per rank: 1/n of the sharded weights, of their gradients and optimizer states, and of the
activations within blocks; with sequence parallelism also of those between blocks. Communication per
micro-batch and block: one all-reduce of [B, T, D] in the forward and one in the backward, or, with
sequence parallelism, an all-gather and a reduce-scatter in place of each, which move as many bytes.
The embedding adds up one [B, T, D], the head the gradient of its hidden states and three numbers a
token.

The kind of a block (models/kinds) decides how it is sharded. Weights are DTensors along `tp`, so
that what shards, counts or saves parameters sees complete ones. While a block runs, the model's own
code sees plain shares under their names. An adapter is sharded as its base is.
Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053; sequence parallelism: Korthikanti et al.,
arXiv 2205.05198.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from shardwise.base.interfaces import Mesh, ParallelModel, ParameterFacts
from shardwise.config import RunConfig
from shardwise.models.part import ModelPart
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import BlockSplit, DimCut
from shardwise.models.tensor_plan import parameter_cuts, split_blocks
from shardwise.parallel.place import local, placed
from shardwise.parallel.reduce import sum_gradients
from shardwise.parallel.rows import in_order
from shardwise.parallel.tensor_axis import TensorAxis
from shardwise.parallel.tensor_modules import (
    around,
    as_it_is,
    compute_shares,
    split_embedding,
    split_head,
)


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Shard the model, or this rank's stages, while their parameters are on `meta`."""
    axis = TensorAxis.of(mesh, cfg.parallel.sequence_parallel)
    result = SplitResult()
    for part in pm.parts:
        assert isinstance(part, ModelPart)
        _Splitter(part, axis, result).split()
    reordered = result.reordered
    assert {*result.partial_sums, *reordered} <= {name for name, _ in pm.named_parameters()}

    def reduce() -> None:
        trained = pm.trained()
        partial_sums = [p for name, p in trained.items() if name in result.partial_sums]
        sum_gradients(partial_sums, mesh, ("tp",))
        for name, cut in reordered.items():
            if cut.rows.shared and name in trained:
                _add_up_shared(trained[name], cut, axis, mesh.device)

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        for name, parameter in named:
            cut = reordered.get(name)
            if cut is not None and cut.rows.shared:
                counted = tuple((cut.dim, *rows) for rows in cut.rows.counted(axis.rank))
                pm.parameter_facts[parameter] = ParameterFacts(counted=counted)
        return pm.make_optimizer(named)

    split = replace(pm, reduce_grads=(*pm.reduce_grads, reduce), make_optimizer=make_optimizer)
    return in_order(split, reordered, "tp")


@dataclass
class SplitResult:
    """The parameters after the split."""

    reordered: dict[str, DimCut] = field(default_factory=dict)
    """Sharded parameters, by name, whose shares joined in rank order are not the complete one."""
    partial_sums: set[str] = field(default_factory=set)
    """Names of replicated parameters of whose gradient each rank has a partial sum."""
    shares: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """This rank's shares, by what they are shares of: a tied parameter stays one, in two stages."""


@dataclass
class _Splitter:
    """Splits one part."""

    part: ModelPart
    axis: TensorAxis
    result: SplitResult
    blocks: list[str] = field(default_factory=list)

    def split(self) -> None:
        """Split blocks, embedding and head, and share tokens between blocks."""
        hf, spec = self.part.hf, self.part.spec
        if spec.has_ends:
            self._split_ends()
        for layer in spec.layers:
            for path, split in split_blocks(hf, layer, self.axis.size).items():
                self._split_block(f"{layer.name}.{path}", split)
        if self.axis.sequence_parallel:
            self._share_tokens()

    def _split_ends(self) -> None:
        hf, spec = self.part.hf, self.part.spec
        if spec.first or (spec.last and spec.tied):
            self._split_vocabulary(spec.embed)
        if spec.first:
            split_embedding(hf.get_submodule(spec.embed), self.axis)
        if spec.last:
            self._split_vocabulary(spec.head)
            split_head(hf.get_submodule(spec.head), spec.vocab_size, self.axis)

    def _split_vocabulary(self, path: str) -> None:
        """Shard the rows of the embedding or the head, of which the last rank may have fewer."""
        for name, parameter in list(self.part.hf.get_submodule(path).named_parameters()):
            num_rows = len(parameter)
            self._shard(f"{path}.{name}", parameter, 0, -(-num_rows // self.axis.size), num_rows)

    def _split_block(self, path: str, split: BlockSplit | None) -> None:
        self.blocks.append(f"{path}.")
        block = self.part.hf.get_submodule(path)
        if split is None:  # Every rank computes the same.
            block.forward = around(block.forward, self.axis.gather_tokens, self.axis.share_tokens)
            return
        cuts = parameter_cuts(block, split)
        for name, parameter in list(block.named_parameters()):
            full_name = f"{path}.{name}"
            if name not in cuts:
                self.result.partial_sums.add(full_name)
                continue
            size = cuts[name].rows.local_size
            self._shard(full_name, parameter, cuts[name].dim, size, size * self.axis.size)
            if not cuts[name].rows.in_order:
                self.result.reordered[full_name] = cuts[name]
        compute_shares(block, split, self.axis)

    def _shard(self, name: str, full: nn.Parameter, dim: int, size: int, total: int) -> None:
        """Replace a parameter by this rank's share: `size` rows of `total`, or the last rows."""
        assert full.is_meta, name
        if full not in self.result.shares:
            shape, local_shape = [*full.shape], [*full.shape]
            shape[dim], local_shape[dim] = total, min(size, total - self.axis.rank * size)
            share = placed(full.new_empty(local_shape), self.axis.mesh, [Shard(dim)], shape)
            self.result.shares[full] = nn.Parameter(share, full.requires_grad)
        owner, _, attribute = name.rpartition(".")
        self.part.hf.get_submodule(owner)._parameters[attribute] = self.result.shares[full]

    def _share_tokens(self) -> None:
        """Share tokens over ranks from the first layer of this part to its last, or the final norm.

        The base model's own code, around its layers, makes masks and positions for all tokens.
        """
        hf, spec, axis = self.part.hf, self.part.spec, self.axis
        paths = [layer.name for layer in spec.layers] + ([spec.norm] if spec.last else [])
        if not paths:
            return
        for path in paths:
            for name, _ in hf.get_submodule(path).named_parameters():
                if not f"{path}.{name}".startswith(tuple(self.blocks)):
                    # A rank's tokens give a partial sum of its gradient.
                    self.result.partial_sums.add(f"{path}.{name}")
        first = hf.get_submodule(paths[0])
        first.forward = around(first.forward, axis.share_tokens, as_it_is)
        last = hf.get_submodule(paths[-1])
        # The hidden states go into the head, or to the next stage, whose ranks share them again.
        leave = axis.enter if spec.last else axis.gather_tokens
        last.forward = around(last.forward, as_it_is, leave)


def _add_up_shared(
    parameter: nn.Parameter, cut: DimCut, axis: TensorAxis, device: torch.device
) -> None:
    """Add up the gradients of rows that several ranks hold, on the device of the group."""
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    for segment, start, length, place in cut.rows.shared_segments(axis.rank):
        rows = gradient.narrow(cut.dim, start, length)
        shape = [*rows.shape]
        shape[cut.dim] = segment.size
        summed = torch.zeros(shape, dtype=torch.float32, device=device)
        summed.narrow(cut.dim, place, length).copy_(rows)
        # The segment's rows, in float32, go from every rank to all: 2 (n-1)/n of their bytes each.
        dist.all_reduce(summed, group=axis.group)
        rows.copy_(summed.narrow(cut.dim, place, length))
