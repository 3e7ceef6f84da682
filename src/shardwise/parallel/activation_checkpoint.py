"""Activation checkpointing: keep less than a backward needs and compute the rest again (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.lora import adapter_layers
from shardwise.models.patches.dropout import DropoutState
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
"""Whose outputs `operators` keeps: all that metrics/flops.py counts, but for products through the rank of an adapter.

The output of B (A x) takes as many bytes as that of W x for r products an element: kept, adapters would cost more
memory than no checkpointing at all, which keeps neither. (A mixer's product over just r numbers is taken for one too.)
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
        assert isinstance(part, CausalLM)
        recompute(part.hf, part.spec, cfg.training.checkpointing, part.dropout)
    return pm


def recompute(
    hf: nn.Module, spec: ModelSpec, asked: str | list[str], dropout: DropoutState
) -> None:
    """Replace the forwards of the layers to be recomputed.

    `full`: every layer from its input. `operators`: every layer, but for the outputs of PRODUCTS. A list: the layers of
    these kinds, from their input.

    A layer's forward is replaced rather than the layer wrapped: names stay, and fsdp2's hooks lie outside, so a layer's
    weights are gathered once for its recomputation and backward together.
    """
    if asked == "none":
        return
    policy = partial(_keep_products, _ranks(hf))
    contexts = (
        partial(create_selective_checkpoint_contexts, policy)
        if asked == "operators"
        else noop_context_fn
    )
    for layer in spec.layers:
        if not isinstance(asked, list) or layer.kind in asked:
            module = hf.get_submodule(layer.name)
            module.forward = _recomputed(module.forward, dropout, contexts)


def _ranks(hf: nn.Module) -> frozenset[tuple[int, int]]:
    """(matrices in a stack, rank) of the adapters in a model."""
    return frozenset(
        (adapter.num_experts if isinstance(adapter, ParamWrapper) else 1, rank)
        for adapter in adapter_layers(hf).values()
        for rank in adapter.r.values()
    )


def _keep_products(
    ranks: frozenset[tuple[int, int]], context: object, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = (
        op in PRODUCTS or op.namespace == "shardwise"
    )  # a kernel's, of a linear and its adapter in one
    if op in _LEFT_OPERAND:
        left = args[_LEFT_OPERAND[op]]  # [rows, rank] or [matrices, rows, rank]
        kept = (left.shape[0] if left.ndim == 3 else 1, left.shape[-1]) not in ranks
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(
    forward: Callable[..., torch.Tensor], dropout: DropoutState, contexts: Callable[[], Any]
) -> Callable[..., torch.Tensor]:
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        held = dropout.batch, dropout.rows, dropout.tokens

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            # The backward may come after another micro-batch's forward (pipelines): go back to this one's masks.
            dropout.batch, dropout.rows, dropout.tokens = held
            return forward(*args, **kwargs)

        # No global random state is used in a layer (see models/patches/dropout.py), so none is saved.
        return checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )

    return wrapped
