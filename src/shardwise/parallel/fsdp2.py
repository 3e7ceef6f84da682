"""Fully sharded data parallel on DTensor: each rank holds 1/n of every weight, gradient and optimizer state.

One unit per decoder layer, one for the embedding, one for the final norm and the head. A unit's weights are gathered
before its forward and again before its backward (2 (n-1)/n of all weight bytes reach each rank), and its *trainable*
gradients are reduce-scattered ((n-1)/n of their bytes); frozen weights have no gradient, so none is kept or sent.
HSDP: shards along `dp_shard`, replicas along `dp_replicate`, and one all-reduce of the sharded gradients over these.
Sources: Zhao et al., "PyTorch FSDP", arXiv 2304.11277; Rajbhandari et al., "ZeRO", arXiv 1910.02054 (stage 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import axes_of, free_dim, materialise
from shardwise.parallel.reduce import DATA_AXES, sum_gradients


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Shard the model, or this rank's stages, while their parameters are on `meta`; weights go into shards afterwards.

    In a pipeline torch's stage decides when gradients are reduced: whole ones add up over a step's micro-batches, and
    are reduce-scattered after the last.
    """
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        _shard(part, mesh, cfg)

    def set_sync(sync: bool) -> None:
        # Every micro-batch is reduce-scattered, so no rank ever keeps whole gradients; replicas are added up once.
        for part in pm.parts:
            assert isinstance(part, FSDPModule)
            part.set_requires_all_reduce(sync)

    def reduce() -> None:
        # Looked up at each call: loading replaces the parameters on meta by others.
        sum_gradients(trained_whole(pm), mesh, DATA_AXES)

    replicated = any(True for _ in trained_whole(pm))
    return replace(
        pm,
        set_sync=set_sync,
        reduce_grads=(*pm.reduce_grads, reduce) if replicated else pm.reduce_grads,
    )


def _shard(part: CausalLM, mesh: Mesh, cfg: RunConfig) -> None:
    axes = DATA_AXES if mesh.size("dp_replicate") > 1 else ("dp_shard",)
    options: dict[str, Any] = {
        "mesh": mesh.dense[axes],
        # Autocast chooses the dtype of the computation, here as under every strategy; reduce in float32 always.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        "shard_placement_fn": lambda parameter: Shard(free_dim(parameter, mesh.size("dp_shard"))),
        "ignored_params": set(left_whole(part, mesh)),
    }
    if cfg.parallel.offload == "all":
        # Sharded weights and gradients live on the CPU; a unit is copied to the device to be gathered, and freed there.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    for unit in units(part):
        # The last unit's backward follows its forward at once: to free its weights between the two gains nothing.
        last = not isinstance(unit, nn.Module)
        fully_shard(
            unit, reshard_after_forward=cfg.parallel.reshard_after_forward and not last, **options
        )
    fully_shard(
        part,
        reshard_after_forward=cfg.parallel.reshard_after_forward and not part.spec.tied,
        **options,
    )
    sharded = [module for module in part.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Sums, not means; gloo knows no other reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    if cfg.parallel.offload == "all":
        materialise(
            part, torch.device("cpu"), only=DTensor
        )  # what is not sharded goes to the device as usual

    def free_after_evaluation(*_: object) -> None:
        if (
            not torch.is_grad_enabled()
        ):  # no backward comes to free what `reshard_after_forward=False` has kept
            for module in sharded:
                module.reshard()

    part.register_forward_hook(free_after_evaluation)


def units(part: CausalLM) -> list[nn.Module | list[nn.Module]]:
    """What is gathered and freed together, in forward order; the root takes what is left.

    A tied embedding is used at both ends of the model, so it and the head stay with the root, which is gathered for the
    whole step.
    """
    spec = part.spec
    layers = [part.hf.get_submodule(layer.name) for layer in spec.layers]
    if spec.tied:
        return [*layers]
    ends = [part.hf.get_submodule(spec.norm), part.hf.get_submodule(spec.head)] if spec.last else []
    return [
        *([part.hf.get_submodule(spec.embed)] if spec.first else []),
        *layers,
        *([ends] if ends else []),
    ]


def trained_whole(pm: ParallelModel) -> Iterator[nn.Parameter]:
    """The trained parameters that were left whole, of a model that is sharded."""
    for _, parameter in pm.named_parameters():
        if parameter.requires_grad and "dp_shard" not in axes_of(parameter):
            yield parameter


def left_whole(part: nn.Module, mesh: Mesh) -> list[nn.Parameter]:
    """Parameters that no rank has a shard of: few and small ones, whose gradients are added up by `reduce_grads`.

    Those of an odd dtype, and those that tensor parallelism cuts and that have no other dim to shard, such as biases
    and numbers per head. Sharded along the same dim once more, their rows would lie in another order.
    """
    odd = odd_dtype_parameters(part)
    cut = [p for p in part.parameters() if free_dim(p, mesh.size("dp_shard")) is None]
    return [*odd, *(p for p in cut if not any(p is other for other in odd))]


def odd_dtype_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of another dtype than most trainable elements have, such as float32 `A_log` in bfloat16.

    fully_shard reduces one dtype per unit. These are a few numbers per head (or modules_to_save). A list: sets iterate
    in another order on every rank, and collectives must not.
    """
    trainable = [p for p in part.parameters() if p.requires_grad]
    size = Counter[torch.dtype]()
    for parameter in trainable:
        size[parameter.dtype] += parameter.numel()
    return [p for p in trainable if p.dtype != size.most_common(1)[0][0]]
