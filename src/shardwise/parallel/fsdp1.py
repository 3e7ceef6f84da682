"""PyTorch's first fully sharded data parallel: flat parameters, each sharded over all ranks.

A flat parameter holds the weights of a unit end to end. There is one unit per decoder layer and one
for the embedding; the root has norm and head (and a tied embedding). A flat parameter is gathered
before the unit's forward and again before its backward ((n-1)/n of its bytes reach each rank each
time), and its gradient is reduce-scattered in every micro-batch ((n-1)/n of its float32 bytes leave
each rank). A flat parameter has one `requires_grad`: if a single weight in it is trained, its
gradient takes memory, and is sent, for all of it. Therefore `parallel.fsdp1_wrap: separate` keeps
what a unit trains in a flat parameter of its own; `naive` does not.
Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _reshard

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.models.spec import ModelSpec
from shardwise.parallel.flat import portable
from shardwise.parallel.place import materialise, odd_dtype
from shardwise.parallel.reduce import sum_gradients


class WrappedUnit(nn.Module):
    """The part that a wrapper holds and calls, in place of the module whose calls go through the
    wrapper.

    So the model keeps the bare module, and with it transformers' names.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.inner = nn.ModuleList()  # The root's wrapper looks for the others here.
        self.compute = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module did before its calls went through the wrapper."""
        return self.compute(*args, **kwargs)


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Materialise and shard one unit of the model on `meta` after the other.

    Weights are loaded into the shards later.
    """
    (part,) = pm.parts
    ignored: list[nn.Parameter] = []
    wrappers: list[FullyShardedDataParallel] = []
    separate = cfg.parallel.fsdp1_wrap == "separate"
    for module in _units(part, spec):
        materialise(module, mesh.device)
        for together in _flat_parameters(module, separate, ignored):
            # A flat parameter has one dtype, so these few numbers per head stay on every rank.
            ignored += odd_dtype(together)
            taken = set(together)
            others = [p for p in module.parameters() if p not in taken]
            wrappers.append(_wrap(WrappedUnit(module), mesh, [*ignored, *others]))
            module.forward = wrappers[-1].__call__
    *inner, root = wrappers
    assert isinstance(root.module, WrappedUnit)
    # Not earlier: a wrapper leaves out all parameters that those in it have left out when it is
    # made, and the root's inner wrapper, of what is trained, has left out what the root shards.
    root.module.inner.extend(inner)
    flat = [wrapper._handle.flat_param for wrapper in wrappers if wrapper._handle is not None]

    def reshard_after_evaluation(*_: object) -> None:
        # The root keeps its weights for a backward, which does not come here.
        if not torch.is_grad_enabled() and root._handle is not None:
            _reshard(root, root._handle, True)

    def reduce() -> None:
        sum_gradients([p for p in ignored if p.requires_grad], mesh, mesh.gradient_axes)
        for parameter in part.parameters():
            # The optimizer is to have a state of every trained parameter on every rank.
            if parameter.requires_grad and parameter.numel() == 0:
                parameter.grad = torch.zeros_like(parameter)

    part.register_forward_hook(reshard_after_evaluation)
    to_portable, from_portable = portable(pm, part, flat, mesh)
    return replace(
        pm,
        reduce_grads=(*pm.reduce_grads, reduce),
        to_portable=to_portable,
        from_portable=from_portable,
        flat=tuple(flat),
    )


def _units(part: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """Return the modules that are gathered and freed as one, the complete model last."""
    layers = [layer.name for layer in spec.layers]
    names = layers if spec.tied or not spec.has_ends else [spec.embed, *layers]
    return [*(part.get_submodule(f"hf.{name}") for name in names), part]


def _flat_parameters(
    module: nn.Module, separate: bool, ignored: list[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """Return the parameters that no unit has taken yet, in a list for each flat parameter.

    Two lists for one module are two wrappers around its calls, that of frozen ones outside.
    """
    taken = set(ignored)
    rest = (p for p in module.parameters() if not getattr(p, "_fsdp_flattened", False))
    new = [p for p in rest if p not in taken]
    if not separate:
        return [new]
    trained, frozen = ([p for p in new if p.requires_grad == kind] for kind in (True, False))
    return [parameters for parameters in (trained, frozen) if parameters]


def _wrap(unit: WrappedUnit, mesh: Mesh, others: list[nn.Parameter]) -> FullyShardedDataParallel:
    """Wrap a unit in FSDP over the ranks of `Mesh.shard_axis`, without the parameters `others`."""
    wrapper = FullyShardedDataParallel(
        unit,
        process_group=mesh.group(mesh.shard_axis),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32, cast_root_forward_inputs=False),
        device_id=mesh.device,
        ignored_states=others,
        use_orig_params=True,
    )
    # FSDP divides gradients by the number of ranks; here they are sums.
    wrapper._gradient_predivide_factor = wrapper._gradient_postdivide_factor = 1
    return wrapper
