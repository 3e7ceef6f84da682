"""A step of pairs: the reference's pass over its micro-batches, then the pass that trains.

The reference is the base model: the trained one with its adapters off. So no rank holds another
model, and its pass is an evaluation of the same parts under the same layout. Communication: what an
evaluation sends, and three numbers of each rank's rows to all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shardwise.base.batches import IGNORED, AnyBatch, Batch
from shardwise.base.interfaces import Mesh, Objective, ParallelModel, Run
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.names import adapter_layers
from shardwise.models.preferences import METRICS, Preferences
from shardwise.models.spec import ModelSpec
from shardwise.parallel.reduce import sum_over


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let the part with the head return losses of pairs, and the reference run before it."""
    parts = [part for part in pm.parts if isinstance(part, CausalLM)]
    for part in parts:
        if part.spec.last:
            part.preferences = Preferences(cfg, mesh.device)
    objective = PairsObjective(parts, mesh)
    return replace(pm, run=_with_reference(pm.run, parts, mesh, cfg), objective=objective)


class PairsObjective(Objective):
    """The mean over the pairs of a global batch."""

    names = METRICS

    def __init__(self, parts: Iterable[CausalLM], mesh: Mesh) -> None:
        """Take this rank's parts, of which at most one has pairs."""
        self.mesh = mesh
        self.seen = [part.preferences for part in parts if part.preferences is not None]

    def count(self, batch: AnyBatch) -> torch.Tensor:
        """Return the number of pairs in complete rows."""
        assert isinstance(batch, Batch)
        return ((batch.document_ids.amax(1) + 2) // 2).sum()

    def take(self) -> torch.Tensor:
        """Return METRICS of all pairs since the last call: 28 bytes of each rank go to all."""
        totals = torch.zeros(len(METRICS) + 1, device=self.mesh.device)
        for preferences in self.seen:
            totals += preferences.totals
            preferences.totals.zero_()
        sum_over(totals, self.mesh, ("pp", *self.mesh.gradient_axes))
        return totals[:-1] / totals[-1].clamp(min=1)


def _with_reference(inner: Run, parts: Sequence[CausalLM], mesh: Mesh, cfg: RunConfig) -> Run:
    has_reference = cfg.training.objective == "dpo"

    def run(
        pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        _weigh_tokens(pm, microbatches, parts, mesh)
        if has_reference:
            with _as_reference(parts):
                inner(pm, microbatches, loss_scale, False)
        return inner(pm, microbatches, loss_scale, train)

    return run


def _weigh_tokens(
    pm: ParallelModel, microbatches: Sequence[AnyBatch], parts: Iterable[CausalLM], mesh: Mesh
) -> None:
    """Let losses of tokens be means over the global batch, where its loss is a mean over pairs."""
    pairs = torch.stack([pm.objective.count(batch) for batch in microbatches]).sum()
    targets = torch.stack([batch.num_target_tokens() for batch in microbatches]).sum()
    chosen = torch.stack([_chosen_tokens(batch) for batch in microbatches]).sum()
    counts = sum_over(torch.stack([pairs, targets, chosen]), mesh, mesh.ROW_AXES)
    num_pairs, num_targets, num_chosen = counts.tolist()
    for part in parts:
        if part.router_loss is not None:
            part.router_loss.factor = num_pairs / max(num_targets, 1)
        if (preferences := part.preferences) is not None:
            preferences.token_weight = preferences.sft_weight * num_pairs / max(num_chosen, 1)


def _chosen_tokens(batch: AnyBatch) -> torch.Tensor:
    assert isinstance(batch, Batch)
    return ((batch.labels != IGNORED) & (batch.document_ids % 2 == 0)).sum()


@contextmanager
def _as_reference(parts: Sequence[CausalLM]) -> Generator[None]:
    """Turn adapters off, and let the part with the head keep the sums that it computes."""
    layers = [layer for part in parts for layer in adapter_layers(part.hf).values()]
    seen = [part.preferences for part in parts if part.preferences is not None]
    for preferences in seen:
        preferences.is_reference = True
        preferences.reference.clear()
    _switch(layers, is_off=True)
    try:
        yield
    finally:
        _switch(layers, is_off=False)
        for preferences in seen:
            preferences.is_reference = False


def _switch(layers: Iterable[Any], is_off: bool) -> None:
    # PEFT's own switch would also change what requires a gradient.
    for layer in layers:
        layer._disable_adapters = is_off
