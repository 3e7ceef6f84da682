"""Activation checkpointing: keep less than a backward needs and compute the rest again.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import Checkpointing, RunConfig, Way, way_of
from shardwise.models.names import adapter_layers, is_wrapper
from shardwise.models.part import ModelPart
from shardwise.models.slot_dropout import DropoutState
from shardwise.models.spec import ModelSpec

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten.convolution.default,
    _aten.linalg_solve_triangular.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""The operators whose outputs `operators` keeps, except products over the rank of an adapter.

They are those that metrics/flops.py counts. The output of B (A x) takes as many bytes as that of W
x and only R products an element. If it were kept, adapters would cost more memory than without
checkpointing, which keeps neither. (A mixer's product over just R numbers is taken for one too.)
"""

_LEFT_OPERAND = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
}


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Recompute decoder layers in their backward, as `training.checkpointing` says."""
    for part in pm.parts:
        assert isinstance(part, ModelPart)
        recompute(part.hf, part.spec, cfg.training.checkpointing, part.dropout)
    return pm


def recompute(hf: nn.Module, spec: ModelSpec, what: Checkpointing, dropout: DropoutState) -> None:
    """Replace the forwards of the layers that are recomputed.

    Of a layer, `full` recomputes everything, from its input, and `operators` everything except the
    outputs of PRODUCTS.

    A layer's forward is replaced rather than the layer wrapped. So names stay, and fsdp2's hooks
    lie outside: a layer's weights are gathered once for its recomputation and backward together.
    """
    policy = partial(_keep_products, _ranks(hf))
    contexts: dict[Way, Callable[[], Any]] = {
        "full": noop_context_fn,
        "operators": partial(create_selective_checkpoint_contexts, policy),
    }
    for layer in spec.layers:
        way = way_of(what, layer.number, layer.kind)
        if way != "none":
            module = hf.get_submodule(layer.name)
            module.forward = _recomputed(module.forward, dropout, contexts[way])


def _ranks(hf: nn.Module) -> frozenset[tuple[int, int]]:
    """Return (matrices in a stack, rank) of the adapters in a model."""
    return frozenset(
        (adapter.num_experts if is_wrapper(adapter) else 1, rank)
        for adapter in adapter_layers(hf).values()
        for rank in adapter.r.values()
    )


def _keep_products(
    ranks: frozenset[tuple[int, int]], context: object, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    # shardwise's own kernels compute a linear and its adapter in one operator.
    keep = op in PRODUCTS or op.namespace == "shardwise"
    if op in _LEFT_OPERAND:
        left = args[_LEFT_OPERAND[op]]  # [rows, R] or [matrices, rows, R]
        num_matrices = left.shape[0] if left.ndim == 3 else 1
        keep = (num_matrices, left.shape[-1]) not in ranks
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(
    forward: Callable[..., torch.Tensor], dropout: DropoutState, contexts: Callable[[], Any]
) -> Callable[..., torch.Tensor]:
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        state = dropout.batch, dropout.rows, dropout.tokens

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            # In a pipeline another micro-batch's forward may come before this one's backward, so
            # that the state for this one's masks has to be set again.
            dropout.batch, dropout.rows, dropout.tokens = state
            return forward(*args, **kwargs)

        # A layer uses no global random state (see models/slot_dropout.py), so none is saved.
        return checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )

    return wrapped
