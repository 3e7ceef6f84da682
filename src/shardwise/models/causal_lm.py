"""The module that a strategy splits: a transformers model from a Batch to its summed loss."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from shardwise.base.batches import IGNORED, Batch
from shardwise.config import RunConfig
from shardwise.kernels.float8 import Float8
from shardwise.models.documents import document_begins, with_documents
from shardwise.models.families import Family
from shardwise.models.masks import without_packed_rows
from shardwise.models.part import ModelPart
from shardwise.models.preferences import Preferences
from shardwise.models.routed_experts import RoutedExperts
from shardwise.models.router_loss import routers_of
from shardwise.models.spec import ModelSpec

Inputs = dict[str, torch.Tensor]
"""Arguments of transformers' models: `input_ids` [B, T], or `inputs_embeds` [B, T, D]."""


class CausalLM(ModelPart):
    """A model that takes a Batch and returns its summed loss, or a pipeline stage of one.

    `models/patches` changes it after it is made. Nothing outside uses the embedding or the head,
    which fsdp shards and a pipeline gives to one stage.
    """

    hf: PreTrainedModel  # ty: ignore[incompatible-mutable-override]  # it is never replaced

    def __init__(
        self,
        hf: PreTrainedModel,
        spec: ModelSpec,
        family: Family,
        cfg: RunConfig,
        whole_model: PreTrainedModel | None = None,
    ) -> None:
        """Take a model; `whole_model` is the one that `hf` is a stage of, if it is a stage."""
        super().__init__(spec, cfg)
        self.hf = hf
        self.family = family
        self.num_routers = len(routers_of(whole_model or hf, family))
        """Routers of the whole model: a stage adds its routers' share of the router loss."""
        self.loss_in_head = False
        self.preferences: Preferences | None = None
        """The loss of pairs, on the part that has the head; None: the sum over target tokens."""
        self.experts: dict[str, RoutedExperts] = {}
        """The forwards of its routed experts, by the paths of their modules."""
        self.float8: dict[nn.Module, Float8] = {}
        """How its linears multiply in 8 bits, where they do."""

    def forward(self, batch: Batch, return_logits: bool = False) -> torch.Tensor:
        """Return the loss summed over target tokens (scalar, float32), or logits [B, T, V].

        In training the router loss is added. Losses are sums, not means: the sum over micro-batches
        and ranks is divided once, by the global number of targets.
        """
        inputs = {"input_ids": batch.input_ids}
        return self.logits_of(batch, inputs) if return_logits else self.loss_of(batch, inputs)

    def hidden_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Return the hidden states [B, T, D] of the transformers model's base."""
        with self._computing(batch):
            inputs = inputs | _positions(batch, self.isolated)
            return self.hf.base_model(**inputs, use_cache=False).last_hidden_state

    def logits_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Return logits [B, T, V]."""
        with self._computing(batch):
            return self.hf(**(inputs | _positions(batch, self.isolated)), use_cache=False).logits

    def loss_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Return the summed loss (scalar, float32), in training with the router loss."""
        loss = self._losses_of(batch, inputs)
        if self.training and self.router_loss is not None:
            loss = loss + self.router_loss(batch)
        return loss

    def _losses_of(self, batch: Batch, inputs: Inputs) -> torch.Tensor:
        """Return the sum over target tokens or, of pairs, over these."""
        preferences, places = self.preferences, batch.target_places
        if preferences is not None and places is None:
            places = (batch.labels != IGNORED).flatten().nonzero().squeeze(1)
        if self.loss_in_head:
            hidden = self.hidden_of(batch, inputs)
            with self.autocast(batch):
                # The module is called: PEFT and fsdp2 act in its call, not on its weight.
                losses = self.hf.get_submodule(self.spec.head)(
                    hidden, labels=batch.labels, rows=places, is_summed=preferences is None
                )
        else:
            logits, labels = self.logits_of(batch, inputs).flatten(0, 1), batch.labels.flatten()
            if preferences is not None:
                logits, labels = logits[places], labels[places]
            reduction = "sum" if preferences is None else "none"
            losses = F.cross_entropy(
                logits.float(), labels, ignore_index=IGNORED, reduction=reduction
            )
        if preferences is None:
            return losses
        assert places is not None
        return preferences.loss(losses, places, batch)

    @contextmanager
    def _computing(self, batch: Batch) -> Generator[None]:
        """Prepare the patches for one forward of `batch`, which runs in this context."""
        unpacks = self.isolated and batch.neighbours is None
        self.dropout.start(with_documents(batch) if unpacks else batch)
        if self.router_loss is not None:
            self.router_loss.start()
        with self.autocast(batch), without_packed_rows():
            yield


def _positions(batch: Batch, isolated: bool) -> Inputs:
    """Return the positions of tokens where a rank has only some tokens of its rows.

    Those of isolated documents begin at 0: attention that scales what has been rotated, or scales
    by position, is not the same for a document that begins elsewhere.

    Complete rows have those that the model makes by itself: given ones would make transformers look
    for packed documents in them, and use slower masks.
    """
    if batch.positions is None:
        return {}
    if not isolated or batch.neighbours is None:
        return {"position_ids": batch.positions}
    begins = document_begins(batch.neighbours.document_ids)
    return {"position_ids": batch.positions - begins.gather(1, batch.positions)}
