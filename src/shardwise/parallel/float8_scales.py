"""Scales of products in 8 bits that are those of complete operands, whatever share a rank holds.

A scale is made of the largest value of an operand, or of each of its rows. Where ranks hold shares
of what it is over, the largest value is reduced over them: features over `tp`, tokens over `cp`.
Each reduction sends one number, or with `rowwise` one a row, of 4 bytes at most; weights are
scaled anew in each forward and backward. Ranks that read other rows have micro-batches of their
own, with scales of their own, as one process has for each of its micro-batches.

Under tensor parallelism, a rank may have a partial sum of the gradient of what a linear gives: of
rows that several ranks hold, and of linears that every rank holds within a sharded block. Rounding
partial sums is not rounding their sum, so they are added up first. One rank then multiplies the
sum, and the others zeros, since their results are added up later.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.kernels.float8 import Float8
from shardwise.models.causal_lm import CausalLM
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import DimCut, Rows, Segment
from shardwise.models.tensor_plan import parameter_cuts, split_blocks


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let the products of every part, whose parameters are complete and on `meta`, scale so."""
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        if cfg.parallel.cp > 1:
            for float8 in part.float8.values():
                float8.largest["rows"] = partial(_largest, mesh.group("cp"))
        if cfg.parallel.tp > 1:
            _over_features(part, mesh.group("tp"))
    return pm


def _over_features(part: CausalLM, group: dist.ProcessGroup) -> None:
    for layer in part.spec.layers:
        for path, split in split_blocks(part.hf, layer, group.size()).items():
            if split is None:  # Every rank computes the same.
                continue
            block = part.hf.get_submodule(f"{layer.name}.{path}")
            cuts = parameter_cuts(block, split)
            for name, module in block.named_modules():
                if module in part.float8:
                    cut = cuts.get(f"{name}.weight")
                    _over_shares(part.float8[module], module, cut, group)


def _over_shares(
    float8: Float8, linear: nn.Module, cut: DimCut | None, group: dist.ProcessGroup
) -> None:
    """Let a linear, which will be cut so, reduce its largest values and its gradients."""
    goes_in = 0 if isinstance(linear, Conv1D) else 1
    if cut is None:
        num_out = linear.get_parameter("weight").shape[1 - goes_in]
        rows = Rows(group.size(), (Segment(num_out, shares=1),))
        float8.whole = partial(_sum_on_one_rank, rows, group)
    elif cut.dim == goes_in:
        float8.largest["in"] = partial(_largest, group)
    else:
        float8.largest["out"] = partial(_largest, group)
        if cut.rows.shared:
            float8.whole = partial(_sum_on_one_rank, cut.rows, group)


def _largest(group: dist.ProcessGroup, amax: torch.Tensor) -> torch.Tensor:
    """Return the element-wise maximum over a group: 2 (n-1)/n of its bytes leave each rank."""
    maximum = amax.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return maximum


def _sum_on_one_rank(rows: Rows, group: dist.ProcessGroup, dy: torch.Tensor) -> torch.Tensor:
    """Return dy [rows, out], with the sum of features that ranks share on the first of them."""
    rank = dist.get_rank(group)
    complete = dy.clone()
    for segment, start, length, place in rows.shared_segments(rank):
        summed = torch.zeros(len(dy), segment.size, dtype=torch.float32, device=dy.device)
        summed.narrow(1, place, length).copy_(dy.narrow(1, start, length))
        # All shared features of all rows, in float32, go from every rank to all.
        dist.all_reduce(summed, group=group)
        is_first = rank % (rows.num_ranks // segment.shares) == 0
        kept = summed.narrow(1, place, length) * is_first
        complete.narrow(1, start, length).copy_(kept)
    return complete
