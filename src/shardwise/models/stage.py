"""A pipeline stage: transformers' own base model, with stand-ins for the modules of other stages.

A stand-in passes hidden states through. So the family's own code computes masks, positions and
whatever else it does around its layers, and names stay those of the whole model. What a family does
to the embeddings before its first layer must not be done again by a later stage, which is given
hidden states in their place: see `families.base.Cut`.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.base.batches import AnyBatch, Batch
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM, Inputs
from shardwise.models.dtypes import hidden_dtype
from shardwise.models.families import FAMILIES, Family, family_of
from shardwise.models.part import StagePart
from shardwise.models.spec import ModelSpec


class Stage(StagePart, CausalLM):
    """A module from hidden states to hidden states, the first from ids, the last to the loss."""

    def __init__(
        self,
        hf: PreTrainedModel,
        spec: ModelSpec,
        family: Family,
        cfg: RunConfig,
        whole_model: PreTrainedModel,
    ) -> None:
        super().__init__(hf, spec, family, cfg, whole_model)
        self.carried_dtype = hidden_dtype(cfg)

    # torch.distributed.pipelining gives these arguments.
    def forward(  # ty: ignore[incompatible-method-override]
        self, carried: torch.Tensor, microbatch: torch.Tensor, return_logits: bool = False
    ) -> torch.Tensor:
        """Return hidden states [B, T, D], contiguous; the last stage returns what CausalLM does.

        `carried`: hidden states [B, T, D] from the stage below, which the first stage ignores.
        `microbatch`: int64 [1], the place of its batch in `microbatches`, on the CPU: on a device,
        each forward would wait for it.

        The router loss of a stage that is not the last adds its gradient in this stage's backward.
        """
        batch = self.microbatches[int(microbatch)]
        assert isinstance(batch, Batch)
        inputs = self._inputs(carried, batch)
        if self.spec.last:
            return self.logits_of(batch, inputs) if return_logits else self.loss_of(batch, inputs)
        hidden = self.hidden_of(batch, inputs)
        if self.training and self.router_loss is not None:
            loss = self.router_loss(batch)
            self.router_total = self.router_total + loss.detach()
            hidden = _AddLoss.apply(hidden, loss, self.loss_scale)
        return hidden

    def passed_on(self, batch: AnyBatch) -> torch.Tensor:
        """Return hidden states [B, T, D] on meta."""
        assert isinstance(batch, Batch)
        shape = *batch.input_ids.shape, self.spec.hidden_size
        return torch.empty(shape, dtype=self.carried_dtype, device="meta")

    def hidden_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Return hidden states [B, T, D] after this stage's layers, or after the final norm."""
        hidden = super().hidden_of(batch, inputs)
        if self.spec.last:
            return hidden
        assert hidden.dtype == self.carried_dtype, (hidden.dtype, self.carried_dtype)
        # Zero-bubble schedules detach a stage's output in place, which a view does not allow.
        if hidden._is_view():
            return hidden.clone(memory_format=torch.contiguous_format)
        return hidden.contiguous()

    def _inputs(self, carried: torch.Tensor, batch: Batch) -> Inputs:
        if self.spec.first:
            return {"input_ids": batch.input_ids}
        assert carried.dtype == self.carried_dtype, (carried.dtype, self.carried_dtype)
        return {"inputs_embeds": carried}


def stages(
    hf: PreTrainedModel,
    spec: ModelSpec,
    boundaries: Sequence[int],
    chunks: Sequence[int],
    cfg: RunConfig,
    family: Family | None = None,
) -> tuple[Stage, ...]:
    """Return the stages of a rank, one for each chunk in `chunks`; `hf` stays as it is.

    Chunk c holds the units boundaries[c] to boundaries[c + 1] - 1, where unit 0 is the embedding,
    units 1 to L are the layers, and unit L + 1 is final norm, head and loss. A tied weight is a
    parameter of the first and of the last stage, by one name; where `chunks` has both, it is one
    parameter.
    """
    family = family or family_of(hf)
    assert family.model_type in FAMILIES, (
        f"{family.model_type} is not listed: a rule refuses it in a pipeline"
    )
    last = len(spec.layers) + 1
    assert (boundaries[0], boundaries[-1]) == (0, last + 1), boundaries
    assert all(low < high for low, high in pairwise(boundaries)), boundaries
    made: list[Stage] = []
    shared: dict[int, nn.Parameter] = {}  # parameters by what they are copies of
    for chunk in chunks:
        low, high = boundaries[chunk], boundaries[chunk + 1]
        layers = spec.layers[max(low - 1, 0) : high - 1]
        part = replace(spec, layers=layers, first=low == 0, last=high > last)
        copied = _share(hf, spec, part, family, shared)
        if spec.tied and (part.first or part.last):
            tied = f"{spec.embed}.weight"
            shared = {id(hf.get_parameter(tied)): copied.get_parameter(tied)}
        made.append(Stage(copied, part, family, cfg, hf))
    return tuple(made)


def _share(
    hf: PreTrainedModel,
    spec: ModelSpec,
    part: ModelSpec,
    family: Family,
    shared: dict[int, nn.Parameter],
) -> PreTrainedModel:
    """Return a copy of the model that has the modules of `part` only."""
    stand_ins: dict[str, nn.Module] = {
        layer.name: _PassThrough(hf.get_submodule(layer.name), family)
        for layer in spec.layers
        if layer not in part.layers
    }
    if not part.first and family.cut.dropout:
        stand_ins[family.cut.dropout] = nn.Identity()
    if not part.first and spec.positions:
        stand_ins[spec.positions] = _NoPositions()
    if not part.first and not (part.last and spec.tied):
        stand_ins[spec.embed] = nn.Module()  # has no forward: never called
    if not part.last:
        stand_ins |= {spec.norm: nn.Identity(), spec.head: nn.Module()}
    # A deep copy takes what its memo has for copied already.
    memo: dict[int, Any] = {id(hf.get_submodule(path)): new for path, new in stand_ins.items()}
    copied = copy.deepcopy(hf, memo | shared)
    if not part.first and family.cut.factor:
        setattr(copied.base_model, family.cut.factor, 1.0)
    if not part.first and family.cut.factor_key:
        copied.base_model.config = copy.copy(copied.base_model.config)
        setattr(copied.base_model.config, family.cut.factor_key, False)
    if not part.last:  # transformers would tie weights by their names, which are not all here
        copied._tied_weights_keys, copied.all_tied_weights_keys = {}, {}
    return copied


class _PassThrough(nn.Module):
    """Stands for a layer of another stage."""

    def __init__(self, layer: nn.Module, family: Family) -> None:
        super().__init__()
        self.num_outputs = family.cut.layer_outputs
        if family.cut.layer_attribute:
            setattr(self, family.cut.layer_attribute, getattr(layer, family.cut.layer_attribute))

    def forward(
        self, hidden: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if self.num_outputs is None:
            return hidden
        return hidden, *[None] * (self.num_outputs - 1)


class _NoPositions(nn.Module):
    """Stands for the embedding of positions, which the first stage has added."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)  # without dims, so it changes no dtype


class _AddLoss(torch.autograd.Function):
    """Return hidden states as they are; in the backward, give `loss` the gradient `scale`.

    That is as if `loss` were added to the loss of the last stage.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(torch.full_like(loss, scale))
        return hidden.clone()  # a schedule detaches it in place, which a view does not allow

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        (grad_loss,) = ctx.saved_tensors
        return gradient, grad_loss, None
