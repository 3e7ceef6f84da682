"""Fully sharded data parallel on DTensor: each rank holds 1/n of weights, gradients and states.

There is one unit per decoder layer, one for the embedding, and one for the final norm and the head.
A unit's weights are gathered before its forward and again before its backward (2 (n-1)/n of all
weight bytes reach each rank). Its *trained* gradients are reduce-scattered ((n-1)/n of their bytes
leave each rank): after each backward or, where they are few, as of adapters, after a step's last
one. Frozen weights have no gradient, so none is kept or sent. HSDP has shards along
one axis and replicas along another; the sharded gradients are all-reduced once over the replicas.
Sources: Zhao et al., "PyTorch FSDP", arXiv 2304.11277; Rajbhandari et al., "ZeRO", arXiv 1910.02054
(stage 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import copied_names, hidden_dtype
from shardwise.models.part import ModelPart
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import are_gradients_few, axes_of, free_dim, materialise, odd_dtype
from shardwise.parallel.reduce import sum_over_copies


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Shard the model, or this rank's stages, while their parameters are on `meta`.

    Weights are loaded into the shards later. In a pipeline torch's stage decides when gradients are
    reduced: complete ones add up over a step's micro-batches and are reduce-scattered after the
    last.
    """
    in_each: list[bool] = []
    for part in pm.parts:
        assert isinstance(part, ModelPart)
        in_each.append(not are_gradients_few(part.hf, part.spec))
        _shard(part, mesh, cfg)

    def set_sync(sync: bool) -> None:
        # Every micro-batch is reduce-scattered, so that no rank ever keeps complete gradients,
        # unless they are few. Over the replicas gradients are added up once a step.
        for part, is_reduced in zip(pm.parts, in_each):
            assert isinstance(part, FSDPModule)
            part.set_requires_gradient_sync(is_reduced or sync)
            part.set_requires_all_reduce(sync)

    def reduce() -> None:
        # Looked up at each call: loading replaces the parameters on meta by others.
        sum_over_copies(trained_replicated(pm, mesh), mesh)

    pm = replace(pm, set_sync=set_sync)
    if not trained_replicated(pm, mesh):
        return pm
    return replace(pm, reduce_grads=(*pm.reduce_grads, reduce))


def _shard(part: ModelPart, mesh: Mesh, cfg: RunConfig) -> None:
    is_cast = cfg.training.casts_weights
    wide: set[nn.Parameter] = set()
    if is_cast:
        assert isinstance(part, CausalLM)
        copied = copied_names(cfg, part.hf)
        wide = {p for name, p in part.hf.named_parameters() if name not in copied}
    options: dict[str, Any] = {
        "mesh": mesh.along(*_axes((), mesh)),
        # Shards are cast before they are gathered, or autocast chooses the dtype of the
        # computation, as under every strategy. Sums are float32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=hidden_dtype(cfg) if is_cast else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "shard_placement_fn": _placement(mesh),
        "ignored_params": {*left_replicated(part, mesh), *wide},
    }
    if cfg.parallel.offload == "all":
        # Sharded weights and gradients are on the CPU. A unit's are copied to the device, gathered
        # and freed there.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    reshard = cfg.parallel.reshard_after_forward
    for unit in units(part):
        # The last unit's backward follows its forward at once: freeing its weights would save
        # nothing.
        is_last = not isinstance(unit, nn.Module)
        fully_shard(unit, reshard_after_forward=reshard and not is_last, **options)
    fully_shard(part, reshard_after_forward=reshard and _ends_are_units(part.spec), **options)
    sharded = [module for module in part.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Gradients are sums, not means; gloo has no other reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    if cfg.parallel.offload == "all":
        # What is not sharded is materialised on the device later, as usual.
        materialise(part, torch.device("cpu"), only=DTensor)

    def free_after_evaluation(*_: object) -> None:
        # No backward comes to free what `reshard_after_forward=False` has kept.
        if not torch.is_grad_enabled():
            for module in sharded:
                module.reshard()

    part.register_forward_hook(free_after_evaluation)


def units(part: ModelPart) -> list[nn.Module | list[nn.Module]]:
    """Return what is gathered and freed together, in forward order; the root has what is left.

    A tied embedding is used at both ends of the model, so it and the head stay with the root, which
    is gathered for the complete step; so does what a module of the caller has beside its layers.
    """
    spec, hf = part.spec, part.hf
    layers = [hf.get_submodule(layer.name) for layer in spec.layers]
    if not _ends_are_units(spec):
        return [*layers]
    first = [hf.get_submodule(spec.embed)] if spec.first else []
    last = [[hf.get_submodule(spec.norm), hf.get_submodule(spec.head)]] if spec.last else []
    return [*first, *layers, *last]


def _ends_are_units(spec: ModelSpec) -> bool:
    """Return whether the ends of the model are units of their own."""
    return spec.has_ends and not spec.tied


def _axes(weight_axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which a weight has replicas, if any, and shards."""
    replicas, shards = mesh.copy_axes(weight_axes)
    return (replicas, shards) if mesh.size(replicas) > 1 else (shards,)


def _placement(mesh: Mesh) -> Callable[[nn.Parameter], Any]:
    """Return what fully_shard asks for the placement of a parameter.

    Experts are sharded over the ranks that have the same ones. torch gathers and reduces them in a
    group of their own, in the same unit.
    """
    over_experts: Any = None
    if mesh.ep > 1 and mesh.size("dp_expert") > 1:
        # Here, as older versions of torch do not have them; a rule refuses ep there.
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

        axes = _axes(("ep",), mesh)
        mesh_of_experts, shards = mesh.along(*axes), len(axes) - 1
        over_experts = (
            HSDPMeshInfo(mesh_of_experts, shard_mesh_dim=shards, replicate_mesh_dim=0)
            if shards
            else FSDPMeshInfo(mesh_of_experts, shard_mesh_dim=shards)
        )

    def of(parameter: nn.Parameter) -> Any:
        axis = mesh.data_axis(axes_of(parameter))
        dim = free_dim(parameter, mesh.size(axis))
        assert dim is not None, "fully_shard ignores it"
        if axis != "dp_expert":
            return Shard(dim)
        assert over_experts is not None, "fully_shard ignores it"
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

        return ShardPlacementResult(Shard(dim), over_experts)

    return of


def trained_replicated(pm: ParallelModel, mesh: Mesh) -> list[nn.Parameter]:
    """Return the trained parameters of a sharded model that are not sharded."""
    trained = pm.trained().values()
    return [p for p in trained if mesh.data_axis(axes_of(p)) not in axes_of(p)]


def left_replicated(part: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """Return the parameters that are not sharded: few and small ones.

    They are trained ones of an odd dtype, as fully_shard reduces one dtype per unit, and those that
    tensor parallelism has sharded and that have no other dim, such as biases and numbers per head.
    Sharded along the same dim once more, their rows would lie in another order. So are experts of
    which each data rank has others.
    """
    odd = odd_dtype([p for p in part.parameters() if p.requires_grad])

    def is_whole(parameter: nn.Parameter) -> bool:
        num_shards = mesh.size(axis := mesh.data_axis(axes_of(parameter)))
        has_no_copy = axis == "dp_expert" and num_shards == 1
        return has_no_copy or free_dim(parameter, num_shards) is None

    return list(dict.fromkeys([*odd, *filter(is_whole, part.parameters())]))
