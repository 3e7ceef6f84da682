"""PyTorch's first fully sharded data parallel: the weights of a unit lie end to end in one flat parameter, cut in n.

One unit per decoder layer, one for the embedding; the root takes norm and head (and a tied embedding). A unit's flat
parameter is gathered before its forward and again before its backward ((n-1)/n of its bytes reach each rank each time),
and its gradient is reduce-scattered in every micro-batch ((n-1)/n of its float32 bytes leave each rank).
A flat parameter has one `requires_grad`: with a single trained weight in it, its gradient has memory, and is sent, for
all of it. `parallel.fsdp1_wrap: separate` therefore keeps what a unit trains in a flat parameter of its own; `naive`
does not.
Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _reshard

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.spec import ModelSpec
from shardwise.parallel.flat import portable
from shardwise.parallel.place import materialise
from shardwise.parallel.reduce import DATA_AXES, sum_gradients


class Unit(nn.Module):
    """Stands between a module and the wrapper that its calls go through.

    The wrapper must hold what it calls, but the model keeps the bare module, and with it transformers' names.
    """

    def __init__(self, module: nn.Module, inner: list[FullyShardedDataParallel]) -> None:
        super().__init__()
        self.module = module
        self.inner = nn.ModuleList(
            inner
        )  # where the wrapper of the whole model looks for the others
        self.compute = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computed before its calls went through the wrapper."""
        return self.compute(*args, **kwargs)


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Give memory to one unit of the model on `meta` after the other and shard it; weights go into the shards later."""
    (part,) = pm.parts
    ignored: list[nn.Parameter] = []
    wrappers: list[FullyShardedDataParallel] = []
    separate = cfg.parallel.fsdp1_wrap == "separate"
    for module in _units(part, spec):
        materialise(module, mesh.device)
        for together in _flat_parameters(module, separate, ignored):
            ignored += _odd_dtype(together)
            others = [p for p in module.parameters() if not any(p is own for own in together)]
            unit = Unit(module, list(wrappers) if module is part else [])
            wrappers.append(_wrap(unit, mesh, [*ignored, *others]))
            module.forward = _through(wrappers[-1])
    root = wrappers[-1]
    flat = [wrapper._handle.flat_param for wrapper in wrappers if wrapper._handle is not None]

    def reshard_after_evaluation(*_: object) -> None:
        # The root keeps its weights for the backward, and here none comes.
        if not torch.is_grad_enabled() and root._handle is not None:
            _reshard(root, root._handle, True)

    def reduce() -> None:
        sum_gradients([p for p in ignored if p.requires_grad], mesh, DATA_AXES)
        for parameter in part.parameters():
            # So that the optimizer has a state of every trained parameter on every rank.
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
    """What is gathered and freed together, the whole model last."""
    names = (
        [layer.name for layer in spec.layers]
        if spec.tied
        else [spec.embed, *(layer.name for layer in spec.layers)]
    )
    return [*(part.get_submodule(f"hf.{name}") for name in names), part]


def _flat_parameters(
    module: nn.Module, separate: bool, ignored: list[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """The parameters that no unit has taken yet, by the flat parameter that each is to lie in.

    Two for one module are two wrappers around its calls, the frozen one's outside.
    """
    new = [
        p
        for p in module.parameters()
        if not getattr(p, "_fsdp_flattened", False) and not any(p is other for other in ignored)
    ]
    if not separate:
        return [new]
    return [
        part
        for part in ([p for p in new if p.requires_grad], [p for p in new if not p.requires_grad])
        if part
    ]


def _odd_dtype(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters of another dtype than most of their elements have, such as float32 `A_log`.

    A flat parameter has one dtype. These are a few numbers per head, so they stay whole on every rank.
    """
    size = Counter[torch.dtype]()
    for parameter in parameters:
        size[parameter.dtype] += parameter.numel()
    return [p for p in parameters if p.dtype != size.most_common(1)[0][0]]


def _wrap(unit: Unit, mesh: Mesh, others: list[nn.Parameter]) -> FullyShardedDataParallel:
    wrapper = FullyShardedDataParallel(
        unit,
        process_group=mesh.dense.get_group("dp_shard"),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32, cast_root_forward_inputs=False),
        device_id=mesh.device,
        ignored_states=others,
        use_orig_params=True,
    )
    # Sums, not means.
    wrapper._gradient_predivide_factor = wrapper._gradient_postdivide_factor = 1
    return wrapper


def _through(wrapper: FullyShardedDataParallel) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(*args, **kwargs)
