"""Expert parallelism: the routed experts of each layer are spread over ranks.

For the rest of the model these ranks are data-parallel or context-parallel ones: each has tokens of
its own. Memory per rank: 1/n of the experts' weights, gradients and optimizer states, which what is
left of the data-parallel axis (`dp_expert`) treats as it does other weights. Communication per
micro-batch and layer: tokens go to the ranks of their experts and back, k [N, D] each way in the
forward and again in the backward, of which (n-1)/n leave a rank where routing is even.

Gradients are sums over tokens, so no factor depends on n: a rank's backward meets the tokens of all
n ranks, and `dp_expert` adds up the rest.
Sources: Lepikhin et al., "GShard", arXiv 2006.16668; dropless: Gale et al., "MegaBlocks", arXiv
2211.15841.
"""

from functools import partial

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.expert_plan import cuts_of, experts_of
from shardwise.models.names import hf_name
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import DimCut
from shardwise.parallel.expert_axis import ExpertAxis
from shardwise.parallel.place import axes_of, local, placed
from shardwise.parallel.rows import in_order
from shardwise.parallel.tensor_modules import PlainShares


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Leave this rank its experts, while parameters are on `meta`, and send tokens to them."""
    axis = ExpertAxis(mesh.group("ep"))
    reordered: dict[str, DimCut] = {}
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        cuts = cuts_of(part.hf, part.spec, mesh.ep)
        for path, experts in experts_of(part.hf, part.spec):
            for name, parameter in list(experts.named_parameters()):
                if f"{path}.{name}" not in cuts:
                    continue  # factors that all experts share, whole on every rank as in ddp
                owner, _, attribute = f"{path}.{name}".rpartition(".")
                share = _share(parameter, cuts[f"{path}.{name}"], mesh)
                part.hf.get_submodule(owner)._parameters[attribute] = share
            routed = part.experts[hf_name(path)]
            routed.compute = partial(axis.compute, PlainShares(experts).within(routed.compute))
        reordered |= {name: cut for name, cut in cuts.items() if not cut.rows.in_order}
    return in_order(pm, reordered, "ep")


def _share(full: nn.Parameter, cut: DimCut, mesh: Mesh) -> nn.Parameter:
    """Return this rank's share of a weight, which `tp` may have sharded along another dim."""
    assert full.is_meta
    placements = full.placements if isinstance(full, DTensor) else ()
    shape = [*local(full).shape]
    shape[cut.dim] = cut.rows.local_size
    empty = local(full.detach()).new_empty(shape)
    axes = mesh.along("ep", *axes_of(full))
    share = placed(empty, axes, [Shard(cut.dim), *placements], full.shape)
    return nn.Parameter(share, full.requires_grad)
