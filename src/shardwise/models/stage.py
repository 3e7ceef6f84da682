"""A pipeline stage: transformers' own base model, where modules that pass hidden states through stand for other stages.

So masks, positions and whatever else a family does around its layers are computed by its own code, and names stay those
of the whole model. What a family does to the embeddings before its first layer must not be done again by a later stage,
which is given hidden states in their place: see `families.base.Cut`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import RunConfig
from shardwise.interfaces import Batch
from shardwise.models.causal_lm import CausalLM, Inputs
from shardwise.models.dtypes import hidden_dtype
from shardwise.models.families import FAMILIES, Family, family_of
from shardwise.models.spec import ModelSpec


class Stage(CausalLM):
    """Hidden states in, hidden states out; the first stage reads token ids instead, the last returns the loss."""

    def __init__(
        self,
        hf: PreTrainedModel,
        spec: ModelSpec,
        family: Family,
        cfg: RunConfig,
        whole: PreTrainedModel,
    ) -> None:
        super().__init__(hf, spec, family, cfg, whole)
        self.carried_dtype = hidden_dtype(cfg)
        self.microbatches: Sequence[Batch] = ()  # of the step, set before it
        self.loss_scale = 1.0  # the gradient of the loss in this step's backward, set before it
        self.router_total = torch.zeros(
            ()
        )  # router loss that is not in the loss of the last stage, until it is reset
        self.gradient_below = False
        """Hidden states get a gradient all the way down, even if nothing there is trained."""
        if spec.first:
            hf.get_submodule(spec.embed).register_forward_hook(self._require_gradient)

    def forward(  # ty: ignore[incompatible-method-override]  # what torch.distributed.pipelining calls
        self, carried: torch.Tensor, microbatch: torch.Tensor, return_logits: bool = False
    ) -> torch.Tensor:
        """Hidden states [B, T, D], contiguous; of the last stage, the loss or logits [B, T, V] as of CausalLM.

        `carried`: hidden states [B, T, D] from the stage below; the first stage does not look at it. `microbatch`:
        int64 [1], the place of its batch in `microbatches`; on the CPU, or each forward waits for the device.

        Router loss of a stage that is not the last adds its gradient in this stage's backward.
        """
        batch = self.microbatches[int(microbatch)]
        inputs = self._inputs(carried, batch)
        if self.spec.last:
            return self.logits_of(batch, inputs) if return_logits else self.loss_of(batch, inputs)
        hidden = self.hidden_of(batch, inputs)
        if self.training and self.router_loss is not None:
            loss = self.router_loss(batch)
            self.router_total = self.router_total + loss.detach()
            hidden = _AddLoss.apply(hidden, loss, self.loss_scale)
        return hidden

    def hidden_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Hidden states [B, T, D] after this stage's layers, of the last stage after the final norm."""
        hidden = super().hidden_of(batch, inputs)
        if self.spec.last:
            return hidden
        assert hidden.dtype == self.carried_dtype, (hidden.dtype, self.carried_dtype)
        # Zero-bubble schedules detach a stage's output in place, which a view does not allow.
        return (
            hidden.clone(memory_format=torch.contiguous_format)
            if hidden._is_view()
            else hidden.contiguous()
        )

    def _inputs(self, carried: torch.Tensor, batch: Batch) -> Inputs:
        if self.spec.first:
            return {"input_ids": batch.input_ids}
        assert carried.dtype == self.carried_dtype, (carried.dtype, self.carried_dtype)
        return {"inputs_embeds": carried}

    def _require_gradient(self, embed: nn.Module, args: object, embedded: torch.Tensor) -> None:
        if self.gradient_below and torch.is_grad_enabled():
            embedded.requires_grad_()


def stages(
    hf: PreTrainedModel,
    spec: ModelSpec,
    boundaries: Sequence[int],
    chunks: Sequence[int],
    cfg: RunConfig,
    family: Family | None = None,
) -> tuple[Stage, ...]:
    """The stages of a rank: one for each chunk in `chunks`, cut from a whole model (with its adapters), which stays.

    Chunk c holds the units boundaries[c] to boundaries[c + 1] - 1, where unit 0 is the embedding, units 1 to L are the
    layers, and unit L + 1 is final norm, head and loss. A tied weight is a parameter of the first and of the last
    stage, by one name; where `chunks` has both, it is one parameter. UserError if the family cannot be cut.
    """
    family = family or family_of(hf)
    assert family.model_type in FAMILIES, (
        f"{family.model_type} is not listed: a rule refuses it in a pipeline"
    )
    last = len(spec.layers) + 1
    assert (boundaries[0], boundaries[-1]) == (0, last + 1), boundaries
    assert all(low < high for low, high in pairwise(boundaries)), boundaries
    made: list[Stage] = []
    shared: dict[int, nn.Parameter] = {}  # by what they are copies of
    for chunk in chunks:
        low, high = boundaries[chunk], boundaries[chunk + 1]
        own = replace(
            spec, layers=spec.layers[max(low - 1, 0) : high - 1], first=low == 0, last=high > last
        )
        share = _share(hf, spec, own, family, shared)
        if spec.tied and (own.first or own.last):
            tied = f"{spec.embed}.weight"
            shared = {id(hf.get_parameter(tied)): share.get_parameter(tied)}
        made.append(Stage(share, own, family, cfg, hf))
    return tuple(made)


def _share(
    hf: PreTrainedModel,
    spec: ModelSpec,
    own: ModelSpec,
    family: Family,
    shared: dict[int, nn.Parameter],
) -> PreTrainedModel:
    """A copy of the model that has the modules of `own` only."""
    foreign = [layer.name for layer in spec.layers if layer not in own.layers]
    stand_ins: dict[str, nn.Module] = {
        path: _PassThrough(hf.get_submodule(path), family) for path in foreign
    }
    if not own.first:
        stand_ins |= {path: nn.Identity() for path in [family.cut.dropout] if path}
        stand_ins |= {path: _NoPositions() for path in [spec.positions] if path}
    if not own.first and not (own.last and spec.tied):
        stand_ins[spec.embed] = nn.Module()  # has no forward: never called
    if not own.last:
        stand_ins |= {spec.norm: nn.Identity(), spec.head: nn.Module()}
    # What a deep copy finds in its memo is taken as copied already.
    memo: dict[int, Any] = {
        id(hf.get_submodule(path)): module for path, module in stand_ins.items()
    }
    share = copy.deepcopy(hf, memo | shared)
    if not own.first and family.cut.factor:
        setattr(share.base_model, family.cut.factor, 1.0)
    if not own.last:  # nor does transformers tie anything here, which it would by its names
        share._tied_weights_keys, share.all_tied_weights_keys = {}, {}
    return share


class _PassThrough(nn.Module):
    """Stands for a layer of another stage."""

    def __init__(self, layer: nn.Module, family: Family) -> None:
        super().__init__()
        self.returns_tuple = family.cut.layers_return_tuples
        if family.cut.layer_attribute:
            setattr(self, family.cut.layer_attribute, getattr(layer, family.cut.layer_attribute))

    def forward(
        self, hidden: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor | tuple[torch.Tensor]:
        return (hidden,) if self.returns_tuple else hidden


class _NoPositions(nn.Module):
    """Stands for the embedding of positions, which the first stage has added."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)  # without dims, so it changes no dtype


class _AddLoss(torch.autograd.Function):
    """Hidden states as they are; in the backward, `loss` gets the gradient `scale`, as if it were added to the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(torch.full_like(loss, scale))
        return hidden.clone()  # returned as it is, it would be a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        (of_loss,) = ctx.saved_tensors
        return gradient, of_loss, None
